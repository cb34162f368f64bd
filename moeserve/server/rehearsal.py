"""The real front end against fake ranks, in one process: for tests, and to time it alone.

`FakeRank` is a thread that speaks `moeserve.wire` and answers requests from a script. `Rehearsal`
runs the HTTP server on a free port with any number of them. `write_tokenizer` makes a small
checkpoint folder with a byte-level tokenizer and a chat template. Nothing here is used to serve.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
import uvloop
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from moeserve import wire
from moeserve.client import EngineClient
from moeserve.config import ModelSection, ServeConfig, ServerSection
from moeserve.frontend import Server, listen, url_of
from moeserve.metrics import Metrics
from moeserve.request import FinishReason, Request, TokenLogprob, TokenOutput
from moeserve.server.app import create_app
from moeserve.server.service import Service

Script = Callable[[Request], Iterator[TokenOutput]]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'].split('</think>')[-1] }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] }}"
    "{% else %}{{ raise_exception('role ' + m['role'] + ' is not known') }}{% endif %}{% endfor %}"
    "{% if tools is defined %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"
)


def say(*token_ids: int, finish: FinishReason = FinishReason.STOP, step: int = 1) -> Script:
    """A script that gives these tokens, `step` at a time, up to max_tokens."""

    def script(request: Request) -> Iterator[TokenOutput]:
        ids = token_ids[: request.sampling.max_tokens]
        end = finish if len(ids) == len(token_ids) else FinishReason.LENGTH
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            last = start + step >= len(ids)
            yield output(request, piece, end if last else None, first=start == 0)

    return script


def output(
    request: Request, ids: tuple[int, ...], finish: FinishReason | None, *, first: bool = False
) -> TokenOutput:
    """An output as an engine would fill it; log-probabilities are made up: -(id % 7) - 0.5."""
    sampling = request.sampling

    def logprob(token_id: int, count: int) -> TokenLogprob:
        top = tuple((token_id + k, -(token_id % 7) - 0.5 - k) for k in range(count))
        return TokenLogprob(token_id, -(token_id % 7) - 0.5, 1, top)

    prompt: tuple[TokenLogprob | None, ...] | None = None
    if first and sampling.prompt_logprobs is not None:
        count = sampling.prompt_logprobs
        prompt = (None, *(logprob(x, count) for x in request.prompt_token_ids[1:]))
    wanted = sampling.logprobs
    return TokenOutput(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=() if wanted is None else tuple(logprob(x, wanted) for x in ids),
        prompt_logprobs=prompt,
        finish_reason=finish,
        num_cached_tokens=min(4, len(request.prompt_token_ids)),
    )


def echo(request: Request) -> Iterator[TokenOutput]:
    """The default script: the prompt's own tokens, over and over, up to max_tokens."""
    ids, count = request.prompt_token_ids, request.sampling.max_tokens
    if count == 0:
        yield output(request, (), FinishReason.LENGTH, first=True)
    for index in range(count):
        finish = FinishReason.LENGTH if index == count - 1 else None
        yield output(request, (ids[index % len(ids)],), finish, first=index == 0)


