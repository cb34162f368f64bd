"""Which routes ask for a key, and which key.

The API key guards what generates; the admin key guards what shows or changes the job itself. Where
only an API key is set it guards both; where only an admin key is set, whoever can reach the port
may generate. `/v1/experts` shows the job itself, and may be read with either key. Health and
metrics ask for none.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.server.errors import error_answer

API_ROUTES = ("/v1/", "/tokenize", "/detokenize")
ADMIN_ROUTES = ("/experts", "/debug", "/reset_prefix_cache")
SHARED_ROUTES = ("/v1/experts",)


class KeyCheck:
    """Middleware: 401 unless the request says "Authorization: Bearer KEY" with the right one."""

    def __init__(self, app: ASGIApp, api_key: str | None, admin_key: str | None) -> None:
        self._app = app
        api = [] if api_key is None else [api_key.encode()]
        admin = [] if admin_key is None else [admin_key.encode()]
        # keys that open it (none: it is open), and how the first of them is called
        self._api = (api, "API")
        self._admin = (admin, "admin") if admin else self._api
        self._shared = (api + admin, "API" if api else "admin")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, wanted, kind = scope["path"], list[bytes](), ""
            if path.startswith(ADMIN_ROUTES):
                wanted, kind = self._admin
            elif path.startswith(SHARED_ROUTES):
                wanted, kind = self._shared
            elif path.startswith(API_ROUTES):
                wanted, kind = self._api
            if wanted:
                given = _given(dict(scope["headers"]).get(b"authorization", b""))
                # each in constant time, and all of them
                if not sum(hmac.compare_digest(given, key) for key in wanted):
                    answer = error_answer(
                        401,
                        f"a valid {kind} key is needed: Authorization: Bearer KEY",
                        "authentication_error",
                        code="invalid_api_key",
                        headers={"www-authenticate": "Bearer"},
                    )
                    await answer(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _given(header: bytes) -> bytes:
    """The key of "Bearer KEY"; the name of the scheme may be written in any case (RFC 7235)."""
    scheme, _, key = header.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
