"""Settings of a server, each with type, bounds, default and sentence.

Variables, flags, keys of a file, its schema and the reference are made of them.
"""
# ruff: noqa: RUF009  # the calls make fields

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from whimbrel.server.http.limits import HttpLimits, PositiveInt, setting
from whimbrel.types.choices import MAX_BATCH_TOKENS, Dtype, PoolingOption, RerankerName, TokenizerReading

Group = Literal["Server", "Model", "Security", "Limits", "Logs and metrics", "HTTP"]
Seconds = Annotated[float, Meta(ge=0.1, le=1e9)]
Bytes = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Processes = Annotated[int, Meta(ge=1, le=256)]
Texts: TypeAlias = tuple[str, ...]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", examples=["auto", "cpu", "cuda", "cuda:1"])]
Keep = Annotated[str, Meta(pattern=r"^(always|[0-9]{1,9}[smhd])$", examples=["always", "90s", "10m", "2h", "1d"])]
Revision = Annotated[str, Meta(pattern=r"^[^\s@]+$", examples=["main", "v1.0", "5c38ec7c"])]
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_server: Final = partial(setting, group="Server")
_model: Final = partial(setting, group="Model")
_flag_of_model: Final = partial(setting, group="Model", has_flag=True)
_security: Final = partial(setting, group="Security")
_flag_of_security: Final = partial(setting, group="Security", has_flag=True)
_limit: Final = partial(setting, group="Limits")
_logs: Final = partial(setting, group="Logs and metrics")


