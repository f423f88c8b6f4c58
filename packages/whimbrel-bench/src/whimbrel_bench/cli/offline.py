"""The command `whimbrel bench offline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whimbrel.cli.flags import Device, MaxBatchTokens, MaxLength
from whimbrel.cli.shared_options import ModelArgument, need, option
from whimbrel_bench.cli.groups import spread
from whimbrel_bench.options import LOAD_PANEL, RESULTS_PANEL, DatasetOptions

if TYPE_CHECKING:
    from whimbrel_bench.offline import OfflineResult


@spread(without=("name",), num_prompts=512, batch_size=32)
def offline(
    *,
    model: ModelArgument = None,
    dtype: Annotated[
        list[str] | None, option("DTYPE", "auto, float32, bfloat16 or float16. May be repeated. [default: auto]")
    ] = None,
    device: Device = "auto",
    max_length: MaxLength = None,
    max_batch_tokens: MaxBatchTokens = None,
    dataset: DatasetOptions,
    rounds: Annotated[int, option("N", "Rounds over all texts; the median counts.", min=1, panel=LOAD_PANEL)] = 3,
    json_path: Annotated[Path | None, option("PATH", "Write the result as JSON.", "--json", panel=RESULTS_PANEL)] = None,
) -> None:
    """Measure the engine alone."""
    need("torch")
    from whimbrel.cli import console
    from whimbrel_bench.cli.files import check_writable, write_json
    from whimbrel_bench.offline import OfflineOptions, run_offline, to_json

    if json_path is not None:
        check_writable(json_path)
    dataset = replace(dataset, name="texts" if dataset.path else "random")
    options = OfflineOptions(model, dataset, device, rounds, max_length, max_batch_tokens)
    screen = console.stderr_console()
    results: list[OfflineResult] = []
    interrupted = False
    with console.signals_exit():
        for each in dtype or ["auto"]:
            with screen.status(f"running {each}") as status:
                words = f"running {each}: {{}} of {rounds} rounds"
                found = run_offline(options, each, on_round=lambda number, words=words: status.update(words.format(number)))
            results += [found] if found is not None else []
            if found is None or found.interrupted:
                interrupted = True
                screen.print(f"note: stopped while {each} ran.", markup=False)
                break
    if results:
        typer.echo(report(results))
    if json_path is not None and results:
        write_json(json_path, to_json(results))
        screen.print(f"wrote {json_path}", markup=False)
    raise typer.Exit(130 if interrupted else 0)


def report(results: Sequence[OfflineResult]) -> str:
    """Return the results as text: a table of dtypes, the stages of each, and the cosines."""
    from whimbrel_bench.machine import describe_machine, describe_software
    from whimbrel_bench.offline import compared
    from whimbrel_bench.tables import table

    first = results[0]
    lanes = f"{first.lanes} lane{'s' if first.lanes > 1 else ''}"
    lines = [
        f"{first.model}, {first.output}, {first.device} ({lanes})",
        f"{describe_machine()}; {describe_software()}",
        f"{first.texts:,} texts, {first.tokens:,} tokens, {_rounds(results)}",
        "",
    ]
    head = ["dtype", "tokens/s", "texts/s", "of the peak", "peak TFLOP/s", "peak memory MiB", "load s"]
    lines.append(table(head, [_row(each) for each in results]))
    lines += ["", "Time by stage, of all rounds"]
    stages = ["dtype", *(f"{name} s" for name in ("tokenize", "pack", "model", "collect")), "queue s per request"]
    lines.append(table(stages, [_stages(each) for each in results]))
    lines += [
        "",
        "of the peak: products with weights, by a large prepacked product measured in the same run; attention is not counted.",
    ]
    lines.append("model: time of batches on the lanes, summed over batches that overlap.")
    for one, other, lowest, mean in compared(results):
        lines.append(f"cosines of {one} and {other}: lowest {lowest:.6f}, mean {mean:.6f}")
    return "\n".join(lines)


def _rounds(results: Sequence[OfflineResult]) -> str:
    number = len(results[0].round_seconds)
    last = results[-1]
    stopped = f" ({len(last.round_seconds)} of {last.dtype}: stopped early)" if last.interrupted else ""
    return f"{number} round{'s' if number > 1 else ''}{stopped}"


def _row(result: OfflineResult) -> list[str]:
    share = result.share_of_peak
    return [
        result.dtype,
        f"{result.tokens_per_second:,.0f}",
        f"{result.tokens_per_second * result.texts / result.tokens:,.1f}",
        "unknown" if share is None else f"{share:.0%}",
        "not measured" if result.peak_flops_per_second is None else f"{result.peak_flops_per_second / 1e12:.3f}",
        f"{result.peak_rss_bytes / 2**20:,.0f}",
        f"{result.load_seconds:.1f}",
    ]


def _stages(result: OfflineResult) -> list[str]:
    stages = result.stage_seconds
    seconds = [f"{stages[name]:.2f}" for name in ("tokenize", "pack", "compute", "collect")]
    return [result.dtype, *seconds, f"{stages['queue'] / result.requests:.3f}"]
