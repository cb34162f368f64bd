"""The pasts of a step's sequences, padded once: runs of an EAGLE head on a device take as many
launches as there are kinds of lengths, not sequences.

A sequence's keys lie in a row of a buffer: what is known of it, behind that this step's own rows,
which are known from then on; and behind all that any one has, at the same columns of each, rows of
drafts, level by level. So only keys of new rows are written after the first run. Sequences are
padded to no more than twice their length: those of a kind share a buffer, as far as it does not get
too large. One with many rows of its own (a prompt) has one for itself.

Knows: keys, values, who sees what. Knows nothing of requests or tokens.

Shape letters: S sequences (of a buffer), m rows of each, C columns of what is known, w rows of a
level, n of all levels so far, k sequences of a run, D hidden, H heads, G key heads, d of a head.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from models.crossing import sent_all
from moeserve.speculate.eagle import EagleHead, Past, eagle_layers

FEW = 16  # rows of its own, up to which a sequence shares a buffer
SHORT = 64  # positions; what is shorter is of one kind
MOST = 1 << 26  # keys of a buffer, as numbers: a product has a copy of them in fp32


@dataclass
class _Buffer:
    """keys, values: of each layer [S, C + room, G, d]."""

    members: list[int]  # numbers of its sequences
    num_rows: int  # m: the most of any
    columns: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass
class _Level:
    """What a run of drafts needs of a buffer. place [S]: of each sequence, the row of those that
    draft, the first one's where it does not; seen [S, C] bool: what is accepted."""

    buffer: _Buffer
    place: Tensor
    seen: Tensor


