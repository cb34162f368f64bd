"""A switch with a delay, for network namespaces of a kernel that has no netem.

    python tap_relay.py SECONDS tap0 NAMESPACE ... -- OUTER

One TAP device `tap0` in each namespace and one, OUTER, in this one; every frame goes to all others
(or to the one whose address was seen), SECONDS later. Ends with its standard input.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000


def open_tap(name: str, namespace: str | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    if namespace is not None:
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        os.close(there)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    libc.setns(home, _CLONE_NEWNET)
    os.close(home)
    return tap


def relay(delay: float, taps: list[int]) -> None:
    known: dict[bytes, int] = {}  # hardware address -> the TAP behind which it is
    due: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        readable, _, _ = select.select([*taps, 0], [], [], wait)
        if 0 in readable:  # our owner has gone
            return
        now = time.monotonic()
        for tap in readable:
            while True:
                try:
                    frame = os.read(tap, 65536)
                except OSError:  # no more, or the device is down
                    break
                known[frame[6:12]] = tap
                to = known.get(frame[:6])
                for other in [to] if to is not None else taps:
                    if other != tap:
                        number += 1
                        heapq.heappush(due, (now + delay, number, other, frame))
        while due and due[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(due)
            try:
                os.write(tap, frame)
            except OSError:  # as a wire would: lost
                continue


if __name__ == "__main__":
    seconds, name, *rest = sys.argv[1:]
    cut = rest.index("--")
    opened = [open_tap(name, namespace) for namespace in rest[:cut]]
    opened.append(open_tap(rest[cut + 1], None))
    print("up", flush=True)
    relay(float(seconds), opened)
