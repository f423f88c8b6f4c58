"""Presets (presets.toml): published workloads with figures, each with a random model or one of the Hub, and its own server."""

import shlex
import tempfile
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from whimbrel_bench import random_models
from whimbrel_bench.backends import Sample
from whimbrel_bench.datasets import in_requests, make_samples
from whimbrel_bench.options import DatasetOptions, Load, TargetOptions
from whimbrel_bench.random_models import Size
from whimbrel_bench.results import Result, word
from whimbrel_bench.server import serving
from whimbrel_bench.tables import table
from whimbrel_bench.words import local_words

PRESETS: Final[Mapping[str, Any]] = tomllib.loads(files("whimbrel_bench").joinpath("presets.toml").read_text("utf-8"))
_WRITERS: Final[Mapping[str, Callable[..., None]]] = {
    "gritlm": random_models.write_gritlm, "qwen3": random_models.write_qwen3, "colbert": random_models.write_colbert,
}  # fmt: skip


class Preset(msgspec.Struct):
    """One workload in one size, and its published figures: two columns of numbers by the name of the row."""

    name: str
    target: TargetOptions
    dataset: DatasetOptions
    load: Load
    model: str
    """Hub id of the real model."""
    writer: str
    size: Size
    serve: tuple[str, ...]
    """Arguments of `whimbrel serve`."""
    source: str
    hardware: str
    published: dict[str, tuple[str, str]]
    writer_options: dict[str, int] = {}
    template: str = ""
    """A text that is not random: with a title and its number, and how often it stands in a row."""
    titles: tuple[str, ...] = ("",)
    repeats: tuple[int, ...] = (1,)

    def samples(self) -> list[Sample]:
        """Return the requests."""
        if self.dataset.is_random:
            return make_samples(self.dataset, local_words(None))
        texts = [
            self.template.format(title=self.titles[i % len(self.titles)], number=i) * self.repeats[i % len(self.repeats)]
            for i in range(self.dataset.num_prompts)
        ]
        return in_requests(texts, self.dataset.batch_size)

    def write(self, folder: Path) -> None:
        """Write the random model."""
        _WRITERS[self.writer](folder, self.size, **self.writer_options)


def read_preset(name: str, scale: str) -> Preset:
    """Return a preset in its full or small size."""
    return msgspec.convert({"name": name} | PRESETS[name] | PRESETS[name][scale], Preset)


@contextmanager
def preset_server(
    preset: Preset, *, random_weights: bool, arguments: Sequence[str], say: Callable[[str], None]
) -> Generator[str]:
    """Write the random model, if it is one, start a server of it, and yield its URL. Raises SetupError."""
    with tempfile.TemporaryDirectory(prefix="whimbrel-bench-") as folder:
        path = Path(folder) / f"random-{preset.name}"
        if random_weights:
            preset.write(path)
            megabytes = sum(file.stat().st_size for file in path.rglob("*")) / 1e6
            say(f"wrote a random model of the shape of {preset.model}: {megabytes:,.0f} MB")
        words = [str(path) if random_weights else preset.model, *preset.serve, *arguments]
        say(f"$ whimbrel serve {shlex.join(words)}")
        with serving(*words) as server:
            yield server.url


def beside_published(preset: Preset, result: Result, *, hardware: str, model: str) -> str:
    """Return a table of our figures beside the published ones, and what the reader must know of these."""
    ms = result.milliseconds()
    ours = {
        "requests/s": f"{result.request_throughput:,.2f}",
        "tokens/s": f"{result.token_throughput:,.0f}",
        "mean ms": f"{ms['mean_e2el_ms']:,.0f}",
        **{f"p{word(p)} ms": f"{ms[f'p{word(p)}_e2el_ms']:,.0f}" for p in result.setting.load.percentiles},
    }
    rows = [[row, ours[row], *figures] for row, figures in preset.published.items()]
    rows.append(["hardware", hardware, preset.hardware, preset.hardware])
    return (
        f"{table([preset.name, 'this run', 'vLLM before (*)', 'vLLM after (*)'], rows)}\n\n"
        f"(*) Not from this run: published figures. Source: {preset.source}. "
        f"This run: {model}. Other hardware or another model makes other numbers: these columns are no comparison."
    )
