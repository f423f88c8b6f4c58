"""Shared prefixes and split texts over HTTP, with vLLM's CPU build beside Whimbrel. Part of prefixes.py.

Servers run on ports of their own, one gets load at a time, and rounds are interleaved in rotating order after one that is not
counted. In that one the answers are compared with the first server's. vLLM gets the token ids of our template, as its own has
other words; so it tokenizes nothing in the rerank. Its environment is that of `benchmarks/peers` (peers.toml).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import orjson
import pybase64
from common import cpu_seconds, make_texts, min_cosine, note

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from environments import Builder, Peer, read_table
from servers import Server

from load import load
from whimbrel import Engine
from whimbrel.types.request import Request
from whimbrel_bench.presets import PRESETS
from whimbrel_bench.random_models import Size, write_qwen3
from whimbrel_bench.words import CANDIDATES

_OURS: Final = ("{python}", "-m", "whimbrel", "serve", "{model}", "--port", "{port}", "--served-name", "model", "--dtype")
_VLLM: Final = (
    "{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--runner", "pooling", "--port", "{port}",
    "--served-model-name", "model", "--dtype",
)  # fmt: skip
_READY: Final = {"whimbrel": "/health/ready", "vllm": "/health"}
_LIMIT: Final = 512
_CLASSES: Final = (
    '{{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}}'
)
"""vLLM's settings of a Qwen3-Reranker, in braces for `str.format`."""


@dataclass(slots=True)
class Contender:
    """One server, the path of its requests, and the body of each of them."""

    name: str
    environment: str
    arguments: tuple[str, ...]
    folder: Path
    path: str
    body: Callable[[int], Any]
    """Number of a round -> body of all of its requests."""
    values: Callable[[bytes], np.ndarray]
    """Body of an answer -> rows to compare."""
    seconds: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    """Processor seconds of the server and its processes in each round."""
    agreement: float = 1.0


class Builds:
    """Environments of peers."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.builder = Builder(read_table(Path(__file__).parent / "peers/peers.toml"), folder.resolve())

    @contextmanager
    def started(self, contenders: Sequence[Contender], dtype: str) -> Generator[list[Server]]:
        """Start all servers, and stop them."""
        with ExitStack() as stack:
            servers: list[Server] = []
            for each in contenders:
                note(f"starting {each.name}")
                self.builder.install(each.environment)
                command = [*(_VLLM if each.environment == "vllm" else _OURS), dtype, *each.arguments]
                settings = {"command": command, "ready": _READY[each.environment]}
                peer = Peer(each.name, each.environment, "", dtype, (), server=settings)
                servers.append(Server(peer, self.builder, each.folder))
                stack.callback(servers[-1].stop)
            yield servers


def measure(builds: Builds, contenders: Sequence[Contender], *, dtype: str, rounds: int, connections: int) -> None:
    """Fill in the seconds of each round of a request on each connection, and the agreement with the first contender."""
    with builds.started(contenders, dtype) as servers:
        pairs, first = list(zip(contenders, servers, strict=True)), list[np.ndarray]()
        for turn in range(rounds + 1):
            at = turn % len(pairs)
            for each, server in [*pairs[at:], *pairs[:at]]:
                body = orjson.dumps({"model": "model"} | each.body(turn))
                before = cpu_seconds(server.pid)
                done = load(server.port, each.path, [[body]] * connections)
                if turn:
                    each.seconds.append(done.seconds)
                    each.cpu.append(cpu_seconds(server.pid) - before)
                    continue
                first.append(each.values(done.bodies[0]))
                each.agreement = _agreement(first[-1], first[0])


def _agreement(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the smallest cosine of two rows, or of scores their correlation."""
    if found.shape != expected.shape:
        return float("nan")
    return float(np.corrcoef(found, expected)[0, 1]) if found.ndim == 1 else min_cosine(found, expected)


