"""A running job's /experts routes, as the `moeserve experts` commands call them.

Knows URLs, the admin key and how a server says no. Knows nothing of what is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from moeserve.errors import ConfigError, MoeserveError

_ADDRESS = re.compile(r"[\w.\-]+:\d+(/.*)?|\[[0-9a-fA-F:]+\]:\d+(/.*)?")
STOP_SECONDS = 120.0  # a long recording takes its time to be packed


def is_url(text: str) -> bool:
    """http://host:port, or host:port where no file has that name."""
    if "://" in text:
        return True
    return not Path(text).exists() and bool(_ADDRESS.fullmatch(text))


class ExpertsHttp:
    """Requests to one server; MoeserveError with its reason when it refuses or cannot be reached.

    url: of the server, with or without http:// and a trailing /v1; ConfigError for what is none.
    """

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        if not is_url(url):
            what = "a file" if Path(url).exists() else "no URL"
            raise ConfigError([f"URL {url!r}: is {what}; give one such as http://127.0.0.1:8000"])
        if "://" not in url:
            url = "http://" + url
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        try:
            if httpx.URL(self.url).scheme not in ("http", "https") or not httpx.URL(self.url).host:
                raise ValueError("must be like http://127.0.0.1:8000")
            timeout = httpx.Timeout(15, connect=5)
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except (ValueError, TypeError, httpx.InvalidURL) as error:
            raise ConfigError([f"URL {url!r}: {error}"]) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """The JSON that GET gives."""
        return self._json(self._send("GET", path, params=query))

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON that POST gives."""
        return self._json(self._send("POST", path, json=body))

    def post_for_bytes(
        self, path: str, seconds: float | None = STOP_SECONDS, body: Any = None, **query: Any
    ) -> tuple[bytes, Mapping[str, str]]:
        """(content, headers). seconds: without a byte; None: for ever."""
        patience = httpx.Timeout(seconds, connect=5)
        answer = self._send("POST", path, timeout=patience, params=query, json=body)
        return answer.content, answer.headers

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        if arguments.get("json", 0) is None:
            del arguments["json"]
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise MoeserveError(f"{self.url}{path}: no answer: {reason}") from None
        if response.is_success:
            return response
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = f"HTTP {response.status_code}: {response.text[:200].strip()}"
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += " (give it with --admin-key or in MOESERVE_ADMIN_KEY)"
        raise MoeserveError(f"{self.url}{path}: {message}")

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise MoeserveError(f"{self.url}: what answers there is no moeserve") from None
