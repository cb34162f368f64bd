"""`moeserve chat`: a conversation with a server over HTTP, streamed.

Works on a terminal and in a pipe (each line of stdin is one message). Knows the OpenAI-style
protocol; nothing of engines.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Generator, Iterator

import httpx

from moeserve.errors import ConfigError, MoeserveError

HELP = (
    "/reset forgets the conversation, /help shows this, /quit or /exit (or Ctrl-D) leaves, "
    "Ctrl-C stops an answer"
)
COMMANDS = ("/reset", "/help", "/quit", "/exit")
_COMMAND = re.compile(r"/[A-Za-z]+")  # /etc/hosts or "/ 2" is a message


class Chat:
    """A conversation: what was said so far, and the server it goes to."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        system: str | None = None,
        max_tokens: int = 512,
        temperature: float = 0.7,
        api_key: str | None = None,
    ) -> None:
        if "://" not in url:
            url = "http://" + url
        self.url = _checked(url).rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Loading a prompt may take long; connecting may not.
        timeout = httpx.Timeout(600, connect=5)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        self._model, self._system = model, system
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self.messages: list[dict[str, str]] = []
        self._terminal = True

    def run(self) -> None:
        """Talk until the input ends. MoeserveError if the server cannot be reached."""
        self.reset()
        self._terminal = terminal = sys.stdin is not None and sys.stdin.isatty()
        with self._http:
            if self._model is None:
                self._model = self._first_model()
            if terminal:
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  (line editing and history for input())
                print(f"{self._model} at {self.url}. {HELP}.", file=sys.stderr)
            failed = False
            for line in self._lines(terminal):
                if line in ("/quit", "/exit"):
                    break
                try:
                    failed = self._take(line) and failed
                except MoeserveError as error:
                    failed = True
                    print(f"moeserve: {error}", file=sys.stderr)
            if failed and not terminal:
                raise SystemExit(1)

    def _take(self, line: str) -> bool:
        """Do what a line says -> whether an earlier failure still counts. MoeserveError."""
        if line == "/reset":
            self.reset()
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif (name := line.partition(" ")[0]) in COMMANDS:
            raise MoeserveError(f"{name} stands alone on its line; {line!r} was not sent")
        elif _COMMAND.fullmatch(name):
            raise MoeserveError(f"{name}: no such command; valid are {', '.join(COMMANDS)}")
        elif line:
            self.say(line)
            return False
        return True

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> str:
        """Send a message, print the answer as it comes, keep both. The answer so far on Ctrl-C
        (on a terminal; in a pipe Ctrl-C ends the command)."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            # Closing the stream at Ctrl-C is what aborts the request on the server.
            with contextlib.closing(self._stream()) as pieces:
                for piece in pieces:
                    answer += piece
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
            if not self._terminal:
                raise  # a pipe's next message was not written knowing this
        except MoeserveError:
            if not answer:
                self.messages.pop()  # as if it had not been said
            raise
        finally:
            if answer:
                print(flush=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _lines(self, terminal: bool) -> Iterator[str]:
        if not terminal:
            try:
                yield from (line.strip() for line in sys.stdin or ())
            except UnicodeDecodeError as error:
                raise MoeserveError(f"standard input: not UTF-8 text ({error.reason})") from None
            return
        while True:
            try:
                yield input("> ").strip()
            except KeyboardInterrupt:
                print(file=sys.stderr)  # a half-written line is dropped, as in a shell
            except EOFError:
                print(file=sys.stderr)
                return

    def _first_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise MoeserveError(f"no server answers at {self.url}: {error}") from None
        self._check(response)
        try:
            return response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise MoeserveError(f"{self.url} does not list models as an OpenAI-style API") from None

    def _stream(self) -> Generator[str, None, None]:
        body = {"model": self._model, "messages": self.messages, "stream": True, **self._options}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    self._check(response)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield from self._pieces(json.loads(data))
        except httpx.HTTPError as error:
            raise MoeserveError(f"{self.url}: {error or type(error).__name__}") from None
        raise MoeserveError(f"{self.url}: the stream ended before it was done")

    @staticmethod
    def _pieces(event: dict[str, object]) -> Iterator[str]:
        if isinstance(error := event.get("error"), dict):
            raise MoeserveError(str(error.get("message", error)))
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if thought := choice["delta"].get("reasoning_content"):
                print(thought, end="", file=sys.stderr, flush=True)  # shown, not sent back
            if content := choice["delta"].get("content"):
                yield content

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.OK:
            return
        try:
            message = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = response.text[:200].strip() or response.reason_phrase
        hint = ""
        if response.status_code == httpx.codes.UNAUTHORIZED:
            hint = " (give the server's key with --api-key or in MOESERVE_API_KEY)"
        raise MoeserveError(f"{self.url}: HTTP {response.status_code}: {message}{hint}")


def _checked(url: str) -> str:
    valid = "must be a server's address, such as http://127.0.0.1:8000"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError([f"URL {url!r}: {valid} ({error})"]) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError([f"URL {url!r}: {valid}"])
    return url
