"""The address of a job's server as others reach it, and what the server answers there."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from launch.cluster.watch import Progress

_EVERYWHERE = ("0.0.0.0", "::", "[::]", "")
PATIENCE = 5.0


def public_url(progress: Progress) -> str:
    """A server that listens on all addresses is reached by the name of its node. While its ranks
    start again: the one it had."""
    told = progress.url or progress.last_url
    url = urllib.parse.urlsplit(told)
    if url.hostname not in _EVERYWHERE:
        return told
    here = progress.front_host == socket.gethostname()
    host = "127.0.0.1" if here else progress.front_host
    return f"{url.scheme}://{host}:{url.port}"


def ask_health(url: str) -> dict[str, Any] | str:
    """Its /health, or why there is none."""
    try:
        with _open(f"{url}/health") as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:  # 503: not ready, with the same body
        try:
            return dict(json.load(error))
        except ValueError:
            return f"{url}/health answers {error.code}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"no answer from {url}: {reason}"


def _open(url: str) -> Any:
    # No proxy: nodes of a cluster are next door.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(url, timeout=PATIENCE)
