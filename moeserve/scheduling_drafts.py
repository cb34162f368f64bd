"""Where a step's drafts find their places: tokens of the budget, blocks of the cache.

Drafts get what others leave. Of the budget behind the decodes at most half while a prompt waits for
some; blocks that are at hand when all others have theirs. Blocks that were grown for drafts are
taken back before anybody is preempted or kept waiting for want of blocks.

Knows: sequences, the cache, what is taken already. Knows nothing of who drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from moeserve.cache import BlockCache
from moeserve.sequence import Sequence
from moeserve.speculate.tree import DraftTree

Taken = dict[Sequence, int]  # tokens that a sequence computes in the step
Trees = dict[Sequence, DraftTree]


def reach(cache: BlockCache, sequence: Sequence) -> int:
    """Positions that own blocks and those at hand have place for, behind what is computed."""
    assert sequence.lease is not None
    blocks = len(sequence.lease.table.ids) + cache.num_available
    return blocks * cache.block_size - sequence.num_computed_tokens


def set_apart(
    drafted: Iterable[Sequence], left: int, running: Seq[Sequence], someone_waits: bool
) -> int:
    """Of `left` tokens of the budget, those kept for drafts: no prompt starves for them."""
    wanted = sum(s.drafts.num_nodes for s in drafted if s.drafts is not None)
    prefills = sum(s.num_remaining_tokens > 1 for s in running)
    if prefills or someone_waits:
        left = min(left // 2, left - prefills)
    return max(min(wanted, left), 0)


def place_drafts(cache: BlockCache, drafted: Iterable[Sequence], left: int, taken: Taken) -> Trees:
    """Add drafts to what is taken, as far as `left` tokens and the blocks at hand go; they are cut
    from their ends -> what is left of them."""
    trees: Trees = {}
    for sequence in drafted:
        tree, lease = sequence.drafts, sequence.lease
        if sequence not in taken or tree is None or sequence.aborted:
            continue  # preempted meanwhile, or to be dropped
        assert lease is not None
        nodes = min(tree.num_nodes, left, reach(cache, sequence) - 1)
        if nodes <= 0:
            continue
        if nodes < tree.num_nodes:
            tree = tree.keep(range(nodes))
        taken[sequence] = 1 + nodes
        cache.grow(lease, sequence.num_computed_tokens + 1 + nodes)
        trees[sequence] = tree
        left -= nodes
    return trees


def grow_ahead(cache: BlockCache, taken: Mapping[Sequence, int], ahead: int, most: int) -> None:
    """Blocks for what is drafted at this step's end, `ahead` positions behind a sequence's rows but
    none behind `most`, where they are at hand."""
    for sequence, count in taken.items():
        end = sequence.num_computed_tokens + count
        if end < len(sequence.tokens):
            continue
        assert sequence.lease is not None
        at_hand = sequence.num_computed_tokens + reach(cache, sequence)
        cache.grow(sequence.lease, min(end + ahead, most, at_hand))


def take_back(cache: BlockCache, running: Iterable[Sequence], taken: Mapping[Sequence, int]) -> int:
    """Blocks that running sequences hold for drafts become free -> how many."""
    return sum(
        cache.shrink(s.lease, s.num_computed_tokens + taken.get(s, 0))
        for s in running
        if s.lease is not None
    )
