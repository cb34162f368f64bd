"""What a cluster of GPUs can serve, from a model's config alone: memory, traffic, times."""