class FakeRank:
    """A rank's side of the wire in a thread: one output a request a step, all in one message.

    `received` lists every message that came. `pause` stops the steps (requests are still taken),
    `resume` goes on, `die` closes the connection without a word, `send` says anything.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        script: Script = echo,
        ready: bool = True,
        block_size: int = 16,
        max_model_len: int = 512,
    ) -> None:
        self.rank, self.size, self.script = rank, size, script
        self.block_size, self.max_model_len = block_size, max_model_len
        self.received: list[wire.ToRank] = []
        self.running: dict[str, Iterator[TokenOutput]] = {}
        self._address, self._ready = address, ready
        self._outbox: list[wire.ToFrontEnd] = []
        self._lock = threading.Lock()
        self._paused = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fake-rank-{rank}", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def send(self, *messages: wire.ToFrontEnd) -> None:
        with self._lock:
            self._outbox.extend(messages)

    def become_ready(self) -> None:
        self.send(wire.Ready(self.rank, self.block_size, 64, self.max_model_len, 8, {"fake": True}))

    def die(self) -> None:
        self._over.set()
        self._thread.join()

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [x for x in list(self.received) if isinstance(x, kind)]

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, wire.rank_identity(self.rank))
        dealer.set(zmq.LINGER, 200)
        dealer.connect(self._address)
        dealer.send(wire.encode(wire.Hello(self.rank, self.size, 0, "here")))
        if self._ready:
            self.become_ready()
        while not self._over.is_set():
            with self._lock:
                outbox, self._outbox = self._outbox, []
            for message in outbox:
                dealer.send(wire.encode(message))
            idle = not self.running or self._paused.is_set()
            if dealer.poll(5 if idle else 0):
                if self._take(wire.decode_to_rank(dealer.recv())):
                    dealer.send(wire.encode(wire.Stopped(self.rank)))
                    break
            elif not self._paused.is_set():
                outputs = self._step()
                if outputs:
                    dealer.send(wire.encode(wire.Outputs(self.rank, tuple(outputs))))
        dealer.close()
        context.destroy(linger=200)

    def _take(self, message: wire.ToRank) -> bool:
        """True: it was Stop."""
        self.received.append(message)
        match message:
            case wire.Submit():
                self.running[message.request.request_id] = self.script(message.request)
            case wire.Abort():
                for request_id in message.request_ids:
                    self.running.pop(request_id, None)
            case wire.Stop():
                return True
        return False

    def _step(self) -> list[TokenOutput]:
        outputs = []
        for request_id, script in list(self.running.items()):
            made = next(script, None)
            if made is not None:
                outputs.append(made)
            if made is None or made.finish_reason is not None:
                del self.running[request_id]
        return outputs


class Rehearsal:
    """A context: the front end's HTTP server in a thread, and its fake ranks."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        num_ranks: int = 1,
        script: Script = echo,
        ready: bool = True,
        server: dict[str, Any] | None = None,
        lockstep_timeout: float = 60.0,
        max_model_len: int = 512,
    ) -> None:
        self.config = ServeConfig(
            model=ModelSection(checkpoint=checkpoint, served_name="tiny"),
            server=ServerSection(**(server or {})),
        )
        self.ranks: list[FakeRank] = []
        self.url = ""
        self.died: list[str] = []

        def make_rank(rank: int, address: str) -> FakeRank:
            return FakeRank(
                rank, num_ranks, address, script=script, ready=ready, max_model_len=max_model_len
            )

        self._make_rank = make_rank
        self._num_ranks, self._lockstep_timeout = num_ranks, lockstep_timeout
        self._up = threading.Event()
        self._ready = threading.Event()
        self._expect_ready = ready
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(20)
        if self._expect_ready:
            assert self._ready.wait(20)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        for rank in self.ranks:
            rank.die()

    def on_loop(self, call: Callable[[], object]) -> None:
        """Run something in the server's loop and wait for it."""
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        metrics = Metrics()
        self.client = EngineClient(
            self._num_ranks,
            max_queue=self.config.server.max_queue,
            lockstep_timeout=self._lockstep_timeout,
            on_ready=self._ready.set,
            on_rank_died=lambda error: self.died.append(str(error)),
            on_first_token=metrics.first_token,
            on_finished=metrics.finished,
        )
        self.service = Service(self.config, self.client, metrics)
        metrics.watch(self.client)
        address = self.client.bind()
        self.client.start()
        listener = listen("127.0.0.1", 0)
        self.url = url_of("127.0.0.1", listener)
        self._server = Server(
            uvicorn.Config(
                create_app(self.service),
                lifespan="off",
                log_config=None,  # as the front end has it; its own would change all loggers
                timeout_graceful_shutdown=1,
            )
        )
        self.ranks += [self._make_rank(rank, address) for rank in range(self._num_ranks)]
        self._up.set()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            self.client.close()


def write_tokenizer(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    markers: Sequence[str] = (),
    special: bool = False,
) -> None:
    """A checkpoint folder without weights: byte-level BPE of some 600 tokens, and markers as tokens
    of their own (special ones, if so)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (
        "the quick brown fox jumps over the lazy dog and says hello to the world; 你好，世界 🎉 é"
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", "<think>", "</think>"])
    tokenizer.add_tokens([AddedToken(x, special=special, normalized=False) for x in markers])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 640}))
