"""The command `whimbrel bench compare`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from whimbrel.cli.flags import Device
from whimbrel.cli.shared_options import need, option
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel_bench.cli.groups import spread
from whimbrel_bench.options import LOAD_PANEL, RESULTS_PANEL, DatasetOptions, Load, TargetOptions

if TYPE_CHECKING:
    from whimbrel_bench.compare import Contender

_SIDES: Final = "Two servers, two models, or one model in two dtypes."
_CHECKED: Final = "Requests whose results are compared before any time is taken."


@spread(
    without=("endpoint", "headers", "verify_tls", "ready_seconds", "timeout"), num_prompts=64, input_len=64, range_ratio=0.5
)
def compare(
    *,
    sides: Annotated[
        list[str] | None, typer.Argument(metavar="URL URL | MODEL [MODEL]", help=_SIDES, show_default=False)
    ] = None,
    dtype: Annotated[list[str] | None, option("DTYPE", "dtype of a model's engine. Repeat it to compare two.")] = None,
    device: Device = "auto",
    target: TargetOptions,
    dataset: DatasetOptions,
    max_concurrency: Annotated[int, option("N", "Requests on their way at a server.", min=1, panel=LOAD_PANEL)] = 8,
    rounds: Annotated[int, option("N", "Rounds of each side, in turns.", min=1, panel=LOAD_PANEL)] = 20,
    min_cosine: Annotated[
        float, option("C", "Lowest cosine at which both sides count as the same.", min=-1.0, max=1.0, panel=LOAD_PANEL)
    ] = 0.999,
    num_checked: Annotated[int, option("N", _CHECKED, min=1, panel=LOAD_PANEL)] = 16,
    json_path: Annotated[Path | None, option("PATH", "Write the result as JSON.", "--json", panel=RESULTS_PANEL)] = None,
) -> None:
    """Compare two servers, models or dtypes."""
    from whimbrel.cli import console
    from whimbrel_bench import compare as comparison
    from whimbrel_bench.cli.files import check_writable, write_json

    dataset.check()
    if json_path is not None:
        check_writable(json_path)
    names = sides or []
    screen = console.stderr_console()
    try:
        with console.signals_exit():
            contenders = (
                _servers(names, dataset, target, concurrency=max_concurrency, num_checked=num_checked)
                if any("://" in name for name in names)
                else _engines(names, dtype or [], dataset, device=device, num_checked=num_checked)
            )
            with contenders as (first, second), screen.status("comparing results") as status:
                found = comparison.compare(
                    first,
                    second,
                    rounds=rounds,
                    threshold=min_cosine,
                    on_round=lambda number: status.update(f"round {number} of {rounds}"),
                )
    except KeyboardInterrupt:
        screen.print("note: stopped before the end of a first round.", markup=False)
        raise
    typer.echo("\n".join(comparison.describe(found)))
    if json_path is not None:
        write_json(json_path, comparison.to_json(found))
        screen.print(f"wrote {json_path}", markup=False)
    if found.failure:
        raise WhimbrelError(f"{found.failure} The rounds before are above.")
    raise typer.Exit(130 if found.interrupted else 0)


@contextmanager
def _servers(
    urls: Sequence[str], dataset: DatasetOptions, options: TargetOptions, *, concurrency: int, num_checked: int
) -> Generator[tuple[Contender, Contender]]:
    from whimbrel_bench.cli.runs import find_words, make_targets, read_urls
    from whimbrel_bench.compare import server_contender
    from whimbrel_bench.datasets import make_samples

    if len(urls) != 2 or not all("://" in url for url in urls):
        raise SetupError(f"{len(urls)} sides: servers are compared by two URLs.", hint="whimbrel bench compare URL URL")
    targets = make_targets([("first", urls[0]), ("second", urls[1])] if urls[0] == urls[1] else read_urls(urls), options)
    samples = make_samples(dataset, find_words(dataset, targets[0]))
    first, second = (server_contender(target, samples, Load(concurrency=concurrency), num_checked) for target in targets)
    yield first, second


@contextmanager
def _engines(
    models: Sequence[str], dtypes: Sequence[str], dataset: DatasetOptions, *, device: str, num_checked: int
) -> Generator[tuple[Contender, Contender]]:
    need("torch")
    from whimbrel_bench.compare import engine_contenders
    from whimbrel_bench.datasets import make_samples
    from whimbrel_bench.words import model_words

    if len(models) > 2 or len(dtypes) > 2 or (len(models) < 2 and len(dtypes) < 2):
        raise SetupError(
            f"{len(models)} models and {len(dtypes)} dtypes make no two sides.",
            hint="whimbrel bench compare URL URL, or MODEL MODEL, or MODEL --dtype float32 --dtype bfloat16",
        )
    names: list[str | None] = [*models] or [None]
    samples = make_samples(dataset, model_words(dataset, names[0]))
    sides = [(names[i % len(names)], dtypes[i % len(dtypes)] if dtypes else "auto") for i in range(2)]
    with engine_contenders(sides, device, samples, num_checked=num_checked) as (first, second):
        yield first, second
