"""Ollama's API for embeddings. Pure functions over bytes.

Options of text generation are ignored. Unlike Ollama, /api/embed refuses `dimensions` beyond the width of vectors, and
/api/embeddings refuses texts that exceed the limit. Source: ollama/ollama, api/types.go and server/routes.go.
"""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from math import inf
from typing import Annotated, Any, Final

import msgspec

from whimbrel.dialects.common.answers import answer_type, described
from whimbrel.dialects.common.bodies import count, decode, holds, schema
from whimbrel.dialects.common.operations import Keep, Pull
from whimbrel.dialects.common.responses import JSON, Response, ServedModel, json_answer, served_names
from whimbrel.dialects.common.route import ANY, ErrorTerms, GetRoute, Parsed, Route, ready
from whimbrel.dialects.common.schemas import MAX_INPUTS
from whimbrel.errors import InvalidRequest, Location, ModelNotFound, Overloaded, RateLimited, TooLong, WhimbrelError
from whimbrel.types.request import Request, Truncate
from whimbrel.types.result import Result
from whimbrel.wire.json_base64 import to_json
from whimbrel.wire.whole_numbers import as_whole

VERSION: Final = "0.12.0"
"""A version of Ollama that has all of these routes; clients compare it with the version that they need."""

_LINES: Final = "application/x-ndjson"
_CHANGES_NUMBERS: Final = ("rope_frequency_base", "rope_frequency_scale")
_NEVER: Final = "2318-01-01T00:00:00Z"
"""The time at which a model that stays is unloaded; Ollama says some 292 years from now."""
_FOREVER: Final = 2**63 / 1e9
"""Seconds above which Ollama has no duration."""
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART: Final = re.compile(rf"(\d+(?:\.\d*)?|\.\d+)({'|'.join(_UNITS)})", re.ASCII)
_DURATION: Final = re.compile(rf"[+-]?(?:0|(?:{_DURATION_PART.pattern})+)", re.ASCII)
_MAX_NAME: Final = 200
_LEVELS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}


class OllamaFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both routes that encode texts."""

    model: Annotated[str | None, schema("The served model's name, with or without `:latest`.")] = None
    options: Annotated[
        dict[str, Any] | None,
        schema(
            "`num_ctx` is the limit of tokens per text, up to the model's maximum.",
            properties={"num_ctx": {"type": ["integer", "null"], "minimum": 0}} | dict.fromkeys(_CHANGES_NUMBERS, False),
        ),
    ] = None
    keep_alive: Annotated[
        float | str | None,
        schema(
            "With an operator's key: seconds, or a text as `10m`, for which a model stays loaded after its last request; 0 "
            "unloads it, less keeps it. Ignored with other keys, and for models that are always kept."
        ),
    ] = None


class OllamaEmbedRequest(OllamaFields, frozen=True, kw_only=True):
    input: Annotated[
        str | list[str] | None,
        count(MAX_INPUTS, " inputs", least=0).says(
            "A text or at most {most} texts. Without any, or for an empty text, there are no vectors."
        ),
    ] = None
    truncate: Annotated[
        bool | None, schema("Cut the end of texts that are too long; `false` makes them an error. Default: true.")
    ] = None
    dimensions: Annotated[
        int | None,
        holds(lambda number: number >= 0, "must be a number of columns, is {value:,}.", minimum=0).says(
            "Keep the first N columns of each vector; for models trained with Matryoshka loss. 0 keeps all."
        ),
    ] = None


OllamaEmbedResponse: Final = answer_type(
    "OllamaEmbedResponse", "Answer of POST /api/embed; durations in nanoseconds.",
    model=str, embeddings=described(list[list[float]], "Vectors of norm 1, whatever the model's default."),
    total_duration=int, load_duration=int, prompt_eval_count=int,
)  # fmt: skip


class OllamaEmbeddingsRequest(OllamaFields, frozen=True, kw_only=True):
    prompt: Annotated[str | None, schema("A text. Without it, or for an empty text, there is no vector.")] = None


OllamaEmbeddingsResponse: Final = answer_type(
    "OllamaEmbeddingsResponse", "Answer of POST /api/embeddings.",
    embedding=described(list[float], "The pooled vector, not normalised."),
)  # fmt: skip


class ShowRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    name: Annotated[str | None, schema("The same as `model`.")] = None


class PullRequest(ShowRequest, frozen=True, kw_only=True):
    stream: Annotated[bool | None, schema("Answer in lines of JSON. Default: true.")] = None
    insecure: Annotated[bool | None, schema("`true` is refused with an operator's key, and ignored with others.")] = None


PullResponse: Final = answer_type(
    "PullResponse", "Answer of POST /api/pull, or a line of it; lines over a file have its digest and sizes in bytes.",
    status=str, digest=(str, ""), total=(int, 0), completed=(int, 0),
)  # fmt: skip
ModelDetails: Final = answer_type(
    "ModelDetails", "The kind of a model.",
    family=str, families=list[str], quantization_level=str, parameter_size=(str, ""), format=(str, "safetensors"),
    parent_model=(str, ""),
)  # fmt: skip
ShowResponse: Final = answer_type(
    "ShowResponse", "Answer of POST /api/show.",
    details=ModelDetails, model_info=dict[str, str | int], capabilities=list[str], modelfile=(str, ""), parameters=(str, ""),
    template=(str, ""),
)  # fmt: skip
_LISTED: Final = {"name": str, "model": str, "digest": str, "details": ModelDetails, "size": (int, 0)}
ListedModel: Final = answer_type(
    "ListedModel", "A model that is served. `size` is 0; `digest` is made from the model's card.", **_LISTED
)
RunningModel: Final = answer_type(
    "RunningModel", "A model that is loaded.", **_LISTED,
    size_vram=described(int, "Bytes of `size` that are on a GPU.", 0), context_length=(int, 0),
    expires_at=described(str, "Time at which it is unloaded if no request comes; in 2318 if it stays.", _NEVER),
)  # fmt: skip
ListResponse: Final = answer_type("ListResponse", "Answer of GET /api/tags.", models=list[ListedModel])
ProcessResponse: Final = answer_type("ProcessResponse", "Answer of GET /api/ps.", models=list[RunningModel])
VersionResponse: Final = answer_type("VersionResponse", "Answer of GET /api/version.", version=str)


def parse_embed(raw: bytes) -> Parsed[OllamaEmbedRequest]:
    body = decode(OllamaEmbedRequest, raw)
    texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input or ())
    truncate: Truncate = "never" if body.truncate is False else "right"
    return Parsed(body, _request(body, texts, truncate=truncate, dimensions=body.dimensions or None, normalize=True))


def parse_embeddings(raw: bytes) -> Parsed[OllamaEmbeddingsRequest]:
    body = decode(OllamaEmbeddingsRequest, raw)
    return Parsed(body, _request(body, [body.prompt] if body.prompt else [], truncate="never", normalize=False))


def _request(body: OllamaFields, texts: list[str], **more: Any) -> Callable[[ServedModel], Request | None]:
    """Return the function from a model to its Request, or to None without texts. `num_ctx` cannot raise the model's maximum."""
    options = body.options or {}
    for name in _CHANGES_NUMBERS:
        if name in options:
            raise InvalidRequest("cannot be set here: positions are as the checkpoint says.", param=f"options.{name}")
    limit = as_whole(options.get("num_ctx"))
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequest(f"must be a number of tokens, is {limit!r}.", param="options.num_ctx")

    def request(model: ServedModel) -> Request | None:
        is_limit = bool(limit) and limit < model.plan.max_length
        return Request(texts, ("dense",), max_tokens=limit if is_limit else None, **more) if texts else None

    return request


def parse_show(raw: bytes) -> Parsed[ShowRequest]:
    body = decode(ShowRequest, raw)
    return ready(ShowRequest(model=body.model or body.name), None)


def parse_pull(raw: bytes) -> Parsed[PullRequest]:
    body = decode(PullRequest, raw)
    return ready(msgspec.structs.replace(body, model=body.model or body.name), None)


