"""`moeserve chat` against a small stand-in for a server: history, streams, errors, stopping."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launch.chat import Chat
from moeserve.errors import ConfigError, MoeserveError


class StandIn(BaseHTTPRequestHandler):
    """Answers "<n> messages" in two pieces; what it says otherwise depends on the last message."""

    asked: list[dict]

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "stand-in"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body | {"auth": self.headers.get("Authorization")})
        last = body["messages"][-1]["content"]
        if last == "refuse":
            self.reply(400, {"error": {"message": "messages: not like this"}})
            return
        if last == "locked":
            self.reply(401, {"error": {"message": "give the key"}})
            return
        self.send_response(200)
        self.end_headers()
        deltas = [{"role": "assistant"}, {"content": f"{len(body['messages'])} "}]
        deltas += [{"reasoning_content": "hm"}, {"content": "messages"}]
        for delta in deltas:
            self.event({"choices": [{"delta": delta}]})
        if last == "fail":
            self.event({"error": {"message": "rank 1 died"}})
        elif last != "break":
            self.event({"choices": [], "usage": {"total_tokens": 3}})
            self.wfile.write(b": ping\n\ndata: [DONE]\n\n")

    def event(self, data: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def reply(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict]]]:
    handler = type("Handler", (StandIn,), {"asked": []})
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{web.server_address[1]}", handler.asked
    web.shutdown()
    web.server_close()
    thread.join()


def talk(monkeypatch, chat: Chat, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    chat.run()


def test_a_pipe_is_a_conversation(server, monkeypatch, capsys):
    url, asked = server
    talk(
        monkeypatch, Chat(url, system="Be brief.", temperature=0.1), "one", "", "two", "/quit", "x"
    )
    assert capsys.readouterr().out == "2 messages\n4 messages\n"
    assert [m["role"] for m in asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][2]["content"] == "2 messages", "reasoning is not sent back"
    assert asked[0]["model"] == "stand-in" and asked[0]["temperature"] == 0.1
    assert len(asked) == 2


def test_reset_forgets_all_but_the_system_message(server, monkeypatch):
    url, asked = server
    talk(monkeypatch, Chat(url, system="Be brief."), "one", "/reset", "two")
    assert [m["content"] for m in asked[1]["messages"]] == ["Be brief.", "two"]


def test_url_forms_and_key(server, monkeypatch):
    url, asked = server
    talk(monkeypatch, Chat(url.removeprefix("http://") + "/v1/", api_key="secret"), "one")
    assert asked[0]["auth"] == "Bearer secret"


def test_a_refused_message_is_said_and_forgotten(server, monkeypatch, capsys):
    url, asked = server
    talk(monkeypatch, Chat(url), "refuse", "one")
    assert "HTTP 400: messages: not like this" in capsys.readouterr().err
    assert [m["content"] for m in asked[1]["messages"]] == ["one"]


def test_a_pipe_whose_last_message_failed_ends_with_1(server, monkeypatch, capsys):
    url, _ = server
    with pytest.raises(SystemExit) as end:
        talk(monkeypatch, Chat(url), "refuse")
    assert end.value.code == 1


@pytest.mark.parametrize("word, said", [("fail", "rank 1 died"), ("break", "before it was done")])
def test_a_stream_that_fails_is_not_an_answer(server, word, said):
    chat = Chat(server[0], model="stand-in")
    with pytest.raises(MoeserveError, match=said):
        chat.say(word)


def test_ctrl_c_stops_the_answer_and_keeps_its_start(server, monkeypatch, capsys):
    chat = Chat(server[0], model="stand-in")
    closed = []

    def stream():
        try:
            yield "The start"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(chat, "_stream", stream)
    assert chat.say("go on") == "The start"
    assert closed == [True]
    assert chat.messages[-1] == {"role": "assistant", "content": "The start"}


@pytest.mark.parametrize("line", ["/foo", "/foo bar", "/Reset", "/reset now"])
def test_an_unknown_command_is_no_message(server, monkeypatch, capsys, line):
    url, asked = server
    with pytest.raises(SystemExit) as end:
        talk(monkeypatch, Chat(url), "one", line)
    assert end.value.code == 1 and len(asked) == 1
    said = capsys.readouterr().err
    assert line.split()[0] in said and ("/help, /quit" in said or "stands alone" in said)


@pytest.mark.parametrize("line", ["/etc/hosts is a file", "/ 2 = 1", "1/2", "//x"])
def test_a_slash_alone_makes_no_command(server, monkeypatch, line):
    url, asked = server
    talk(monkeypatch, Chat(url), line)
    assert asked[0]["messages"][-1]["content"] == line


def test_a_missing_key_is_explained(server, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        talk(monkeypatch, Chat(server[0]), "locked")
    said = capsys.readouterr().err
    assert "HTTP 401" in said and "--api-key" in said and "MOESERVE_API_KEY" in said


def test_ctrl_c_in_a_pipe_ends_it(server, monkeypatch):
    chat = Chat(server[0], model="stand-in")

    def stream():
        yield "The start"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_stream", stream)
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, chat, "one", "two")


@pytest.mark.parametrize("url", ["ftp://host", "http://[::1", "http://", "http://host:port"])
def test_an_address_that_is_none(url):
    with pytest.raises(ConfigError, match="such as http://127.0.0.1:8000"):
        Chat(url)


def test_no_server():
    with pytest.raises(MoeserveError, match="no server answers at http://127.0.0.1:9"):
        Chat("127.0.0.1:9").run()
