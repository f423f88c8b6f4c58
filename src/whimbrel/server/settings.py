"""Settings of a server. One statement gives each its key, type, bounds, default and sentence.

The variables, the flags of `whimbrel serve` and the reference are made of it (settings_table.py).
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from whimbrel.server.http.limits import HttpLimits, PositiveInt

Group = Literal["Server", "Model", "Security", "Limits", "Logs and metrics", "HTTP"]
Seconds = Annotated[float, Meta(ge=0.1, le=1e9)]
Bytes = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Processes = Annotated[int, Meta(ge=1, le=256)]
Texts: TypeAlias = tuple[str, ...]


def _about(
    group: Group, text: str, metavar: str = "", *, default: str = "", has_flag: bool = False, splits: bool = True
) -> Meta:
    """Describe a setting, in the terms of `Setting`. `default` says how a default is computed."""
    extra = {"group": group, "metavar": metavar, "computed": default, "has_flag": has_flag, "splits": splits}
    return Meta(description=text, extra=extra)


_server: Final = partial(_about, "Server")
_model: Final = partial(_about, "Model")
_flag_of_model: Final = partial(_about, "Model", has_flag=True)
_security: Final = partial(_about, "Security")
_limit: Final = partial(_about, "Limits")
_logs: Final = partial(_about, "Logs and metrics")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server, as a user states them: paths are not read yet, and "auto" and None mean a computed value."""

    host: Annotated[str, _server("Address to listen on.", "HOST", has_flag=True)] = "127.0.0.1"
    port: Annotated[Port, _server("Port to listen on. 0 takes any free port.", "PORT", has_flag=True)] = 8000
    uds: Annotated[Path | None, _server("Unix socket to listen on, in place of host and port.", "PATH")] = None
    root_path: Annotated[str, _server("Prefix under which a proxy shows the server, e.g. /embeddings.", "PATH")] = ""
    replicas: Annotated[Processes, _server("Number of engine processes per model.", "N", has_flag=True)] = 1
    workers: Annotated[
        Processes | None, _server("Number of HTTP worker processes.", "N", default="one per 8 cores, 1 to 4")
    ] = None
    served_name: Annotated[
        Texts,
        _server(
            "Model name for clients, or several separated by commas. Repeat it for the next MODEL.",
            "NAME",
            default="MODEL; of ID@REVISION both ID and ID@REVISION",
            has_flag=True,
            splits=False,
        ),
    ] = ()

    device: Annotated[str, _flag_of_model("auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.", "DEVICE")] = "auto"
    dtype: Annotated[
        str,
        _flag_of_model(
            "auto, float32, bfloat16, float16 (GPUs) or int8 (CPUs with VNNI). auto: bfloat16 where it is fast, else float32.",
            "DTYPE",
        ),
    ] = "auto"
    max_length: Annotated[
        int | None,
        _flag_of_model("Maximum tokens per text, at most the model's number of positions.", "N", default="from the checkpoint"),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        _model(
            "Maximum tokens in one batch, 1 to 1048576. A longer text runs alone.", "N", default="512 on a CPU, 16384 on a GPU"
        ),
    ] = None
    pooling: Annotated[
        str | None,
        _flag_of_model(
            "Pooling of a checkpoint that has no modules.json: mean, cls, max, mean_sqrt_len_tokens, weightedmean, "
            "lasttoken, splade or math-shepherd.",
            "NAME",
        ),
    ] = None
    reranker: Annotated[
        str | None,
        _flag_of_model(
            "Prompt format of a reranker whose files do not name it: qwen3, mxbai-v2, bge-gemma, nemotron or zerank.", "NAME"
        ),
    ] = None
    tokenizer: Annotated[
        str,
        _flag_of_model(
            "Reading of the tokenizer's files: transformers (version 5), transformers-4, or file (tokenizer.json as it is). "
            "auto: transformers, but transformers-4 where its special tokens are others and the model was made with it.",
            "NAME",
        ),
    ] = "auto"
    adapter: Annotated[
        Texts,
        _flag_of_model(
            "LoRA adapter as PEFT saves it, which requests choose by MODEL:NAME. Repeatable.", "[MODEL:]NAME=FOLDER"
        ),
    ] = ()
    matryoshka: Annotated[bool, _model("Allow truncated vectors (`dimensions`) for a model whose files do not declare it.")] = (
        False
    )
    split_long: Annotated[
        bool,
        _model("Run texts above the limit in parts, unless a request asks to cut them: the mean of the parts' dense vectors."),
    ] = False
    accept_config: Annotated[
        Texts,
        _flag_of_model(
            "Accept this key of the checkpoint's JSON files, which Whimbrel does not know and would refuse. May be repeated.",
            "KEY",
        ),
    ] = ()
    document_cache_bytes: Annotated[
        Bytes, _model("Memory for a cache of reranked documents' token vectors (late interaction). 0 disables it.", "BYTES")
    ] = 0
    prefix_cache_bytes: Annotated[
        Bytes | None,
        _model(
            "Memory for a cache of prefixes that texts share, of causal models. 0 disables it.", "BYTES", default="268435456"
        ),
    ] = None
    chunked_prefill: Annotated[
        bool | None, _model("Run texts above max_batch_tokens in pieces.", default="for causal models")
    ] = None

    api_key: Annotated[
        Texts,
        _security(
            "Require this API key of every client. May be repeated. Better in WHIMBREL_API_KEY.",
            "KEY",
            has_flag=True,
            splits=False,
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        _security(
            "Require one of the API keys in this file: one per line. Lines that start with # are comments.",
            "PATH",
            has_flag=True,
        ),
    ] = None
    allowed_host: Annotated[
        Texts,
        _security(
            "Host name that clients may use. May be repeated. * accepts any.",
            "NAME",
            default="localhost if only this machine can connect, else any",
        ),
    ] = ()
    cors_origin: Annotated[
        Texts, _security("Accept browser requests from pages of this origin (CORS). May be repeated. * accepts any.", "ORIGIN")
    ] = ()
    public_metrics: Annotated[bool, _security("Serve /metrics without an API key.")] = False
    playground: Annotated[bool, _security("Answer browsers at / with a page. Otherwise as programs are answered.")] = True
    ssl_certfile: Annotated[
        Path | None, _security("Speak TLS with this certificate chain (PEM). SIGHUP reads it again.", "PATH")
    ] = None
    ssl_keyfile: Annotated[Path | None, _security("The certificate's key (PEM).", "PATH", default="in ssl_certfile")] = None
    ssl_keyfile_password: Annotated[str | None, _security("Password of an encrypted key.", "TEXT")] = None
    forwarded_allow_ips: Annotated[
        Texts,
        _security(
            "Believe X-Forwarded-For, -Proto and -Host from these proxies: addresses and networks with commas. "
            "unix is a Unix socket, * any peer.",
            "IP",
            default="none",
        ),
    ] = ()

    max_request_tokens: Annotated[Tokens, _limit("Maximum tokens in one request.", "N")] = 2**20
    max_queue_tokens: Annotated[
        Tokens | None,
        _limit("Maximum tokens in the queue of one engine. Above it, requests get 429.", "N", default="by memory"),
    ] = None
    max_queue_seconds: Annotated[
        Seconds | None, _limit("Maximum expected time in the queue. Above it, requests get 429.", "SECONDS", default="no limit")
    ] = None
    max_body_bytes: Annotated[PositiveInt, _limit("Size of one body.", "BYTES")] = 32 * 2**20
    max_inflight_bytes: Annotated[
        PositiveInt | None,
        _limit(
            "Size of the bodies and large answers of all requests in a worker's memory. Further bodies are read when there "
            "is room.",
            "BYTES",
            default="a share of the memory",
        ),
    ] = None
    drain_timeout: Annotated[
        float, Meta(ge=0, le=1e9), _limit("Time to finish accepted requests after SIGINT or SIGTERM.", "SECONDS")
    ] = 30.0
    step_timeout: Annotated[
        Seconds, _limit("Maximum time for one batch. After it, the engine process is replaced.", "SECONDS")
    ] = 60.0

    log_format: Annotated[Literal["plain", "json"], _logs("Format of log lines.")] = "plain"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _logs("Minimum log level.")] = "info"
    access_log: Annotated[bool, _logs("Log one line per request.")] = False
    otel: Annotated[bool, _logs("Send OpenTelemetry spans. Configure them with the OTEL_... variables.")] = False

    http: HttpLimits = HttpLimits()
    """Limits of connections, each a setting of its own."""