def render_pull(body: PullRequest, result: None, model: ServedModel) -> bytes | Response:
    """Return the answer for a model that is there; nothing is pulled."""
    return _SUCCESS if body.stream is False else Response([_line("pulling manifest"), b"%b\n" % _SUCCESS], _LINES)


def pull_of(body: PullRequest) -> Pull:
    """Return the model that an operator wants to have. Raises InvalidRequest."""
    name = (body.model or "").strip().removesuffix(":latest")
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise InvalidRequest(f"must be a hub id, as owner/name, of at most {_MAX_NAME} characters.", param="model")
    if body.insecure:
        raise InvalidRequest(
            "is not possible here: the variable HF_ENDPOINT says which hub is asked, and how.", param="insecure"
        )
    if body.stream is False:
        return Pull(name, JSON, b"", _file_line, _SUCCESS, _failure)
    closing = b"".join(map(_line, ("verifying sha256 digest", "writing manifest", "success")))
    return Pull(name, _LINES, _line("pulling manifest"), _file_line, closing, _failure)


def _file_line(digest: str, total: int, completed: int) -> bytes:
    name = digest.removeprefix("sha256:")[:12]
    return _line(f"pulling {name}", digest=digest, total=total, **({"completed": completed} if completed else {}))


def _failure(reason: str) -> bytes:
    return b"%b\n" % render_error(WhimbrelError(reason))


def _line(status: str, **more: Any) -> bytes:
    return b"%b\n" % msgspec.json.encode({"status": status} | more)


_SUCCESS: Final = msgspec.json.encode({"status": "success"})


def keep_of(body: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> Keep | None:
    """Return the time for which an operator wants a model to stay. Raises InvalidRequest."""
    if body.keep_alive is None:
        return None
    seconds = _seconds(body.keep_alive)
    texts = body.input if isinstance(body, OllamaEmbedRequest) else body.prompt
    return Keep(seconds, loads=not texts and seconds > 0)


def _seconds(stated: float | str) -> float:
    """Return the seconds of a number or of a duration as Go writes it; infinite if it is negative. Raises InvalidRequest."""
    if isinstance(stated, str):
        if not _DURATION.fullmatch(stated):
            text = f"is {stated[:40]!r}; it takes seconds as a number, or a text as 10m or 1h30m."
            raise InvalidRequest(text, param="keep_alive")
        parts = _DURATION_PART.findall(stated)
        stated = sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1 if stated.startswith("-") else 1)
    return inf if stated < 0 or stated > _FOREVER else float(stated)


def render_embed(body: OllamaEmbedRequest, result: Result | None, model: ServedModel) -> bytes | Response:
    content: dict[str, Any] = {
        "model": body.model or model.plan.served_name,
        "embeddings": [] if result is None else result.dense,
        "total_duration": 0 if result is None else int(result.timings.total * 1e9),
        "load_duration": 0,
        "prompt_eval_count": 0 if result is None else result.num_tokens,
    }
    return to_json(content) if result is None else json_answer(content, result)


def render_embeddings(body: OllamaEmbeddingsRequest, result: Result | None, model: ServedModel) -> bytes:
    return to_json({"embedding": [] if result is None else result.dense[0]})


def render_show(body: ShowRequest, result: None, model: ServedModel) -> bytes:
    card, family = model.card, model.card.encoder.family
    model_info: dict[str, str | int] = {"general.architecture": family, "general.basename": model.plan.served_name}
    model_info |= {f"{family}.context_length": model.plan.max_length, f"{family}.block_count": len(card.encoder.layers)}
    capabilities: list[str] = []
    if "dense" in card.outputs:
        model_info[f"{family}.embedding_length"] = card.dense.default_width or card.dense.width
        capabilities.append("embedding")
    return msgspec.json.encode(ShowResponse(details=_details(model), model_info=model_info, capabilities=capabilities))


def render_tags(models: Sequence[ServedModel]) -> bytes:
    return msgspec.json.encode({"models": [ListedModel(**each) for model in models for each in _listed(model)]})


