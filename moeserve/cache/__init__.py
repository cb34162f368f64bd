"""Paged KV blocks of one rank: who owns them, what lies cached in them. Host data only."""

from moeserve.cache.block_cache import BlockCache, Lease
from moeserve.cache.block_pool import BlockPool
from moeserve.cache.block_table import BlockTable, BlockTables
from moeserve.cache.prefix_tree import Node, PrefixTree

__all__ = ["BlockCache", "BlockPool", "BlockTable", "BlockTables", "Lease", "Node", "PrefixTree"]
