"""A fake OpenAI-style server for tests of the benchmark: its calls go the ways that a test says."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIRST_SECONDS = 0.25  # of the server whose first token is slow
HELD_SECONDS = 0.02  # of the server that takes one call at a time: it gives at most 50 a second
USAGE: dict[str, dict[str, Any]] = {  # that cannot be
    "negative prompt": {"prompt_tokens": -3},
    "no prompt": {"prompt_tokens": 0},
    "text prompt": {"prompt_tokens": "7"},
    "negative answer": {"completion_tokens": -4},
    "cached": {"prompt_tokens_details": {"cached_tokens": 500}},
    "negative cached": {"prompt_tokens_details": {"cached_tokens": -1}},
}
OVERTOLD = {"lie": 1, "liebig": 100}  # usage: so many times what was asked, of one letter


class Handler(BaseHTTPRequestHandler):
    """A peer's server: only /v1/models and streams; `ways` says what call number k is like."""

    protocol_version = "HTTP/1.1"
    ways: list[str] = []
    one_by_one = threading.Lock()
    bodies: list[dict[str, Any]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "peer"}]})
        else:
            self._answer(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.path.startswith("/v1/") or not self.path.endswith("completions"):
            self._answer(404, {"error": {"message": "no such route"}})
            return
        way = self.ways[len(self.bodies) % len(self.ways)]
        self.bodies.append(body)
        if way == "500":
            self._answer(500, {"error": {"message": "it broke"}})
        elif way == "json":
            self._answer(200, {"choices": [{"text": "whole", "finish_reason": "stop"}]})
        else:
            self._stream(way, body["max_tokens"], body.get("messages") is not None)

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, way: str, wanted: int, chat: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        if way == "reset":  # chunks, of which the last never comes
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        if way == "reset":
            self.wfile.write(b'c\r\ndata: {"choi\r\n')
            return
        if way == "queue":
            with self.one_by_one:
                time.sleep(HELD_SECONDS)
        if way == "slow":
            time.sleep(FIRST_SECONDS)
        count = {"empty": 0, "short": wanted - 2, "long": wanted + 1, "cut": 2}.get(way, wanted)
        pack = {"packs": 2, "one": count}.get(way, 1)  # tokens of an event
        for number in range(1 if way in OVERTOLD else count // pack):
            text = " \n" if way == "blank" else "x" * pack
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if way == "thinks":
                said = {"delta": {"content": " ", "reasoning_content": "x"}}
            self._event({"choices": [said | {"finish_reason": None}]})
            if way == "told" and number == 1:
                self._event({"error": {"message": "out of luck"}})
        if way == "bad":
            self.wfile.write(b"data: {nonsense\n\n")
        if way in ("cut", "broken"):
            if way == "broken":  # in the middle of an event
                self.wfile.write(b'data: {"choices": [{"te')
            return
        reason = {"nameless": None, "refused": "abort", "empty": "stop"}.get(way, "length")
        self._event({"choices": [{"text": "", "delta": {}, "finish_reason": reason}]})
        if way != "silent":
            told = count * OVERTOLD.get(way, 1)
            usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": told}
            if way == "tells cached":
                usage["prompt_tokens_details"] = {"cached_tokens": 3}
            self._event({"choices": [], "usage": {**usage, **USAGE.get(way, {})}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: Any) -> None:
        self.wfile.write(b": a comment\ndata: " + json.dumps(content).encode() + b"\n\n")


class Peer:
    """A fake server whose calls go the ways that a test says."""

    def __init__(self) -> None:
        self.handler = type("OwnHandler", (Handler,), {"ways": ["fine"], "bodies": []})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