class PaddedPasts:
    """pasts: of each sequence, by layer; the first run takes them out of these lists, so that their
    memory is free as soon as it was copied. counts: rows of its own in the first run; room: those
    of drafts that may follow."""

    def __init__(
        self,
        head: EagleHead,
        pasts: Seq[list[Past]],
        counts: Seq[int],
        room: int,
        device: torch.device,
    ) -> None:
        self._head, self._pasts, self._counts, self._room = head, pasts, counts, room
        self._device = device
        self._lengths = [len(past[0][0]) for past in pasts]
        kinds: dict[tuple[int, int], list[int]] = {}
        parts: list[list[int]] = []
        for s, (length, m) in enumerate(zip(self._lengths, counts, strict=True)):
            bits = max(length + m, SHORT).bit_length()
            values = ((1 << bits) + room) * head.layers[0].k.shape[0]
            kind = (0, bits) if m <= FEW else (1, s)
            part = kinds.get(kind, [])
            if not part or (len(part) + 1) * values > MOST:
                part = kinds[kind] = []
                parts.append(part)
            part.append(s)
        self._buffers = [
            _Buffer(
                members,
                max(counts[s] for s in members),
                max(self._lengths[s] + counts[s] for s in members),
            )
            for members in parts
        ]

    def first(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The rows of all sequences, one's behind another's: [sum m, D] each, positions [sum m];
        each attends to what is known before it -> features [sum m, D]."""
        starts = list(accumulate(self._counts, initial=0))
        back = [0] * starts[-1]
        end = 0
        host: list[Tensor] = []
        for buffer in self._buffers:
            lengths = [self._lengths[s] for s in buffer.members]
            before = list(accumulate(lengths, initial=0))
            table = [
                [length, before[i], starts[s], self._counts[s] - 1]
                for i, (s, length) in enumerate(zip(buffer.members, lengths, strict=True))
            ]
            host.append(torch.tensor(table))
            for s in buffer.members:
                back[starts[s] : starts[s + 1]] = range(end, end + self._counts[s])
                end += buffer.num_rows
        *tables, backs = sent_all([*host, torch.tensor(back)], self._device)
        maps = [
            self._map(buffer, table) for buffer, table in zip(self._buffers, tables, strict=True)
        ]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = []
            for buffer, (index, rows, mask) in zip(self._buffers, maps, strict=True):
                pasts = [self._pasts[s].pop(0) for s in buffer.members]
                keys = torch.cat([*(past[0] for past in pasts), k])[index]
                values = torch.cat([*(past[1] for past in pasts), v])[index]
                del pasts
                buffer.keys.append(keys)
                buffer.values.append(values)
                known = keys[:, : buffer.columns], values[:, : buffer.columns]
                found.append(_attend(q[rows], *known, mask).flatten(0, 1))
            return torch.cat(found).index_select(0, backs)

        return eagle_layers(self._head, embedded, hidden, positions, attend)

    def _map(self, buffer: _Buffer, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """table [S, 4]: of each sequence its length, where its past begins among all of the
        buffer's, its first row in the run, the number of its last -> what each column is, of pasts
        and rows behind each other [S, C + room]; its rows in the run [S, m]; what they see
        [S, m, C]. What is nobody's is its own last row: no other sequence's could spoil it."""
        length, past, first, last = table[:, :, None].unbind(1)
        columns = torch.arange(buffer.columns + self._room, device=self._device)
        rows = torch.arange(buffer.num_rows, device=self._device)
        own = sum(self._lengths[s] for s in buffer.members) + first
        behind = own + (columns - length).clamp(min=0).minimum(last)
        index = torch.where(columns < length, past + columns, behind)
        seen = columns[: buffer.columns] <= (length + rows)[:, :, None]
        return index, first + rows.minimum(last), seen

    def grown(self) -> list[list[Past]]:
        """Of each sequence, by layer: what was known of it, and its rows of the first run."""
        found: list[list[Past]] = [[] for _ in self._pasts]
        for buffer in self._buffers:
            for i, s in enumerate(buffer.members):
                end = self._lengths[s] + self._counts[s]
                pairs = zip(buffer.keys, buffer.values, strict=True)
                found[s] = [(keys[i, :end], values[i, :end]) for keys, values in pairs]
        return found

    def levels(self, of: Seq[int], known: Tensor) -> PaddedLevels:
        """Of drafts behind the first run. of [k]: the sequences that draft, in order; known [k]
        int64: on the device, how many of each one's columns were accepted."""
        row_of = {s: row for row, s in enumerate(of)}
        buffers = [b for b in self._buffers if not row_of.keys().isdisjoint(b.members)]
        order = [s for buffer in buffers for s in buffer.members]
        where = {s: place for place, s in enumerate(order)}
        host = [[row_of.get(s, 0) for s in buffer.members] for buffer in buffers]
        *places, back = sent_all(
            [torch.tensor(x) for x in (*host, [where[s] for s in of])], self._device
        )
        levels = []
        for buffer, place in zip(buffers, places, strict=True):
            columns = torch.arange(buffer.columns, device=self._device)
            levels.append(_Level(buffer, place, columns < known.index_select(0, place)[:, None]))
        return PaddedLevels(self._head, levels, back, self._room)


class PaddedLevels:
    """`run` level by level."""

    def __init__(self, head: EagleHead, levels: Seq[_Level], back: Tensor, room: int) -> None:
        self._head, self._levels, self._back, self._room = head, levels, back, room

    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor, ancestors: Tensor) -> Tensor:
        """The next w rows of each of the first k sequences: [k * w, D] each, positions [k * w].
        ancestors [k, w, n] bool: which rows of drafts each one sees, these included -> features
        [k * w, D]."""
        k, w, n = ancestors.shape
        assert n <= self._room, "more drafts than there are columns for"
        chosen = [level.place.clamp(max=k - 1) for level in self._levels]
        masks = [
            torch.cat([level.seen[:, None].expand(-1, w, -1), ancestors[place]], dim=-1)
            for level, place in zip(self._levels, chosen, strict=True)
        ]

        def attend(number: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q, keys, values = (x.view(k, w, *x.shape[1:]) for x in (q, keys, values))
            found = []
            for level, place, mask in zip(self._levels, chosen, masks, strict=True):
                buffer, end = level.buffer, level.buffer.columns + n
                known = buffer.keys[number], buffer.values[number]
                for whole, new in zip(known, (keys, values), strict=True):
                    whole[:, end - w : end] = new[place]
                found.append(_attend(q[place], known[0][:, :end], known[1][:, :end], mask))
            return torch.cat(found).index_select(0, self._back[:k]).flatten(0, 1)

        return eagle_layers(self._head, embedded, hidden, positions, attend)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [S, m, H, d], keys and values [S, P, G, d], mask [S, m, P] -> [S, m, H, d] fp32."""
    num, m, heads, dim = q.shape
    groups = keys.shape[2]
    per = heads // groups
    queries = q.float().view(num, m, groups, per, dim).permute(0, 2, 3, 1, 4)
    scores = queries.reshape(num, groups, -1, dim) @ keys.float().permute(0, 2, 3, 1)
    scores = (scores * dim**-0.5).view(num, groups, per, m, -1)
    scores = scores.masked_fill(mask.logical_not()[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).flatten(2, 3)
    out = (weights @ values.float().transpose(1, 2)).view(num, groups, per, m, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(num, m, heads, dim)
