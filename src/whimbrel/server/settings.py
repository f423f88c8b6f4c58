"""Settings of a server, each with type, bounds, default and sentence. Variables, flags and reference are made of them."""
# ruff: noqa: RUF009  # the calls make fields

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from whimbrel.server.http.limits import HttpLimits, PositiveInt, setting

Group = Literal["Server", "Model", "Security", "Limits", "Logs and metrics", "HTTP"]
Seconds = Annotated[float, Meta(ge=0.1, le=1e9)]
Bytes = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Processes = Annotated[int, Meta(ge=1, le=256)]
Texts: TypeAlias = tuple[str, ...]

_server: Final = partial(setting, group="Server")
_model: Final = partial(setting, group="Model")
_flag_of_model: Final = partial(setting, group="Model", has_flag=True)
_security: Final = partial(setting, group="Security")
_flag_of_security: Final = partial(setting, group="Security", has_flag=True)
_limit: Final = partial(setting, group="Limits")
_logs: Final = partial(setting, group="Logs and metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(HttpLimits):
    """Settings of a server, as a user states them: paths are not read yet, and "auto" and None mean a computed value."""

    host: str = _server("127.0.0.1", "Address to listen on.", "HOST", has_flag=True)
    port: Port = _server(8000, "Port to listen on. 0 takes any free port.", "PORT", has_flag=True)
    uds: Path | None = _server(None, "Unix socket to listen on, in place of host and port.", "PATH")
    root_path: str = _server("", "Prefix under which a proxy shows the server, e.g. /embeddings.", "PATH")
    replicas: Processes = _server(1, "Number of engine processes per model.", "N", has_flag=True)
    workers: Processes | None = _server(
        None, "Number of HTTP worker processes.", "N", computed="one per 8 cores, to 4; for a GPU per 2, to 16"
    )
    served_name: Texts = _server(
        (),
        "Model name for clients, or several separated by commas. Repeat it for the next MODEL.",
        "NAME",
        computed="MODEL; of ID@REVISION both ID and ID@REVISION",
        has_flag=True,
        splits=False,
    )

    device: str = _flag_of_model("auto", "auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.", "DEVICE")
    dtype: str = _flag_of_model(
        "auto",
        "auto, float32, bfloat16, float16 (GPUs) or int8 (CPUs with VNNI). auto: bfloat16 where it is fast, else float32.",
        "DTYPE",
    )
    max_length: int | None = _flag_of_model(
        None, "Maximum tokens per text, at most the model's number of positions.", "N", computed="from the checkpoint"
    )
    max_batch_tokens: int | None = _model(
        None,
        "Maximum tokens in one batch, 1 to 1048576. A longer text runs alone.",
        "N",
        computed="512 on a CPU, 16384 on a GPU",
    )
    pooling: str | None = _flag_of_model(
        None,
        "Pooling of a checkpoint that has no modules.json: mean, cls, max, mean_sqrt_len_tokens, weightedmean, "
        "lasttoken, splade or math-shepherd.",
        "NAME",
    )
    reranker: str | None = _flag_of_model(
        None, "Prompt format of a reranker whose files do not name it: qwen3, mxbai-v2, bge-gemma, nemotron or zerank.", "NAME"
    )
    tokenizer: str = _flag_of_model(
        "auto",
        "Reading of the tokenizer's files: transformers (version 5), transformers-4, or file (tokenizer.json as it is). "
        "auto: transformers, but transformers-4 where its special tokens are others and the model was made with it.",
        "NAME",
    )
    adapter: Texts = _flag_of_model(
        (), "LoRA adapter as PEFT saves it, which requests choose by MODEL:NAME. Repeatable.", "[MODEL:]NAME=FOLDER"
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
    keep: str = _model(
        "always",
        "Keep models loaded always, or load each by its first request and unload it when idle for this time: 10m.",
        "TIME",
    )
    chunked_prefill: bool | None = _model(None, "Run texts above max_batch_tokens in pieces.", computed="for causal models")

    api_key: Texts = _flag_of_security(
        (), "Require this API key of every client. May be repeated. Better in WHIMBREL_API_KEY.", "KEY", splits=False
    )
    api_key_file: Path | None = _flag_of_security(
        None, "Require one of the API keys in this file: one per line. Lines that start with # are comments.", "PATH"
    )
    admin_key_file: Path | None = _security(
        None,
        "Open the routes below /admin/ to the keys in this file, one per line. Without it there are no such routes.",
        "PATH",
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
    ssl_keyfile_password: str | None = _security(None, "Password of an encrypted key.", "TEXT")
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
    otel: bool = _logs(False, "Send OpenTelemetry spans. Configure them with the OTEL_... variables.")
