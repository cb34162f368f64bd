"""WHAT is computed, on one device. Knows nothing of HTTP, scheduling or processes."""
