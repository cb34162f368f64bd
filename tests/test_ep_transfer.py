"""Bundles between ranks that are threads of one process, over real sockets; what goes wrong."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from ep.bundle import Bundle
from ep.bundle_source import PIECE_BYTES, BundleSource
from ep.transfer import Staging, Transfer, TransferLimits, Trouble, Wanted, staging_buffer

SECRET = b"s" * 32
SIZES = (64, PIECE_BYTES, 2 * PIECE_BYTES + 17)  # bytes of a bundle in each layer
PARTS = (1, PIECE_BYTES, PIECE_BYTES - 5)  # of a bundle lie in one place
SLOTS = 3
QUICK = TransferLimits(batch_seconds=20, silence_seconds=0.3)


class Rank:
    """Random slots and a Transfer over them."""

    def __init__(self, rank: int, secret: bytes = SECRET) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.layers = [
            torch.randint(0, 256, (SLOTS, size), dtype=torch.uint8, generator=generator)
            for size in SIZES
        ]
        self.transfer = Transfer(rank, "127.0.0.1", secret, self.read)

    def read(self, layer: int, slot: int) -> Bundle:
        return Bundle(*self.layers[layer][slot].split(PARTS[layer]))


@contextlib.contextmanager
def ranks(number: int, secrets: dict[int, bytes] | None = None) -> Iterator[list[Rank]]:
    all_ranks = [Rank(r, (secrets or {}).get(r, SECRET)) for r in range(number)]
    try:
        for rank in all_ranks:
            rank.transfer.connect(x.transfer.address for x in all_ranks)
        yield all_ranks
    finally:
        for rank in all_ranks:
            rank.transfer.close()


def want(layer: int, source: int, slot: int) -> Wanted:
    return Wanted((layer, source, slot), layer, source, slot, SIZES[layer])


def start(
    rank: Rank, wanted: list[Wanted], limits: TransferLimits = QUICK, plan: int = 1, batch: int = 0
) -> Staging:
    buffer = staging_buffer(sum(w.num_bytes for w in wanted))
    return rank.transfer.fetch(plan, batch, wanted, buffer, limits)


def end(staging: Staging) -> Trouble:
    deadline = time.monotonic() + 30
    while not staging.ready and staging.trouble is Trouble.NONE:
        assert time.monotonic() < deadline, "neither ready nor failed"
        time.sleep(0.002)
    return staging.trouble


def same(staging: Staging, all_ranks: list[Rank]) -> bool:
    return all(
        torch.equal(staging.bundle(w.name), all_ranks[w.source].read(w.layer, w.slot).cut())
        for w in staging.wanted
    )


def test_bundles_of_any_size_arrive_from_all_and_from_oneself() -> None:
    with ranks(3) as all_ranks:
        for rank in all_ranks:
            rank.transfer.serve(1, 0, range(3))
        wanted = [want(la, r, s) for la in range(3) for r in range(3) for s in range(SLOTS)]
        stagings = [start(rank, wanted) for rank in all_ranks]
        for number, staging in enumerate(stagings):
            assert end(staging) is Trouble.NONE and same(staging, all_ranks)
            remote = sum(w.num_bytes for w in wanted if w.source != number)
            assert staging.bytes_fetched == remote
        assert all(rank.transfer.num_refused == 0 for rank in all_ranks)


def test_who_is_ahead_waits_and_who_is_behind_is_refused() -> None:
    with ranks(2) as (here, there):
        there.transfer.serve(1, 0, [0])
        ahead = start(here, [want(1, 1, 0)], plan=1, batch=1)
        time.sleep(0.1)
        assert not ahead.ready and ahead.trouble is Trouble.NONE
        there.transfer.serve(1, 1, [1])
        assert end(ahead) is Trouble.NONE and same(ahead, [here, there])
        behind = start(here, [want(0, 1, 0)], plan=1, batch=0)
        assert end(behind) is Trouble.STALE and "rank 1 refused" in behind.reason
        other_layer = start(here, [want(0, 1, 0)], plan=1, batch=1)
        assert end(other_layer) is Trouble.STALE
        there.transfer.stop_serving(1)
        assert end(start(here, [want(1, 1, 0)], plan=1, batch=1)) is Trouble.STALE
        there.transfer.serve(2, 0, [0])
        assert end(start(here, [want(0, 1, 2)], plan=2)) is Trouble.NONE


def test_nobody_answers_in_time() -> None:
    with ranks(2) as (here, there):
        limits = TransferLimits(batch_seconds=0.2, silence_seconds=10)
        waiting = start(here, [want(0, 1, 0)], limits)
        assert end(waiting) is Trouble.DEADLINE and "0.2 s" in waiting.reason


def test_a_stalled_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    with ranks(2) as (here, there):
        there.transfer.serve(1, 0, [0])
        payload = BundleSource._payload

        def slow(self: Any, *args: Any) -> Any:
            release.wait(20)
            return payload(self, *args)

        monkeypatch.setattr(BundleSource, "_payload", slow)
        stalled = start(here, [want(0, 1, 0)])
        assert end(stalled) is Trouble.SILENT and "rank 1 has not answered" in stalled.reason
        release.set()
        monkeypatch.undo()
        again = start(here, [want(0, 1, 1)])  # the late answer disturbs nobody
        assert end(again) is Trouble.NONE and same(again, [here, there])


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("checked", [True, False])
def test_a_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch, layer: int, checked: bool) -> None:
    """checked False: the same test without the check, which then lets damage through."""
    with ranks(2) as (here, there):
        there.transfer.serve(1, 0, [layer])
        payload = BundleSource._payload

        def damaged(self: Any, bundle: Bundle, offset: int, length: int) -> Any:
            data = bytearray(payload(self, bundle, offset, length))
            if offset + length == bundle.nbytes:
                data[-1] ^= 1
            return data

        monkeypatch.setattr(BundleSource, "_payload", damaged)
        if not checked:
            monkeypatch.setattr("ep.transfer.digest_of", lambda secret, *parts: b"same")
            monkeypatch.setattr("ep.bundle_source.digest_of", lambda secret, *parts: b"same")
        staging = start(here, [want(layer, 1, 0)])
        if checked:
            assert end(staging) is Trouble.CHECKSUM
            assert "from rank 1" in staging.reason and f"layer {layer}" in staging.reason
        else:
            assert end(staging) is Trouble.NONE and not same(staging, [here, there])


def test_a_slot_that_is_written_while_it_travels_is_found() -> None:
    """What must not happen (a commit during a batch) would at least not go unnoticed."""
    with ranks(2) as (here, there):
        there.transfer.serve(1, 0, [2])
        limits = TransferLimits(max_rate=PIECE_BYTES / 0.2)
        staging = start(here, [want(2, 1, 0)], limits)
        deadline = time.monotonic() + 10
        while not staging.bytes_fetched:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        there.layers[2][0].bitwise_not_()
        assert end(staging) is Trouble.CHECKSUM


def test_strangers_get_no_answer() -> None:
    with ranks(3, {2: b"another job's secret"}) as (here, there, stranger):
        for rank in (here, there):
            rank.transfer.serve(1, 0, range(3))
        staging = start(stranger, [want(0, 1, 0)])
        assert end(staging) is Trouble.SILENT
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.connect(there.transfer.address)
        for noise in (b"", b"x" * 48, b"y" * 4000, b"z" * 100_000):
            socket.send(noise)
        socket.send_multipart([b"several", b"frames"])
        assert not socket.poll(300), "an answer"
        socket.close()
        assert there.transfer.num_refused >= 4
        assert end(start(here, [want(0, 1, 0)])) is Trouble.NONE, "it serves on"


def test_a_request_beyond_the_bundle_or_of_no_slot() -> None:
    with ranks(2) as (here, there):
        there.transfer.serve(1, 0, range(3))
        long = Wanted("long", 0, 1, 0, SIZES[0] + 1)
        assert end(start(here, [long])) is Trouble.SIZE
        assert end(start(here, [Wanted("none", 0, 1, SLOTS, SIZES[0])])) is Trouble.SIZE
        assert end(start(here, [Wanted("own", 0, 0, 0, SIZES[0] + 1)])) is Trouble.SIZE
        assert end(start(here, [want(0, 1, 0)])) is Trouble.NONE


def test_the_rate_holds() -> None:
    with ranks(2) as (here, there):
        there.transfer.serve(1, 0, [2])
        begin = time.monotonic()
        limits = TransferLimits(max_rate=PIECE_BYTES / 0.1)
        staging = start(here, [want(2, 1, s) for s in range(2)], limits)
        assert end(staging) is Trouble.NONE
        # all but the last piece had to be paid for before that one could be asked
        assert time.monotonic() - begin >= (2 * SIZES[2] - PIECE_BYTES) / limits.max_rate


def test_cancelled_batches_end_and_others_follow() -> None:
    with ranks(2) as (here, there):
        waiting = start(here, [want(0, 1, 0)])  # nothing is served yet
        waiting.cancel()
        there.transfer.serve(2, 0, [0])
        after = start(here, [want(0, 1, 0)], plan=2)
        assert end(after) is Trouble.NONE
        assert not waiting.ready and waiting.trouble is Trouble.NONE


def test_an_empty_batch_is_ready() -> None:
    with ranks(2) as (here, _):
        assert end(start(here, [])) is Trouble.NONE


def test_close_ends_the_threads_whatever_they_do() -> None:
    before = threading.active_count()
    with ranks(2) as (here, _):
        start(here, [want(0, 1, 0)])
    assert threading.active_count() == before
