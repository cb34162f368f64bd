"""Does an error mean that another rank is gone? Then this rank is fine, and must not be blamed.

When one rank dies, the collectives of all others break a moment later. Those failures are
secondary: whoever reports looks for the rank that did not say so. Knows the texts and types of the
libraries by which ranks talk; imports none of them.
"""

from __future__ import annotations

# By name, so that a process without torch can ask: dispatch.base, moeserve.lockstep, torch.
_PEER_TYPES = {"PeerError", "PeerFailed", "DistBackendError", "DistNetworkError"}
# What gloo, the store and DeepEP say when the other end is gone: plain RuntimeErrors.
_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "Socket Timeout",
    "failed to recv",
    "gloo/transport",
    "Rank closed the connection",
    "recvValue failed",
    "sendBytes failed",
    "DeepEP error: timeout",
    "DeepEP error: CPU recv timeout",
)


def is_lost_peer(error: BaseException) -> bool:
    """True when the cause lies with another rank."""
    chain: BaseException | None = error
    while chain is not None:
        if any(kind.__name__ in _PEER_TYPES for kind in type(chain).__mro__):
            return True
        if isinstance(chain, RuntimeError) and any(t in str(chain) for t in _PEER_TEXTS):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False
