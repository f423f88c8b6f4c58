"""Client and AsyncClient: the engine's verbs over HTTP, numpy arrays out. Needs no PyTorch and no web framework.

Speaks OpenAI's dialect with base64 vectors, so it also works against other servers that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx2
import msgspec

from whimbrel.dialects.openai import ErrorResponse
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
_BY_CODE: Final[Mapping[str | None, type[WhimbrelError]]] = {kind.code: kind for kind in _KINDS}


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
        self._http = httpx2.Client(base_url=base_url, headers=_headers(api_key), timeout=timeout or _TIMEOUT)

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: Truncate | bool | None = None,
    ) -> Float32Array:
        """Vectors of `texts`: float32, (N, D), or (D,) for a single string. At most 2,048 texts.

        prompt is the name of one of the model's prompts or, with a space or a colon in it, a text to put before each input;
        the rest as in Engine.embed.
        """
        options = {"dimensions": dimensions, "normalize": normalize, "truncate": truncate}
        body = _body(self._model, texts, prompt, options)
        try:
            response = self._http.post("/v1/embeddings", content=body)
        except httpx2.TransportError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _vectors(response, single=isinstance(texts, str))

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
        self._http = httpx2.AsyncClient(base_url=base_url, headers=_headers(api_key), timeout=timeout or _TIMEOUT)

    async def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: Truncate | bool | None = None,
    ) -> Float32Array:
        """As Client.embed."""
        options = {"dimensions": dimensions, "normalize": normalize, "truncate": truncate}
        body = _body(self._model, texts, prompt, options)
        try:
            response = await self._http.post("/v1/embeddings", content=body)
        except httpx2.TransportError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _vectors(response, single=isinstance(texts, str))

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


def _body(model: str | None, texts: str | Iterable[str], prompt: str | None, options: dict[str, Any]) -> bytes:
    name, text = read_prompt(prompt)
    sent = {"input": texts if isinstance(texts, str) else list(texts), "encoding_format": "base64", "model": model}
    sent |= {"prompt_name": name, "prompt": text}
    try:
        return to_json({key: value for key, value in (sent | options).items() if value is not None})
    except TypeError as error:
        raise InvalidRequest(f"this cannot be sent as JSON: {error}.", param="input") from None


def _vectors(response: httpx2.Response, *, single: bool) -> Float32Array:
    if response.status_code != 200:
        raise _error(response)
    try:
        rows = msgspec.json.decode(response.content, type=_Answer).data
        vectors = from_base64([row.embedding for row in sorted(rows, key=lambda row: row.index)])
    except ValueError as error:
        raise WhimbrelError(f"the server's answer cannot be read: {error}") from None
    return vectors[0] if single else vectors


def _error(response: httpx2.Response) -> WhimbrelError:
    status = response.status_code
    try:
        detail = msgspec.json.decode(response.content, type=ErrorResponse).error
    except msgspec.MsgspecError:
        return _with_status(WhimbrelError(f"the server answered {status}: {response.text[:200]}"), status, None, None)
    if status == 429:
        return Overloaded(detail.message, retry_after=float(response.headers.get("retry-after") or 1))
    kind = _BY_CODE.get(detail.code) or (InvalidRequest if status < 500 else WhimbrelError)
    return _with_status(kind(detail.message), status, detail.param, detail.code)


def _with_status(error: WhimbrelError, status: int, param: str | None, code: str | None) -> WhimbrelError:
    """The message of the server has the path of the fault in it already."""
    error.status, error.param, error.code = status, param, code or error.code
    return error


def _unreachable(url: httpx2.URL, error: Exception) -> Unavailable:
    return Unavailable(f"no answer from {url}: {error or type(error).__name__}. Is the server running?")