def keep_seconds(keep: str) -> float | None:
    """Return the seconds without a request after which a model is unloaded; None: never."""
    return None if keep == "always" else int(keep[:-1]) * _SECONDS[keep[-1]]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a model. From a flag or a variable they hold for all models of the server."""

    replicas: Processes = _flag_of_model(1, "Number of engine processes of the model.", "N")
    device: Device = _flag_of_model("auto", "auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.", "DEVICE")
    dtype: Literal["auto", Dtype] = _flag_of_model(
        "auto",
        "auto, float32, bfloat16, float16 (GPUs) or int8 (CPUs with VNNI). auto: bfloat16 where it is fast, else float32.",
        "DTYPE",
    )
    max_length: Tokens | None = _flag_of_model(
        None, "Maximum tokens per text, at most the model's number of positions.", "N", computed="from the checkpoint"
    )
    max_batch_tokens: Annotated[int, Meta(ge=1, le=MAX_BATCH_TOKENS)] | None = _model(
        None, "Maximum tokens in one batch. A longer text runs alone.", "N", computed="512 on a CPU, 16384 on a GPU"
    )
    pooling: PoolingOption | None = _flag_of_model(
        None,
        "Pooling of a checkpoint that has no modules.json: mean, cls, max, mean_sqrt_len_tokens, weightedmean, "
        "lasttoken, splade or math-shepherd.",
        "NAME",
    )
    reranker: RerankerName | None = _flag_of_model(
        None, "Prompt format of a reranker whose files do not name it: qwen3, mxbai-v2, bge-gemma, nemotron or zerank.", "NAME"
    )
    tokenizer: Literal["auto", TokenizerReading] = _flag_of_model(
        "auto",
        "Reading of the tokenizer's files: transformers (version 5), transformers-4, or file (tokenizer.json as it is). "
        "auto: transformers, but transformers-4 where its special tokens are others and the model was made with it.",
        "NAME",
    )
    matryoshka: bool = _model(False, "Allow truncated vectors (`dimensions`) for a model whose files do not declare it.")
    split_long: bool = _model(
        False, "Run texts above the limit in parts, unless a request asks to cut them: the mean of the parts' dense vectors."
    )
    accept_config: Texts = _flag_of_model(
        (),
        "Accept this key of the checkpoint's JSON files, which Whimbrel does not know and would refuse. May be repeated.",
        "KEY",
    )
    document_cache_bytes: Bytes = _model(
        0, "Memory for a cache of reranked documents' token vectors (late interaction). 0 disables it.", "BYTES"
    )
    prefix_cache_bytes: Bytes | None = _model(
        None, "Memory for a cache of prefixes that texts share, of causal models. 0 disables it.", "BYTES", computed="268435456"
    )
    keep: Keep = _model(
        "always",
        "Keep the model loaded always, or load it by its first request and unload it when idle for this time: 10m.",
        "TIME",
    )
    chunked_prefill: bool | None = _model(None, "Run texts above max_batch_tokens in pieces.", computed="for causal models")


@dataclass(frozen=True, kw_only=True)
class ModelTable(ModelSettings):
    """A model as its table in the file of settings states it."""

    source: str | None = _model(
        None,
        "Checkpoint folder or Hub id (owner/name). Several models may have the same.",
        "MODEL",
        computed="the packaged model",
    )
    revision: Revision | None = _model(None, "Branch, tag or commit of a Hub id.", "REVISION", computed="the hub's main")
    names: Texts = _model((), "Further names of the model for clients. The first one is that of the table.", "NAME")
    prompts: Mapping[str, str] | None = _model(
        None,
        "Texts to put before inputs, by name. They replace or join the prompts of the model's files; `query` and `document` "
        "are those of an input_type.",
        computed="from the checkpoint",
    )
    adapters: Mapping[str, Path] | None = _model(
        None, "Folders of LoRA adapters as PEFT saves them, by the names by which requests choose them."
    )

    @property
    def model(self) -> str | None:
        """The model as the command line names it: a folder or a hub id with its revision. None: the packaged model."""
        return f"{self.source}@{self.revision}" if self.revision else self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(HttpLimits, ModelSettings):
    """Settings of a server, as a user states them: paths are not read yet, and "auto" and None mean a computed value."""

    host: str = _server("127.0.0.1", "Address to listen on.", "HOST", has_flag=True)
    port: Port = _server(8000, "Port to listen on. 0 takes any free port.", "PORT", has_flag=True)
    uds: Path | None = _server(None, "Unix socket to listen on, in place of host and port.", "PATH")
    root_path: str = _server("", "Prefix under which a proxy shows the server, e.g. /embeddings.", "PATH")
    workers: Processes | None = _server(
        None, "Number of HTTP worker processes.", "N", computed="one per 8 cores, to 4; for a GPU per 2, to 16"
    )
    batch_dir: Path | None = _server(
        None, "Folder of files and batches: serve OpenAI's /v1/files and /v1/batches, and keep there what they need.", "PATH"
    )
    served_name: Texts = _flag_of_model(
        (),
        "Model name for clients, or several separated by commas. Repeat it for the next MODEL.",
        "NAME",
        computed="MODEL; of ID@REVISION both ID and ID@REVISION",
        splits=False,
    )
    adapter: Texts = _flag_of_model(
        (), "LoRA adapter as PEFT saves it, which requests choose by MODEL:NAME. Repeatable.", "[MODEL:]NAME=FOLDER"
    )

    api_key: Texts = _security(
        (),
        "Require this API key of every client. May be repeated. Better in WHIMBREL_API_KEY.",
        "KEY",
        splits=False,
        is_secret=True,
    )
    api_key_file: Path | None = _flag_of_security(
        None, "Require one of the API keys in this file: one per line. Lines that start with # are comments.", "PATH"
    )
    allowed_host: Texts = _security(
        (),
        "Host name that clients may use. May be repeated. * accepts any.",
        "NAME",
        computed="localhost if only this machine can connect, else any",
    )
    cors_origin: Texts = _security(
        (), "Accept browser requests from pages of this origin (CORS). May be repeated. * accepts any.", "ORIGIN"
    )
    public_metrics: bool = _security(False, "Serve /metrics without an API key.")
    playground: bool = _security(True, "Answer browsers at / with a page. Otherwise as programs are answered.")
    ssl_certfile: Path | None = _security(None, "Speak TLS with this certificate chain (PEM). SIGHUP reads it again.", "PATH")
    ssl_keyfile: Path | None = _security(None, "The certificate's key (PEM).", "PATH", computed="in ssl_certfile")
    ssl_keyfile_password: str | None = _security(None, "Password of an encrypted key.", "TEXT", is_secret=True)
    ssl_keyfile_password_file: Path | None = _security(None, "File whose first line is that password.", "PATH")
    hf_token_file: Path | None = _security(
        None, "File whose first line is the hub's token, for private and gated models. HF_TOKEN goes before it.", "PATH"
    )
    forwarded_allow_ips: Texts = _security(
        (),
        "Believe X-Forwarded-For, -Proto and -Host from these proxies: addresses and networks with commas. "
        "unix is a Unix socket, * any peer.",
        "IP",
        computed="none",
    )

    max_request_tokens: Tokens = _limit(2**20, "Maximum tokens in one request.", "N")
    max_queue_tokens: Tokens | None = _limit(
        None, "Maximum tokens in the queue of one engine. Above it, requests get 429.", "N", computed="by memory"
    )
    max_queue_seconds: Seconds | None = _limit(
        None, "Maximum expected time in the queue. Above it, requests get 429.", "SECONDS", computed="no limit"
    )
    max_body_bytes: PositiveInt = _limit(32 * 2**20, "Size of one body.", "BYTES")
    max_inflight_bytes: PositiveInt | None = _limit(
        None,
        "Size of the bodies and large answers of all requests in a worker's memory. Further bodies are read when there "
        "is room.",
        "BYTES",
        computed="a share of the memory",
    )
    max_file_bytes: PositiveInt = _limit(200 * 2**20, "Size of a file that is uploaded for a batch.", "BYTES")
    max_files: PositiveInt = _limit(1000, "Number of files in batch_dir, and of batches.", "N")
    max_files_bytes: PositiveInt = _limit(16 * 2**30, "Size of all files in batch_dir, with the answers of batches.", "BYTES")
    memory: PositiveInt | None = _limit(
        None,
        "Memory of all loaded models on a device. Models not kept always make room for others.",
        "BYTES",
        computed="no limit",
    )
    drain_timeout: Annotated[float, Meta(ge=0, le=1e9)] = _limit(
        30.0, "Time to finish accepted requests after SIGINT or SIGTERM.", "SECONDS"
    )
    step_timeout: Seconds = _limit(60.0, "Maximum time for one batch. After it, the engine process is replaced.", "SECONDS")

    log_format: Literal["plain", "json"] = _logs("plain", "Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = _logs("info", "Minimum log level.")
    access_log: bool = _logs(False, "Log one line per request.")
    audit_log: Path | None = _logs(
        None, "Append a line of JSON per request to this file: time, key, route, model, status, counts and seconds.", "PATH"
    )
    otel: bool = _logs(False, "Send OpenTelemetry spans. Configure them with the OTEL_... variables.")
