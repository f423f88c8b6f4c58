"""The host alone: the server with a runner that computes nothing (`runners.py`), also on a machine without a GPU.

Requests per second are what all cores do together, the client's among them. Those of a core are by the processor time of the
server's processes: reading, tokenising, packing, rows, answers. A worker that is much busier than the others has more of the
connections. The models have the width of bge-base, and one layer.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from common import SHORT, make_texts
from setting import Row, Setting, wrapped_by
from workloads import measured, of_result

from whimbrel.types.machine_limits import usable_processors
from whimbrel_bench import random_models
from whimbrel_bench.backends import Sample
from whimbrel_bench.datasets import in_requests
from whimbrel_bench.options import Load, TargetOptions
from whimbrel_bench.processes import cpu_seconds, family, others_cores
from whimbrel_bench.random_models import Size
from whimbrel_bench.server import Serving, serving
from whimbrel_bench.target import Target

_WIDTH: Final = 768
_SIZE: Final = Size(_WIDTH, 64, 1, 12)
_TEXTS: Final = 32
"""Texts of a request."""


def write_models(folder: Path) -> list[str]:
    """Write an encoder and a reranker of pairs, and return their folders."""
    head: Any = {"classifier.weight": (1, _WIDTH), "classifier.bias": (1,)}
    kind = "BertForSequenceClassification"
    random_models.write_bert(folder / "encoder", _SIZE)
    random_models._write_bert(folder / "reranker", _SIZE, head, architecture=kind, positions=512, prefix="bert.")
    config = folder / "reranker/config.json"
    config.write_text(config.read_text().replace("{", '{"id2label": {"0": "LABEL_0"},', 1))
    return [str(folder / "encoder"), str(folder / "reranker")]


def workloads(*, small: bool) -> list[tuple[str, TargetOptions, list[Sample]]]:
    """Return loads: what a request has, its target, and the requests."""
    number = 2 if small else 64
    short, passages = make_texts(_TEXTS * number, words=SHORT), make_texts(_TEXTS * number, words=(60, 100))
    pairs = [Sample(texts, short[i]) for i, (texts, *_) in enumerate(in_requests(passages, _TEXTS))]
    base64, tokens = {"encoding_format": "base64"}, {"task": "token_embed", "encoding_format": "bytes"}
    return [
        ("short texts", TargetOptions(model="encoder", extra_body=base64), in_requests(short, _TEXTS)),
        (
            "token vectors of passages",
            TargetOptions("pooling", model="encoder", extra_body=tokens),
            in_requests(passages, _TEXTS),
        ),
        ("passages, reranked", TargetOptions("rerank", model="reranker"), pairs),
    ]


def seconds_of(server: Serving) -> dict[int, float]:
    """Return the processor time of each of the server's processes."""
    supervisor, *others = family(server.pid)
    seconds = {pid: cpu_seconds(pid) for pid in others}
    return seconds | {supervisor: cpu_seconds(supervisor) - sum(seconds.values())}


def run(_: str, setting: Setting) -> Iterator[Row]:
    cores = usable_processors()
    load = Load(concurrency=4 * cores, duration=0.5 if setting.small else 1.5 if cores > 4 else 5.0)
    with tempfile.TemporaryDirectory() as folder, wrapped_by("runners:NullRunner"):
        models = write_models(Path(folder))
        for workers in (1,) if setting.small else (2, 4, 8) if cores > 4 else (1, 2):
            with serving(*models, "--workers", str(workers), "--max-batch-tokens", "16384") as server:
                for name, options, samples in workloads(small=setting.small):
                    target = Target(server.url, options)
                    target.connect()
                    target.warm_up(samples, load)
                    before, begin = seconds_of(server), perf_counter()
                    with measured(server) as taken:
                        result = target.run(samples, load)
                    took, found = perf_counter() - begin, {pid: now - before[pid] for pid, now in seconds_of(server).items()}
                    spent, engines = sum(found.values()), server.engines()
                    taken["engines"] = sum(found[pid] for pid in engines) / took
                    taken["busiest worker"] = max(each for pid, each in found.items() if pid not in engines) / took
                    row = {f"{_TEXTS} in a request": name, "workers": workers} | of_result(result) | taken
                    yield row | {"requests/s a core": result.completed / spent, "tokens/s a core": result.total_input / spent}
    yield {"cores that other work took": others_cores()}
