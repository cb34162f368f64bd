"""Which routes ask for a key, and which key.

The API key guards what generates; the admin key guards what shows or changes the job itself. Where
only an API key is set it guards both; where only an admin key is set, whoever can reach the port
may generate. Health and metrics ask for none.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.server.errors import error_answer

API_ROUTES = ("/v1/", "/tokenize", "/detokenize")
ADMIN_ROUTES = ("/experts", "/debug", "/reset_prefix_cache")


class KeyCheck:
    """Middleware: 401 unless the request says "Authorization: Bearer KEY" with the right one."""

    def __init__(self, app: ASGIApp, api_key: str | None, admin_key: str | None) -> None:
        self._app = app
        self._api = None if api_key is None else f"Bearer {api_key}".encode()
        admin = admin_key or api_key
        self._admin = None if admin is None else f"Bearer {admin}".encode()
        self._kind = "API" if admin_key is None else "admin"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, wanted, kind = scope["path"], None, ""
            if path.startswith(ADMIN_ROUTES):
                wanted, kind = self._admin, self._kind
            elif path.startswith(API_ROUTES):
                wanted, kind = self._api, "API"
            if wanted is not None:
                given = dict(scope["headers"]).get(b"authorization", b"")
                if not hmac.compare_digest(given, wanted):  # in constant time
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
