"""Errors as HTTP answers in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import math

from moeserve.errors import EngineFailed, InvalidRequest, JobDied, NotReady, QueueFull
from moeserve.load_desk import RecordingConflict
from moeserve.server.rebalance import RebalanceRefused
from moeserve.server.refusals import ContextTooLong, UnknownModel
from moeserve.server.sse import JsonBytes
from moeserve.tracing_desk import TraceConflict


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JsonBytes:
    return JsonBytes(error_body(message, kind, param, code), status_code=status, headers=headers)


def answer_for(error: Exception) -> JsonBytes:
    """The answer to a typed error; anything else is a fault of ours: 500."""
    match error:
        case ContextTooLong():
            return error_answer(400, str(error), param=error.field, code="context_length_exceeded")
        case InvalidRequest():
            return error_answer(400, str(error), param=error.field, code="invalid_value")
        case UnknownModel():
            return error_answer(404, str(error), param="model", code="model_not_found")
        case RebalanceRefused():
            return error_answer(409, str(error), code="rebalance_refused")
        case RecordingConflict():
            return error_answer(409, str(error), code="recording_conflict")
        case TraceConflict():
            return error_answer(409, str(error), code="trace_conflict")
        case QueueFull():
            headers = {"retry-after": str(math.ceil(error.retry_after))}
            return error_answer(
                429, str(error), "rate_limit_error", code="queue_full", headers=headers
            )
        case NotReady():
            return error_answer(
                503, str(error), "server_error", code="not_ready", headers={"retry-after": "5"}
            )
        case EngineFailed() | JobDied():
            return error_answer(500, str(error), "server_error", code="engine_error")
    return error_answer(500, f"internal error: {type(error).__name__}", "server_error")
