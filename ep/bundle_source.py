"""The serving end of `ep.transfer`: a thread that answers other ranks' requests for bundles, and
the messages that both ends speak.

A request is one frame, an answer one or two: a head, and the bytes asked for. Both are signed with
the job's secret (keyed BLAKE2b). With the first piece of a bundle comes the digest of the whole of
it, keyed too: 1.4 GB/s a core measured.

Knows: sockets, bytes of (layer, local slot), which batch of which plan is served. Knows nothing of
what the bytes mean.
"""

from __future__ import annotations

import enum
import hmac
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import zmq
from torch import Tensor

from ep.bundle import Bundle

Socket = zmq.Socket[bytes]
# (layer, local slot) -> the bundle, whose bytes are as they are when they are read
ReadBundle = Callable[[int, int], Bundle]

PIECE_BYTES = 1 << 20  # of one answer: a rate is kept smoothly, and little memory is in flight
DIGEST_BYTES = 16
NO_BATCH = 1 << 31  # after every batch of a plan
_IDLE = 200  # milliseconds between looks at `closed` while nothing is asked
# plan, batch, layer, slot, offset, length, nonce
REQUEST = struct.Struct("<QIIIQQQ")
# nonce, answer, bundle size; a digest follows
ANSWER = struct.Struct("<QIQ")


class Said(enum.IntEnum):
    PIECE = 0
    NOT_YET = 1
    STALE = 2


@dataclass(frozen=True)
class Opened:
    """What a source serves now: `batch` of `plan`, which is about these layers."""

    plan: int
    batch: int
    layers: frozenset[int]


@dataclass
class BundleSource:
    """The serving thread: answers requests one after the other, reading slots where they lie."""

    context: zmq.Context[Socket]
    host: str
    secret: bytes
    read: ReadBundle
    closed: threading.Event
    opened: Opened = Opened(0, NO_BATCH, frozenset())
    num_refused: int = 0
    address: str = ""
    _digests: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)  # bounded by what each destination asks at once
        self._socket.set(zmq.MAXMSGSIZE, 4096)  # strangers cannot fill our memory
        port = self._socket.bind_to_random_port(f"tcp://{self.host}")
        self.address = f"tcp://{self.host}:{port}"

    def run(self) -> None:
        while not self.closed.is_set():
            if self._socket.poll(_IDLE):
                frames = self._socket.recv_multipart()
                answer = self._answer(frames[-1]) if len(frames) == 2 else None
                if answer is None:
                    self.num_refused += 1  # no answer: it is nobody we know
                else:
                    self._socket.send_multipart([frames[0], *answer], copy=False)
        self._socket.close(linger=0)

    def _answer(self, request: bytes) -> list[Any] | None:
        body, signature = request[: REQUEST.size], request[REQUEST.size :]
        if len(body) != REQUEST.size or not hmac.compare_digest(sign(self.secret, body), signature):
            return None
        plan, batch, layer, slot, offset, length, nonce = REQUEST.unpack(body)
        opened = self.opened
        if (plan, batch) > (opened.plan, opened.batch):
            return [self._head(nonce, Said.NOT_YET, 0)]
        if (plan, batch) < (opened.plan, opened.batch) or layer not in opened.layers:
            return [self._head(nonce, Said.STALE, 0)]
        try:
            bundle = self.read(layer, slot)
        except Exception:  # no such slot: the destination says that the size is wrong
            return [self._head(nonce, Said.PIECE, 0), b""]
        size = bundle.nbytes
        if offset + length > size or length > PIECE_BYTES:
            return [self._head(nonce, Said.PIECE, size), b""]
        digest = self._digest_of((plan, batch, layer, slot), bundle) if offset == 0 else b""
        return [self._head(nonce, Said.PIECE, size, digest), self._payload(bundle, offset, length)]

    def _payload(self, bundle: Bundle, offset: int, length: int) -> Any:
        """The bytes themselves, no copy where they lie in one part: this slot is not written before
        the batch is over, and what is sent later than that fails its checksum."""
        return bundle.cut(offset, length).cpu().numpy().data

    def _digest_of(self, key: tuple[int, ...], bundle: Bundle) -> bytes:
        """Kept for a batch: copies of a hot expert go to many ranks."""
        if self._digests and next(iter(self._digests))[:2] != key[:2]:
            self._digests.clear()
        if key not in self._digests:
            self._digests[key] = digest_of(self.secret, *(part.cpu() for part in bundle.parts))
        return self._digests[key]

    def _head(self, nonce: int, said: Said, size: int, digest: bytes = b"") -> bytes:
        head = ANSWER.pack(nonce, said, size) + digest
        return head + sign(self.secret, head)


def sign(secret: bytes, text: bytes) -> bytes:
    return blake2b(text, digest_size=DIGEST_BYTES, key=secret, person=b"message").digest()


def digest_of(secret: bytes, *parts: Tensor) -> bytes:
    """Of the one run that the parts (uint8, on the host) make."""
    found = blake2b(digest_size=DIGEST_BYTES, key=secret, person=b"bundle")
    for part in parts:
        data: Any = part.numpy().data
        found.update(data)  # releases the GIL
    return found.digest()
