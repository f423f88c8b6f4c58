"""Client and AsyncClient: the engine's verbs over HTTP, numpy arrays out. Needs no PyTorch and no web framework.

Speaks OpenAI's dialect with base64 vectors, so it also works against other servers that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx2
import msgspec

from whimbrel.errors import (
    ComputeError,
    InvalidRequest,
    ModelNotFound,
    NonFinite,
    Overloaded,
    TooLarge,
    TooLong,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
    WhimbrelError,
)
from whimbrel.types import Float32Array, Truncate, read_prompt
from whimbrel.wire import from_base64, to_json

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_TIMEOUT: Final = httpx2.Timeout(600.0, connect=5.0)
_KINDS: Final = (
    InvalidRequest, TooLong, TooLarge, ModelNotFound, UnsupportedMediaType, Unauthorized, Unavailable, ComputeError, NonFinite
)  # fmt: skip
_BY_CODE: Final[Mapping[str | int | None, type[WhimbrelError]]] = {kind.code: kind for kind in _KINDS}
_BY_STATUS: Final[Mapping[int, type[WhimbrelError]]] = {401: Unauthorized, 503: Unavailable}


class _Row(msgspec.Struct):
    index: int
    embedding: str


class _Answer(msgspec.Struct):
    data: list[_Row]


class Client:
    """A server's model. Use it as a context manager, or call `close`; safe to share between threads.

    Raises the errors of whimbrel.errors as the server means them; Unavailable if it cannot be reached.
    """

    def __init__(
        self, base_url: str = DEFAULT_URL, *, api_key: str | None = None, model: str | None = None, timeout: float | None = None
    ) -> None:
        self._model = model
        self._http = httpx2.Client(
            base_url=base_url, headers=_headers(api_key), timeout=_TIMEOUT if timeout is None else timeout
        )

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: Truncate | bool | None = None,
        late_chunking: bool = False,
        split_long: bool = False,
    ) -> Float32Array:
        """Vectors of `texts`: float32, (N, D), or (D,) for a single string. At most 2,048 texts.

        prompt is the name of one of the model's prompts or, with a space or a colon in it, a text to put before each input;
        the rest as in Engine.embed.
        """
        options: dict[str, Any] = {"dimensions": dimensions, "normalize": normalize, "truncate": truncate}
        options |= {"late_chunking": late_chunking or None, "split_long": split_long or None}
        body, count = _body(self._model, texts, prompt, options)
        try:
            response = self._http.post("/v1/embeddings", content=body)
        except (httpx2.RequestError, RuntimeError) as error:
            raise _unreachable(self._http.base_url, error) from error
        return _vectors(response, None if isinstance(texts, str) else count)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """Client for asyncio: the same verbs, awaited."""

    def __init__(
        self, base_url: str = DEFAULT_URL, *, api_key: str | None = None, model: str | None = None, timeout: float | None = None
    ) -> None:
        self._model = model
        self._http = httpx2.AsyncClient(
            base_url=base_url, headers=_headers(api_key), timeout=_TIMEOUT if timeout is None else timeout
        )

    async def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: Truncate | bool | None = None,
        late_chunking: bool = False,
        split_long: bool = False,
    ) -> Float32Array:
        """As Client.embed."""
        options: dict[str, Any] = {"dimensions": dimensions, "normalize": normalize, "truncate": truncate}
        options |= {"late_chunking": late_chunking or None, "split_long": split_long or None}
        body, count = _body(self._model, texts, prompt, options)
        try:
            response = await self._http.post("/v1/embeddings", content=body)
        except (httpx2.RequestError, RuntimeError) as error:
            raise _unreachable(self._http.base_url, error) from error
        return _vectors(response, None if isinstance(texts, str) else count)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers | {"authorization": f"Bearer {api_key}"} if api_key else headers


def _body(model: str | None, texts: str | Iterable[str], prompt: str | None, options: dict[str, Any]) -> tuple[bytes, int]:
    """The body and the number of its texts."""
    name, text = read_prompt(prompt)
    try:
        listed = [texts] if isinstance(texts, str) else list[object](texts)
        if not all(isinstance(item, str) for item in listed):
            raise TypeError("texts must be strings")
        sent = {"input": listed, "encoding_format": "base64", "model": model, "prompt_name": name, "prompt": text}
        body = to_json({key: value for key, value in (sent | options).items() if value is not None})
    except TypeError as error:
        raise InvalidRequest(f"this cannot be sent as JSON: {error}.", param="input") from None
    return body, len(listed)


def _vectors(response: httpx2.Response, count: int | None) -> Float32Array:
    """(count, D), or (D,) of a single text."""
    if response.status_code != 200:
        raise _error(response)
    try:
        rows = sorted(msgspec.json.decode(response.content, type=_Answer).data, key=lambda row: row.index)
        if [row.index for row in rows] != list(range(count or 1)):
            raise ValueError(f"{len(rows)} rows for {count or 1} texts, or their numbers are wrong")
        vectors = from_base64([row.embedding for row in rows])
    except ValueError as error:
        raise _with_status(WhimbrelError(f"the server's answer cannot be read: {error}"), 200, None, None) from None
    return vectors[0] if count is None else vectors


class _Detail(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _Failure(msgspec.Struct):
    error: _Detail


def _error(response: httpx2.Response) -> WhimbrelError:
    """What the status and, if it can be read, the body say."""
    status = response.status_code
    try:
        detail = msgspec.json.decode(response.content, type=_Failure).error
    except ValueError:
        detail = _Detail()
    message = detail.message or f"the server answered {status}: {response.text[:200]}"
    if status == 429:
        return Overloaded(message, retry_after=_retry_after(response.headers.get("retry-after", "")))
    fallback = _BY_STATUS.get(status) or (InvalidRequest if status < 500 else WhimbrelError)
    kind = _BY_CODE.get(detail.code) or fallback
    return _with_status(kind(message), status, detail.param, str(detail.code or "") or None)


def _retry_after(header: str) -> float:
    """Seconds; a date or nonsense counts as one."""
    return float(header) if header.isdecimal() else 1.0


def _with_status(error: WhimbrelError, status: int, param: str | None, code: str | None) -> WhimbrelError:
    """The message of the server has the path of the fault in it already."""
    error.status, error.param, error.code = status, param, code or error.code
    return error


def _unreachable(url: httpx2.URL, error: Exception) -> Unavailable:
    reason = str(error).rstrip(".") or type(error).__name__
    return Unavailable(f"no answer from {url}: {reason}. Is the server running?")