def render_running(models: Sequence[ServedModel]) -> bytes:
    """Return the models that are loaded now."""
    loaded = [model for model in models if model.residence.state == "loaded"]
    return msgspec.json.encode(
        {"models": [RunningModel(**each, **_running(model)) for model in loaded for each in _listed(model)]}
    )


def _running(model: ServedModel) -> dict[str, Any]:
    residence, plan = model.residence, model.plan
    until = None if residence.expires_at is None else datetime.fromtimestamp(residence.expires_at, UTC)
    size = residence.memory_bytes
    return {
        "size": size,
        "size_vram": 0 if plan.device == "cpu" else size,
        "context_length": plan.max_length,
        "expires_at": _NEVER if until is None else until.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }


def render_version(models: Sequence[ServedModel]) -> bytes:
    return msgspec.json.encode({"version": VERSION})


def _listed(model: ServedModel) -> list[dict[str, Any]]:
    """Return the entries of a model, one for each of its names."""
    digest, details = sha256(msgspec.json.encode(model.card)).hexdigest(), _details(model)
    names = [name if ":" in name else f"{name}:latest" for name in served_names(model.plan)]
    return [{"name": name, "model": name, "digest": digest, "details": details} for name in names]


def _details(model: ServedModel) -> Any:
    family = model.card.encoder.family
    return ModelDetails(family=family, families=[family], quantization_level=_LEVELS[model.plan.dtype])


OllamaError: Final = answer_type("OllamaError", "An error of Ollama's API.", error=str)
_TERMS: Final = ErrorTerms({"max_tokens": "options.num_ctx"}, {"truncate": "truncate: true"})
_PROMPT_TERMS: Final = _TERMS.extended({"input": lambda _: Location("prompt")}, {"truncate": None})


def render_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    """Return an error with the words that Ollama's clients search for."""
    text, _ = terms.describe(error)
    if isinstance(error, ModelNotFound):
        text = f"model not found: {error.message}"
    elif isinstance(error, TooLong):
        text = f"the input length exceeds the context length: {text}"
    elif _is_busy(error):
        text = f"server busy, please try again. {text}"
    return msgspec.json.encode({"error": text})


def status(error: WhimbrelError) -> int:
    return 503 if _is_busy(error) else error.status


def _is_busy(error: WhimbrelError) -> bool:
    return isinstance(error, Overloaded) and not isinstance(error, RateLimited)


_OLLAMA: Final = partial(Route, render=render_error, error_type=OllamaError, terms=_TERMS, status=status, media_types=ANY)

ROUTES: Final = (
    _OLLAMA(
        "/api/embed", "Dense vectors of texts, of norm 1 (Ollama).",
        parse_embed, render_embed, response_type=OllamaEmbedResponse,
        made_for="dense", example='{"input": ["A whimbrel is a wader.", "It has a curved bill."]}', operate=keep_of,
    ),
    _OLLAMA(
        "/api/embeddings", "The dense vector of a text (Ollama, before /api/embed).",
        parse_embeddings, render_embeddings, response_type=OllamaEmbeddingsResponse,
        made_for="dense", example='{"prompt": "A whimbrel is a wader."}', terms=_PROMPT_TERMS, operate=keep_of,
    ),
    _OLLAMA(
        "/api/show", "The kind and the limits of a model (Ollama).", parse_show, render_show, response_type=ShowResponse,
        example="{}",
    ),
    _OLLAMA(
        "/api/pull", "Success for a model that is served; an operator's key has others fetched from the hub (Ollama).",
        parse_pull, render_pull, response_type=PullResponse, example='{"stream": false}', operate=pull_of,
    ),
)  # fmt: skip

GET_ROUTES: Final = (
    GetRoute("/api/tags", "The models that are served (Ollama).", render_tags, render_error, OllamaError, ListResponse),
    GetRoute(
        "/api/ps", "The models that are loaded now, with their memory, and the time at which they are unloaded (Ollama).",
        render_running, render_error, OllamaError, ProcessResponse,
    ),
    GetRoute(
        "/api/version", "The version of Ollama's API that this server implements (Ollama).",
        render_version, render_error, OllamaError, VersionResponse,
    ),
)  # fmt: skip
