"""Shared prefixes and split texts over HTTP, with vLLM's CPU build beside Whimbrel. Part of prefixes.py.

Servers run on ports of their own, one gets load at a time, and rounds are interleaved in rotating order after one that is not
counted. In that one the answers are compared with the first server's. vLLM gets the token ids of our template, as its own has
other words; so it tokenizes nothing in the rerank. Its environment is that of `benchmarks/peers` (peers.toml).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from common import make_texts, min_cosine

from whimbrel import Engine
from whimbrel.types.request import Request
from whimbrel_bench.backends import Sample
from whimbrel_bench.presets import PRESETS
from whimbrel_bench.processes import cpu_seconds
from whimbrel_bench.random_models import Size, write_qwen3
from whimbrel_bench.target import Load, Target, TargetOptions

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from environments import Builder, Peer, read_table
from servers import started

_OURS: Final = ("{python}", "-m", "whimbrel", "serve", "{model}", "--port", "{port}", "--served-name", "model", "--dtype")
_VLLM: Final = (
    "{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--runner", "pooling", "--port", "{port}",
    "--served-model-name", "model", "--dtype",
)  # fmt: skip
_READY: Final = {"whimbrel": "/health/ready", "vllm": "/health"}
_LIMIT: Final = "512"
_CLASSES: Final = (
    '{{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}}'
)
"""vLLM's settings of a Qwen3-Reranker, in braces for `str.format`."""


class Ask(NamedTuple):
    """Request of one round: the kind of server, a sample, and further fields of the body."""

    backend: str
    sample: Sample
    extra: dict[str, Any]


@dataclass(slots=True)
class Contender:
    """One server, and the request of each round."""

    name: str
    environment: str
    arguments: tuple[str, ...]
    folder: Path
    ask: Callable[[int], Ask]
    seconds: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    """Processor seconds of the server and its processes in each round."""
    agreement: float = 1.0


def builder_in(folder: Path) -> Builder:
    """Return the builder of the environments of peers below a folder."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return Builder(read_table(Path(__file__).parent / "peers/peers.toml"), folder.resolve())


def measure(
    builder: Builder, contenders: Sequence[Contender], *, dtype: str, rounds: int, connections: int, width: int = 1
) -> list[list[str]]:
    """Return rows of a table: the time, over the first, rounds over the first's, processor seconds, and the agreement."""
    with ExitStack() as stack:
        pairs, first = list[Any](), list[np.ndarray]()
        for each in contenders:
            builder.install(each.environment)
            command = [*(_VLLM if each.environment == "vllm" else _OURS), dtype, *each.arguments]
            settings = {"command": command, "ready": _READY[each.environment]}
            peer = Peer(each.name, each.environment, "", dtype, (), server=settings)
            pairs.append((each, stack.enter_context(started(peer, builder, each.folder))))
        for turn in range(rounds + 1):
            at = turn % len(pairs)
            for each, server in [*pairs[at:], *pairs[:at]]:
                asked, before = each.ask(turn), cpu_seconds(server.pid)
                target = Target(server.url, TargetOptions(asked.backend, None, "model", extra_body=asked.extra), name=each.name)
                load = Load(concurrency=connections, processes=1, keep_bodies=not turn)
                result = target.run([asked.sample] * connections, load)
                if result.failed:
                    raise SystemExit(f"{each.name}: {result.errors[0]}")
                if turn:
                    each.seconds.append(result.duration)
                    each.cpu.append(cpu_seconds(server.pid) - before)
                    continue
                rows = np.concatenate([row.reshape(-1, width) for row in target.rows(result)[0]])
                first.append(np.log(rows / (1 - rows)) if "task" in asked.extra and width == 1 else rows)
                each.agreement = min_cosine(first[-1], first[0])
    found, base = list[list[str]](), contenders[0].seconds
    for each in contenders:
        ratios = [own / theirs for own, theirs in zip(each.seconds, base, strict=True)]
        time, spread = median(each.seconds), f"{min(ratios):.2f} to {max(ratios):.2f}"
        cells = f"{1e3 * time:,.0f}", f"{time / median(base):.3f}", spread, f"{median(each.cpu):.2f}", f"{each.agreement:.6f}"
        found.append([each.name, *cells])
    return found


def split_texts(folder: Path, size: Size, builder: Builder, *, dtype: str, rounds: int, vllm: bool) -> list[list[str]]:
    """Return the rows for the token vectors of vLLM #39533: texts whole, in pieces, and vLLM with its chunked prefill."""
    preset = PRESETS["token-vectors"](small=True)
    write_qwen3(folder, size)
    asked = Ask("pooling", preset.samples[0], {**preset.extra_body, "truncate_prompt_tokens": None})
    names = {
        f"batches of {_LIMIT} tokens, texts whole": ("whimbrel", "--max-batch-tokens", _LIMIT, "--no-chunked-prefill"),
        f"in pieces of {_LIMIT} tokens, over HTTP": ("whimbrel", "--max-batch-tokens", _LIMIT),
    }
    if vllm:
        task = ("--pooler-config", '{{"task": "token_embed"}}')
        names["vLLM, chunked prefill"] = ("vllm", "--max-num-batched-tokens", _LIMIT, *task)
    contenders = [Contender(name, where, tuple(more), folder, lambda _: asked) for name, (where, *more) in names.items()]
    connections = preset.load.concurrency or 1
    return measure(builder, contenders, dtype=dtype, rounds=rounds, connections=connections, width=size.hidden)


def served_rerank(folder: Path, builder: Builder, *, dtype: str, rounds: int) -> list[list[str]]:
    """Return the rows of a rerank of 100 documents with a new query in every round, ours and vLLM's."""
    queries = make_texts(rounds + 1, words=(88, 92), seed=1)
    documents = make_texts(100, words=(70, 78), seed=2)
    with Engine(str(folder / "saved"), dtype=dtype) as engine:
        requests = [Request([(query, each) for each in documents], ("scores",)) for query in queries]
        ids = [[seq.ids.tolist() for seq in engine.preprocessor.preprocess(request).seqs] for request in requests]

    def ours(turn: int) -> Ask:
        extra = {"return_documents": False, "truncate_prompt_tokens": None}
        return Ask("rerank", Sample(tuple(documents), queries[turn]), extra)

    def theirs(turn: int) -> Ask:
        extra = {"input": ids[turn], "task": "classify", "truncate_prompt_tokens": None}
        return Ask("pooling", Sample(tuple(documents)), extra)

    contenders = [
        Contender("Whimbrel", "whimbrel", (), folder / "saved", ours),
        Contender("Whimbrel, no cache", "whimbrel", ("--prefix-cache-bytes", "0"), folder / "saved", ours),
        *(
            Contender(f"vLLM, {name}", "vllm", ("--hf-overrides", _CLASSES, *arguments), folder / "base", theirs)
            for name, arguments in (("prefix caching", ("--enable-prefix-caching",)), ("none", ("--no-enable-prefix-caching",)))
        ),
    ]
    return measure(builder, contenders, dtype=dtype, rounds=rounds, connections=1)
