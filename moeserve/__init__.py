"""WHEN things run: requests, scheduling, KV blocks, lockstep, the engine and its API server."""
