"""Settings of a server. One statement gives each its key, type, bounds, default and sentence.

The variables, the flags of `whimbrel serve` and the reference are made of it (settings_table.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from whimbrel.server.http.limits import HttpLimits, PositiveInt

Group = Literal["Server", "Model", "Security", "Limits", "Logs and metrics", "HTTP"]
Seconds = Annotated[float, Meta(ge=0.1, le=1e9)]


def _about(
    group: Group, text: str, metavar: str = "", *, default: str = "", has_flag: bool = False, splits: bool = True
) -> Meta:
    """Describe a setting, in the terms of `Setting`. `default` says how a default is computed."""
    extra = {"group": group, "metavar": metavar, "computed": default, "has_flag": has_flag, "splits": splits}
    return Meta(description=text, extra=extra)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server, as a user states them: paths are not read yet, and "auto" and None mean a computed value."""

    host: Annotated[str, _about("Server", "Address to listen on.", "HOST", has_flag=True)] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535), _about("Server", "Port to listen on. 0 takes any free port.", "PORT", has_flag=True)
    ] = 8000
    uds: Annotated[Path | None, _about("Server", "Unix socket to listen on, in place of host and port.", "PATH")] = None
    root_path: Annotated[str, _about("Server", "Prefix under which a proxy shows the server, e.g. /embeddings.", "PATH")] = ""
    replicas: Annotated[
        int, Meta(ge=1, le=256), _about("Server", "Number of engine processes per model.", "N", has_flag=True)
    ] = 1
    workers: (
        Annotated[
            int,
            Meta(ge=1, le=256),
            _about("Server", "Number of HTTP worker processes.", "N", default="one per 8 cores, 1 to 4"),
        ]
        | None
    ) = None
    served_name: Annotated[
        tuple[str, ...],
        _about(
            "Server",
            "Model name for clients, or several separated by commas. Repeat it for the next MODEL.",
            "NAME",
            default="MODEL; of ID@REVISION both ID and ID@REVISION",
            has_flag=True,
            splits=False,
        ),
    ] = ()

    device: Annotated[
        str, _about("Model", "auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.", "DEVICE", has_flag=True)
    ] = "auto"
    dtype: Annotated[
        str,
        _about(
            "Model",
            "auto, float32, bfloat16, float16 (GPUs) or int8 (CPUs with VNNI). auto: bfloat16 where it is fast, else float32.",
            "DTYPE",
            has_flag=True,
        ),
    ] = "auto"
    max_length: Annotated[
        int | None,
        _about(
            "Model",
            "Maximum tokens per text, at most the model's number of positions.",
            "N",
            default="from the checkpoint",
            has_flag=True,
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        _about(
            "Model",
            "Maximum tokens in one batch, 1 to 1048576. A longer text runs alone.",
            "N",
            default="512 on a CPU, 16384 on a GPU",
        ),
    ] = None
    pooling: Annotated[
        str | None,
        _about(
            "Model",
            "Pooling of a checkpoint that has no modules.json: mean, cls, max, mean_sqrt_len_tokens, weightedmean, "
            "lasttoken, splade or math-shepherd.",
            "NAME",
            has_flag=True,
        ),
    ] = None
    reranker: Annotated[
        str | None,
        _about(
            "Model",
            "Prompt format of a reranker whose files do not name it: qwen3, mxbai-v2, bge-gemma, nemotron or zerank.",
            "NAME",
            has_flag=True,
        ),
    ] = None
    tokenizer: Annotated[
        str,
        _about(
            "Model",
            "Reading of the tokenizer's files: transformers (version 5), transformers-4, or file (tokenizer.json as it is). "
            "auto: transformers, but transformers-4 where its special tokens are others and the model was made with it.",
            "NAME",
            has_flag=True,
        ),
    ] = "auto"
    adapter: Annotated[
        tuple[str, ...],
        _about(
            "Model",
            "LoRA adapter as PEFT saves it, which requests choose by MODEL:NAME. Repeatable.",
            "[MODEL:]NAME=FOLDER",
            has_flag=True,
        ),
    ] = ()
    matryoshka: Annotated[
        bool, _about("Model", "Allow truncated vectors (`dimensions`) for a model whose files do not declare it.")
    ] = False
    split_long: Annotated[
        bool,
        _about(
            "Model",
            "Run texts above the limit in parts, unless a request asks to cut them: the mean of the parts' dense vectors.",
        ),
    ] = False
    accept_config: Annotated[
        tuple[str, ...],
        _about(
            "Model",
            "Accept this key of the checkpoint's JSON files, which Whimbrel does not know and would refuse. May be repeated.",
            "KEY",
            has_flag=True,
        ),
    ] = ()
    document_cache_bytes: Annotated[
        int,
        Meta(ge=0),
        _about(
            "Model",
            "Memory for a cache of reranked documents' token vectors (late interaction). 0 disables it.",
            "BYTES",
        ),
    ] = 0
    prefix_cache_bytes: (
        Annotated[
            int,
            Meta(ge=0),
            _about(
                "Model",
                "Memory for a cache of prefixes that texts share, of causal models. 0 disables it.",
                "BYTES",
                default="268435456",
            ),
        ]
        | None
    ) = None
    chunked_prefill: Annotated[
        bool | None,
        _about("Model", "Run texts above max_batch_tokens in pieces.", default="for causal models"),
    ] = None

    api_key: Annotated[
        tuple[str, ...],
        _about(
            "Security",
            "Require this API key of every client. May be repeated. Better in WHIMBREL_API_KEY.",
            "KEY",
            has_flag=True,
            splits=False,
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        _about(
            "Security",
            "Require one of the API keys in this file: one per line. Lines that start with # are comments.",
            "PATH",
            has_flag=True,
        ),
    ] = None
    allowed_host: Annotated[
        tuple[str, ...],
        _about(
            "Security",
            "Host name that clients may use. May be repeated. * accepts any.",
            "NAME",
            default="localhost if only this machine can connect, else any",
        ),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...],
        _about(
            "Security", "Accept browser requests from pages of this origin (CORS). May be repeated. * accepts any.", "ORIGIN"
        ),
    ] = ()
    public_metrics: Annotated[bool, _about("Security", "Serve /metrics without an API key.")] = False
    playground: Annotated[bool, _about("Security", "Answer browsers at / with a page. Otherwise as programs are answered.")] = (
        True
    )
    ssl_certfile: Annotated[
        Path | None, _about("Security", "Speak TLS with this certificate chain (PEM). SIGHUP reads it again.", "PATH")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, _about("Security", "The certificate's key (PEM).", "PATH", default="in ssl_certfile")
    ] = None
    ssl_keyfile_password: Annotated[str | None, _about("Security", "Password of an encrypted key.", "TEXT")] = None
    forwarded_allow_ips: Annotated[
        tuple[str, ...],
        _about(
            "Security",
            "Believe X-Forwarded-For, -Proto and -Host from these proxies: addresses and networks with commas. "
            "unix is a Unix socket, * any peer.",
            "IP",
            default="none",
        ),
    ] = ()

    max_request_tokens: Annotated[int, Meta(ge=1), _about("Limits", "Maximum tokens in one request.", "N")] = 2**20
    max_queue_tokens: (
        Annotated[
            int,
            Meta(ge=1),
            _about(
                "Limits", "Maximum tokens in the queue of one engine. Above it, requests get 429.", "N", default="by memory"
            ),
        ]
        | None
    ) = None
    max_queue_seconds: (
        Annotated[
            Seconds,
            _about("Limits", "Maximum expected time in the queue. Above it, requests get 429.", "SECONDS", default="no limit"),
        ]
        | None
    ) = None
    max_body_bytes: Annotated[PositiveInt, _about("Limits", "Size of one body.", "BYTES")] = 32 * 2**20
    max_inflight_bytes: (
        Annotated[
            PositiveInt,
            _about(
                "Limits",
                "Size of the bodies and large answers of all requests in a worker's memory. Further bodies are read when there "
                "is room.",
                "BYTES",
                default="a share of the memory",
            ),
        ]
        | None
    ) = None
    drain_timeout: Annotated[
        float, Meta(ge=0, le=1e9), _about("Limits", "Time to finish accepted requests after SIGINT or SIGTERM.", "SECONDS")
    ] = 30.0
    step_timeout: Annotated[
        Seconds, _about("Limits", "Maximum time for one batch. After it, the engine process is replaced.", "SECONDS")
    ] = 60.0

    log_format: Annotated[Literal["plain", "json"], _about("Logs and metrics", "Format of log lines.")] = "plain"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about("Logs and metrics", "Minimum log level.")] = (
        "info"
    )
    access_log: Annotated[bool, _about("Logs and metrics", "Log one line per request.")] = False
    otel: Annotated[
        bool, _about("Logs and metrics", "Send OpenTelemetry spans. Configure them with the OTEL_... variables.")
    ] = False

    http: HttpLimits = HttpLimits()
    """Limits of connections, each a setting of its own."""
