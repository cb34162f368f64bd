"""WHERE experts live: groups, placement, load windows. Knows nothing of requests or of models."""
