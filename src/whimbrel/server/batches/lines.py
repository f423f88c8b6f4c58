"""Lines of batch files: requests as OpenAI and vLLM's `run-batch` write them, and the lines of their answers. Pure functions.

Source: openai-python, types/batch.py and the guide of the Batch API; vllm-project/vllm, entrypoints/openai/run_batch.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgspec

from whimbrel.dialects.common.route import JSON

_POST: Final = "POST"


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch file. Further fields are ignored, as OpenAI and vLLM do."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: str = ""


class LineError(Exception):
    """The fault of a line that is no request. `code` is a word for programs."""

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to the request of a line, as a route gives it over HTTP."""

    status: int
    body: bytes
    media_type: str = JSON
    retry_after: float | None = None
    """Seconds after which the same request may succeed; None if it would fail again."""

    @property
    def is_good(self) -> bool:
        return self.status == 200


Render: TypeAlias = Callable[[str, str, LineAnswer], bytes]
"""(id of the line, custom_id, answer) -> a line without its end."""
_decoder: Final = msgspec.json.Decoder(BatchLine)
_named: Final = msgspec.json.Decoder(_Named)
_syntax: Final = msgspec.json.Decoder(msgspec.Raw)


def parse_line(raw: bytes) -> BatchLine:
    """Return the request of a line. Raises LineError."""
    try:
        line = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        param = next(
            (name for name in BatchLine.__struct_fields__ if f"`{name}`" in str(error) or f"$.{name}" in str(error)), None
        )
        code = "missing_required_parameter" if "missing" in str(error) else "invalid_request"
        raise LineError(code, f"{_plain(error)}.", param, _custom_id(raw)) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise LineError("invalid_json_line", f"the line is no JSON object: {reason}.") from None
    if line.method != _POST:
        raise LineError("invalid_method", f"method is {line.method[:20]!r}; it takes POST.", "method", line.custom_id)
    if not bytes(line.body).startswith(b"{"):
        raise LineError("invalid_request", "body must be an object.", "body", line.custom_id)
    return line


def _custom_id(raw: bytes) -> str:
    try:
        return _named.decode(raw).custom_id
    except msgspec.MsgspecError:
        return ""


def _plain(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]


def id_of(seed: str, number: int) -> str:
    """Return the id of a line, the same whenever it is run. `seed` names the batch."""
    return f"batch_req_{blake2b(f'{seed}/{number}'.encode(), digest_size=12).hexdigest()}"


def refusal(error: LineError, number: int) -> LineAnswer:
    """Return the answer to a line that is no request."""
    return LineAnswer(400, _error_body(error.code, f"line {number:,}: {error.message}", error.param))


def readable(answer: LineAnswer) -> LineAnswer:
    """Return an answer whose body is JSON on one line, as a line of a file can hold it; else the refusal of it."""
    if answer.media_type.partition(";")[0] != JSON:
        kind = answer.media_type[:100] or "of no type"
        text = f"the answer is {kind}, which a line of JSON cannot hold. Ask for float or base64."
        return LineAnswer(400 if answer.is_good else answer.status, _error_body("invalid_value", text, "encoding_format"))
    try:
        if b"\n" not in answer.body:
            _syntax.decode(answer.body)
            return answer
        return LineAnswer(answer.status, msgspec.json.encode(msgspec.json.decode(answer.body)))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        status = 502 if answer.is_good else answer.status
        return LineAnswer(status, _error_body("invalid_answer", "the answer is no JSON.", None))


def render_for_vllm(line_id: str, custom_id: str, answer: LineAnswer) -> bytes:
    """Return the line as `vllm run-batch` writes it: an error beside the status, in place of a body."""
    good = answer.is_good
    return b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":%b}' % (
        _text(line_id), _text(custom_id), answer.status, _text(line_id), answer.body if good else b"null",
        b"null" if good else answer.body,
    )  # fmt: skip


def render_for_openai(line_id: str, custom_id: str, answer: LineAnswer) -> bytes:
    """Return the line as OpenAI writes it: errors of HTTP are bodies too."""
    return b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}' % (
        _text(line_id), _text(custom_id), answer.status, _text(line_id), answer.body
    )  # fmt: skip


def render_not_run(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return OpenAI's line of a request that was not run."""
    error = msgspec.json.encode({"code": code, "message": message})
    return b'{"id":%b,"custom_id":%b,"response":null,"error":%b}' % (_text(line_id), _text(custom_id), error)


def _error_body(code: str, message: str, param: str | None) -> bytes:
    error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def _text(value: str) -> bytes:
    return msgspec.json.encode(value)
