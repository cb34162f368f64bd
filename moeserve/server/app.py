"""The routes, as a FastAPI application over a Service.

Bodies are read raw and checked by `fields`, answers are written by the writers: FastAPI's own
parsing would cost more than the rest of the way. Knows nothing of processes and signals.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from moeserve.errors import EngineFailed, MoeserveError, NotReady
from moeserve.server import status
from moeserve.server.chat_completions import ChatWriter
from moeserve.server.completions import CompletionWriter
from moeserve.server.errors import answer_for, error_answer, error_body
from moeserve.server.experts import add_experts
from moeserve.server.fields import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from moeserve.server.keys import KeyCheck
from moeserve.server.parse import parse
from moeserve.server.service import Job, Service
from moeserve.server.sse import (
    DONE,
    EventStream,
    JsonBytes,
    event,
    read_body,
    unless_client_leaves,
)
from moeserve.server.trace import add_trace

log = logging.getLogger("moeserve.server")

Body = TypeVar("Body", bound=AnyBody)


class BodyTooLarge(MoeserveError):
    """HTTP 413."""


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="moeserve", version=_version(), docs_url=None, redoc_url=None)
    _add_error_answers(app, service)
    _add_generation(app, service)
    _add_text(app, service)
    _add_status(app, service)
    add_experts(app, service, _body, _schema)
    add_trace(app, service, _body, _schema)
    server = service.config.server
    app.add_middleware(KeyCheck, api_key=server.api_key, admin_key=server.admin_key)
    return app


def _version() -> str:
    try:
        return importlib.metadata.version("moeserve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


async def _body(service: Service, request: HttpRequest, kind: type[Body]) -> Body:
    limit = service.config.server.max_body_bytes
    raw = await read_body(request, limit)
    if raw is None:
        raise BodyTooLarge(f"the body is larger than max_body_bytes={limit}")
    return parse(kind, raw, service.problems)


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:  # OpenAPI would look for references in its own components
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).rpartition("/")[2]
            if name in definitions:
                return inlined(definitions[name])
            return {key: inlined(value) for key, value in node.items()}
        return [inlined(x) for x in node] if isinstance(node, list) else node

    schema = inlined(schema)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _add_generation(app: FastAPI, service: Service) -> None:
    def cut() -> bytes | None:
        if not service.stopped:
            return None
        message = "the server stopped before this answer was read"
        return event(error_body(message, "server_error", None, "engine_error")) + DONE

    async def generate(
        request: HttpRequest, job: Job, writer: ChatWriter | CompletionWriter, stream: bool
    ) -> Response:
        outputs = service.client.open(job.requests)
        if job.may_call:
            service.metrics.wait_for_words(x.request_id for x in job.requests)
            job.on_end = service.metrics.words_ended
        headers = {"x-request-id": job.id}
        if stream:
            return EventStream(writer.events(outputs), outputs.abort, headers, cut)
        try:
            answer = await unless_client_leaves(request, writer.answer(outputs))
        except EngineFailed as error:
            if service.client.failing is None:
                raise
            raise NotReady(str(error)) from None  # nothing was sent: another server can take it
        if answer is None:
            return Response(status_code=499)  # nobody is there to read it
        return JsonBytes(answer, headers=headers)

    @app.post("/v1/completions", summary="Continue a text", openapi_extra=_schema(CompletionBody))
    async def completions(request: HttpRequest) -> Response:
        """Continue prompts (text or token ids); stream=true sends events."""
        body = await _body(service, request, CompletionBody)
        service.check_model(body.model)
        job = await service.completion_job(body)
        return await generate(request, job, CompletionWriter(service, body, job), body.stream)

    @app.post(
        "/v1/chat/completions", summary="Answer a conversation", openapi_extra=_schema(ChatBody)
    )
    async def chat_completions(request: HttpRequest) -> Response:
        """Answer a conversation, tool calls and reasoning apart; stream=true sends events."""
        body = await _body(service, request, ChatBody)
        service.check_model(body.model)
        job = await service.chat_job(body)
        return await generate(request, job, ChatWriter(service, body, job), body.stream)


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", summary="Text to token ids", openapi_extra=_schema(TokenizeBody))
    async def tokenize(request: HttpRequest) -> Response:
        """Token ids of a prompt, or of messages as chat would render them."""
        body = await _body(service, request, TokenizeBody)
        service.check_model(body.model)
        if body.prompt is not None:
            special = body.add_special_tokens
            ids = await service.tokenizer.encode_async(body.prompt, add_special_tokens=special)
        else:
            variables = body.chat_template_kwargs
            _, ids = await service.encode_chat(body, body.tools or None, variables)
        fleet = service.client.fleet
        limit = fleet.max_model_len() if fleet.all_ready else None
        return JsonBytes({"count": len(ids), "max_model_len": limit, "tokens": ids})

    @app.post("/detokenize", summary="Token ids to text", openapi_extra=_schema(DetokenizeBody))
    async def detokenize(request: HttpRequest) -> Response:
        """Text of token ids."""
        body = await _body(service, request, DetokenizeBody)
        service.check_model(body.model)
        text = service.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JsonBytes({"prompt": text})


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", summary="List the served model")
    async def models() -> Response:
        """The model that is served, with its max_model_len."""
        return JsonBytes({"object": "list", "data": [status.model_card(service)]})

    @app.get("/v1/models/{name:path}", summary="Describe the served model")
    async def model(name: str) -> Response:
        """The same, if it has this name; else 404."""
        service.check_model(name)
        return JsonBytes(status.model_card(service))

    @app.get("/health", summary="State of the job and its ranks")
    async def health() -> Response:
        """All that is known of the ranks; 200 when requests are taken, else 503 with the reason."""
        report = status.health(service)
        return JsonBytes(report, status_code=200 if report["ready"] else 503)

    @app.get("/health/ready", summary="Are requests taken?")
    async def ready() -> Response:
        """Whether requests are taken: 200 or 503."""
        report = status.health(service)
        answer = {x: report[x] for x in ("status", "ready", "reason")}
        return JsonBytes(answer, status_code=200 if report["ready"] else 503)

    @app.get("/health/live", summary="Can the job still serve?")
    async def live() -> Response:
        """Whether the job can still serve: 200, or 503 when it failed or stalls."""
        report = status.health(service)
        answer = {x: report[x] for x in ("status", "live", "reason")}
        return JsonBytes(answer, status_code=200 if report["live"] else 503)

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> Response:
        """Prometheus' text form."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/experts", summary="Tokens of each expert since start")
    async def experts() -> Response:
        """Tokens routed to each expert of each layer since start, and the balance."""
        return JsonBytes(status.experts(service))

    @app.get("/debug/state", summary="All that is known of the ranks")
    async def state() -> Response:
        """Everything known of the ranks, for people; programs should read the other routes."""
        return JsonBytes(status.state(service))

    @app.post("/reset_prefix_cache", summary="Drop the prefix cache")
    async def reset_prefix_cache() -> Response:
        """Drop every cached block that no sequence holds."""
        service.client.check_ready()
        service.client.reset_prefix_cache()
        return JsonBytes({"reset": True})

    @app.get("/version", summary="Version of the server")
    async def version() -> Response:
        """The version of moeserve."""
        return JsonBytes({"version": _version()})

    def page(name: str) -> Response:
        file = importlib.resources.files("moeserve.server") / name
        return HTMLResponse(file.read_text(encoding="utf-8"))

    @app.get("/", summary="Page to talk to the model", response_class=HTMLResponse)
    async def talk() -> Response:
        """A page, for a browser, to talk to the model and watch its experts."""
        return page("page.html")

    # Not FastAPI's own: that one loads its scripts from elsewhere, and clusters have no network.
    @app.get("/docs", include_in_schema=False)
    async def routes() -> Response:
        return page("docs.html")


def _add_error_answers(app: FastAPI, service: Service) -> None:
    def counted(answer: Response) -> Response:
        service.metrics.http_errors.labels(str(answer.status_code)).inc()
        return answer

    async def typed(request: HttpRequest, error: Exception) -> Response:
        return counted(answer_for(error))

    async def too_large(request: HttpRequest, error: Exception) -> Response:
        # The rest of the body is not read, so the connection cannot be used again.
        return counted(
            error_answer(413, str(error), code="body_too_large", headers={"connection": "close"})
        )

    async def left(request: HttpRequest, error: Exception) -> Response:
        return Response(status_code=499)  # amid its own body; nobody is there to read it

    async def http(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        return counted(error_answer(error.status_code, message, headers=headers))

    async def unexpected(request: HttpRequest, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return counted(answer_for(error))

    handlers: dict[type[Exception], Callable[[HttpRequest, Exception], Awaitable[Response]]] = {
        MoeserveError: typed,
        BodyTooLarge: too_large,
        ClientDisconnect: left,
        HTTPException: http,
        RequestValidationError: unexpected,
        Exception: unexpected,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