def rows_of(contenders: Sequence[Contender]) -> list[list[str]]:
    """Return the rows of a table: the time, over the first, rounds over the first's, processor seconds, and the agreement."""
    first, rows = contenders[0], list[list[str]]()
    for each in contenders:
        ratios = [own / theirs for own, theirs in zip(each.seconds, first.seconds, strict=True)]
        time, processor = median(each.seconds), median(each.cpu)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        ratio = f"{time / median(first.seconds):.3f}"
        rows.append([each.name, f"{1e3 * time:,.0f}", ratio, spread, f"{processor:.2f}", f"{each.agreement:.6f}"])
    return rows


def split_texts(folder: Path, sizes: dict[str, int], builds: Builds, *, dtype: str, rounds: int, vllm: bool) -> list[list[str]]:
    """Return the rows for the token vectors of vLLM #39533: texts whole, in pieces, and vLLM with its chunked prefill."""
    preset = PRESETS["token-vectors"](small=True)
    size = Size(sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"],
                sizes["num_key_value_heads"], sizes["head_dim"])  # fmt: skip
    texts = list(preset.samples[0].texts)
    write_qwen3(folder, size, [*CANDIDATES, *" ".join(texts[:1]).split()])
    body, values = {"input": texts, **preset.extra_body}, partial(_token_vectors, size.hidden)
    limit = str(_LIMIT)
    ours = ("--max-batch-tokens", limit)

    def contender(name: str, environment: str, *arguments: str) -> Contender:
        return Contender(name, environment, arguments, folder, "/pooling", lambda _: body, values)

    contenders = [
        contender(f"batches of {limit} tokens, texts whole", "whimbrel", *ours, "--no-chunked-prefill"),
        contender(f"in pieces of {limit} tokens, over HTTP", "whimbrel", *ours),
    ]
    if vllm:
        contenders.append(contender("vLLM, chunked prefill", "vllm", "--max-num-batched-tokens", limit, "--pooler-config",
                                    '{{"task": "token_embed"}}'))  # fmt: skip
    measure(builds, contenders, dtype=dtype, rounds=rounds, connections=preset.load.concurrency or 1)
    return rows_of(contenders)


def _token_vectors(width: int, body: bytes) -> np.ndarray:
    rows = sorted(orjson.loads(body)["data"], key=lambda row: row["index"])
    return np.concatenate([np.frombuffer(pybase64.b64decode(row["data"]), "<f4").reshape(-1, width) for row in rows])


def served_rerank(folder: Path, builds: Builds, *, dtype: str, rounds: int) -> list[list[str]]:
    """Return the rows of a rerank of 100 documents with a new query in every round, ours and vLLM's."""
    queries = make_texts(rounds + 1, words=(88, 92), seed=1)
    documents = make_texts(100, words=(70, 78), seed=2)
    with Engine(str(folder / "saved"), dtype=dtype) as engine:
        requests = [Request([(query, each) for each in documents], ("scores",)) for query in queries]
        ids = [[seq.ids.tolist() for seq in engine.preprocessor.preprocess(request).seqs] for request in requests]

    def ours(turn: int) -> Any:
        return {"query": queries[turn], "documents": documents, "return_documents": False}

    contenders = [
        Contender("Whimbrel", "whimbrel", (), folder / "saved", "/v1/rerank", ours, _scores),
        Contender("Whimbrel, no cache", "whimbrel", ("--prefix-cache-bytes", "0"), folder / "saved", "/v1/rerank", ours,
                  _scores),
        *(
            Contender(f"vLLM, {name}", "vllm", ("--hf-overrides", _CLASSES, *arguments), folder / "base", "/pooling",
                      lambda turn: {"input": ids[turn], "task": "classify"}, _classes)
            for name, arguments in (("prefix caching", ("--enable-prefix-caching",)), ("none", ("--no-enable-prefix-caching",)))
        ),
    ]  # fmt: skip
    measure(builds, contenders, dtype=dtype, rounds=rounds, connections=1)
    return rows_of(contenders)


def _scores(body: bytes) -> np.ndarray:
    rows = sorted(orjson.loads(body)["results"], key=lambda row: row["index"])
    return np.array([row["relevance_score"] for row in rows])


def _classes(body: bytes) -> np.ndarray:
    rows = sorted(orjson.loads(body)["data"], key=lambda row: row["index"])
    probabilities = np.array([row["data"][0] for row in rows])
    return np.log(probabilities / (1 - probabilities))
