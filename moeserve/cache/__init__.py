"""KV blocks of a rank: who holds which block, which blocks are cached, how they are named."""
