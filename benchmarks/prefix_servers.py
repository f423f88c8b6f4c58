"""Shared prefixes and split texts over HTTP, with vLLM's CPU build beside Whimbrel. Part of prefixes.py.

Servers take turns as those of `benchmarks/peers` do, whose environments they have (peers.toml). vLLM gets the token ids of our
template, as its own has other words; so it tokenizes nothing in the rerank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from common import make_texts

from whimbrel import Engine
from whimbrel.types.request import Request
from whimbrel_bench.backends import Sample
from whimbrel_bench.presets import PRESETS
from whimbrel_bench.random_models import Size, write_qwen3

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from environments import Builder, Peer, read_table
from measure import Measured, measure
from servers import Server, Work, started

_OURS: Final = ("{python}", "-m", "whimbrel", "serve", "{model}", "--port", "{port}", "--served-name", "model")
_VLLM: Final = (
    "{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--runner", "pooling", "--port", "{port}",
    "--served-model-name", "model",
)  # fmt: skip
_COMMANDS: Final = {"whimbrel": (_OURS, "/health/ready"), "vllm": (_VLLM, "/health")}
"""Command of a server and its path of readiness, by environment."""
_LIMIT: Final = "512"
_CLASSES: Final = (
    '{{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}}'
)
"""vLLM's settings of a Qwen3-Reranker, in braces for `str.format`."""


class Contender(NamedTuple):
    """A server by its environment, further arguments and checkpoint, and the requests that it gets."""

    name: str
    environment: str
    arguments: tuple[str, ...]
    folder: Path
    work: Work


def builder_in(folder: Path) -> Builder:
    """Return the builder of the environments of peers below a folder."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return Builder(read_table(Path(__file__).parent / "peers/peers.toml"), folder.resolve())


def run(builder: Builder, contenders: Sequence[Contender], *, dtype: str, rounds: int) -> list[list[str]]:
    """Return rows of a table: the time, over the first, rounds over the first's, processor seconds, and the agreement."""
    found: list[Measured] = []
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        servers: list[Server] = []
        for name, environment, arguments, folder, work in contenders:
            builder.install(environment)
            command, ready = _COMMANDS[environment]
            settings = {"command": [*command, "--dtype", dtype, *arguments], "ready": ready}
            peer = Peer(name, environment, "", dtype, (), server=settings)
            servers.append(Server(peer, stack.enter_context(started(peer, builder, folder)), [work]))
        measure(servers, [("over HTTP", "", 0)], rounds, reference=contenders[0].name, found=found, failures=failures)
    if failures:
        raise SystemExit(str(failures))
    base = found[0]
    rows: list[list[str]] = []
    for each in found:
        ratios = [own / theirs for own, theirs in zip(each.seconds, base.seconds, strict=True)]
        times = f"{1e3 * each.median:,.0f}", f"{each.median / base.median:.3f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([each.peer.name, *times, f"{median(each.cpu):.2f}", f"{each.cosine:.6f}"])
    return rows


def split_texts(folder: Path, size: Size, builder: Builder, *, dtype: str, rounds: int, vllm: bool) -> list[list[str]]:
    """Return the rows for the token vectors of vLLM #39533: texts whole, in pieces, and vLLM with its chunked prefill."""
    preset = PRESETS["token-vectors"](small=True)
    write_qwen3(folder, size)
    connections = preset.load.concurrency or 1
    work = Work([[preset.samples[0]] * connections], connections, "pooling", None, preset.extra_body)
    work = work._replace(decode=lambda rows: rows.reshape(-1, size.hidden))
    whole = ("--max-batch-tokens", _LIMIT, "--no-chunked-prefill")
    task = ("--pooler-config", '{{"task": "token_embed"}}')
    contenders = [
        Contender(f"batches of {_LIMIT} tokens, texts whole", "whimbrel", whole, folder, work),
        Contender(f"in pieces of {_LIMIT} tokens, over HTTP", "whimbrel", whole[:2], folder, work),
        Contender("vLLM, chunked prefill", "vllm", ("--max-num-batched-tokens", _LIMIT, *task), folder, work),
    ]
    return run(builder, contenders if vllm else contenders[:2], dtype=dtype, rounds=rounds)


def served_rerank(folder: Path, builder: Builder, *, dtype: str, rounds: int) -> list[list[str]]:
    """Return the rows of a rerank of 100 documents with a new query in every round, ours and vLLM's."""
    queries = make_texts(rounds + 1, words=(88, 92), seed=1)
    documents = make_texts(100, words=(70, 78), seed=2)
    with Engine(str(folder / "saved"), dtype=dtype) as engine:
        requests = [Request([(query, each) for each in documents], ("scores",)) for query in queries]
        ids: list[Any] = [[seq.ids.tolist() for seq in engine.preprocessor.preprocess(each).seqs] for each in requests]
    ours = Work([[Sample(tuple(documents), query)] for query in queries], 1, "rerank", None, {"return_documents": False})
    theirs = Work([[Sample(tuple(each))] for each in ids], 1, "pooling", None, {"task": "classify"})
    theirs = theirs._replace(decode=lambda rows: np.log(rows / (1 - rows)))
    base = ("--hf-overrides", _CLASSES)
    contenders = [
        Contender("Whimbrel", "whimbrel", (), folder / "saved", ours),
        Contender("Whimbrel, no cache", "whimbrel", ("--prefix-cache-bytes", "0"), folder / "saved", ours),
        Contender("vLLM, prefix caching", "vllm", (*base, "--enable-prefix-caching"), folder / "base", theirs),
        Contender("vLLM, none", "vllm", (*base, "--no-enable-prefix-caching"), folder / "base", theirs),
    ]
    return run(builder, contenders, dtype=dtype, rounds=rounds)
