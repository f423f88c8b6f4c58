"""The command `whimbrel bench compare`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from whimbrel.cli.flags import Device
from whimbrel.cli.shared_options import need, option
from whimbrel.errors import SetupError
from whimbrel_bench.cli.bench_options import (
    DATASET_PANEL,
    LOAD_PANEL,
    ApiKey,
    Backend,
    BatchSize,
    DatasetName,
    DatasetPath,
    ExtraBody,
    Json,
    ModelName,
    RangeRatio,
    Seed,
    TokenizerName,
    check_dataset,
    read_extra_body,
)

if TYPE_CHECKING:
    from rich.console import Console

    from whimbrel_bench.compare import Contender
    from whimbrel_bench.datasets import DatasetOptions
    from whimbrel_bench.target import TargetOptions


def compare(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL URL | MODEL [MODEL]", help="Two servers, two models, or one model in two dtypes.", show_default=False
        ),
    ] = None,
    *,
    dtype: Annotated[list[str] | None, option("DTYPE", "dtype of a model's engine. Repeat it to compare two.")] = None,
    device: Device = "auto",
    backend: Backend = "openai-embeddings",
    model: ModelName = None,
    api_key: ApiKey = None,
    extra_body: ExtraBody = None,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    num_prompts: Annotated[int, option("N", "Number of prompts in a round.", min=1, panel=DATASET_PANEL)] = 64,
    random_input_len: Annotated[
        int, option("N", "Tokens of a random prompt, special tokens included.", min=1, panel=DATASET_PANEL)
    ] = 64,
    random_range_ratio: RangeRatio = 0.5,
    random_batch_size: BatchSize = 1,
    tokenizer: TokenizerName = None,
    seed: Seed = 0,
    max_concurrency: Annotated[int, option("N", "Requests on their way at a server.", min=1, panel=LOAD_PANEL)] = 8,
    rounds: Annotated[int, option("N", "Rounds of each side, in turns.", min=1, panel=LOAD_PANEL)] = 20,
    min_cosine: Annotated[
        float, option("C", "Lowest cosine at which both sides count as the same.", min=-1.0, max=1.0, panel=LOAD_PANEL)
    ] = 0.999,
    num_checked: Annotated[
        int, option("N", "Requests whose results are compared before any time is taken.", min=1, panel=LOAD_PANEL)
    ] = 16,
    json_path: Json = None,
) -> None:
    """Compare two servers, models or dtypes."""
    from whimbrel.cli import console
    from whimbrel.errors import WhimbrelError
    from whimbrel_bench import compare as comparison
    from whimbrel_bench.cli.files import check_writable, write_json
    from whimbrel_bench.datasets import DatasetOptions
    from whimbrel_bench.target import TargetOptions

    check_dataset(dataset_name, dataset_path)
    if json_path is not None:
        check_writable(json_path)
    dataset = DatasetOptions(
        dataset_name, dataset_path, num_prompts, seed, random_input_len, random_range_ratio, random_batch_size
    )
    options = TargetOptions(backend, None, model, api_key, {}, read_extra_body(extra_body))
    screen = console.stderr_console()
    with console.signals_exit(), _stop_noted(screen):
        contenders = (
            _servers(sides or [], dataset, options, tokenizer=tokenizer, concurrency=max_concurrency, num_checked=num_checked)
            if any("://" in side for side in sides or ())
            else _engines(sides or [], dtype or [], dataset, device=device, tokenizer=tokenizer, num_checked=num_checked)
        )
        with contenders as (first, second), screen.status("comparing results") as status:
            found = comparison.compare(
                first,
                second,
                rounds=rounds,
                threshold=min_cosine,
                on_round=lambda number: status.update(f"round {number} of {rounds}"),
            )
    typer.echo("\n".join(comparison.describe(found)))
    if json_path is not None:
        write_json(json_path, comparison.to_json(found))
        screen.print(f"wrote {json_path}", markup=False)
    if found.failure:
        raise WhimbrelError(f"{found.failure} The rounds before are above.")
    raise typer.Exit(130 if found.interrupted else 0)


@contextmanager
def _stop_noted(screen: Console) -> Generator[None]:
    """Say after Ctrl-C that there is no result."""
    try:
        yield
    except KeyboardInterrupt:
        screen.print("note: stopped before the end of a first round.", markup=False)
        raise


@contextmanager
def _servers(
    urls: Sequence[str],
    dataset: DatasetOptions,
    options: TargetOptions,
    *,
    tokenizer: str | None,
    concurrency: int,
    num_checked: int,
) -> Generator[tuple[Contender, Contender]]:
    need("httptools")
    from whimbrel_bench.cli.bench_options import make_targets, read_urls
    from whimbrel_bench.cli.runs import Plan, find_words
    from whimbrel_bench.compare import ServerContender
    from whimbrel_bench.datasets import make_samples
    from whimbrel_bench.target import Load

    if len(urls) != 2 or not all("://" in url for url in urls):
        raise SetupError(f"{len(urls)} sides: servers are compared by two URLs.", hint="whimbrel bench compare URL URL")
    load = Load(concurrency=concurrency)
    named = [("first", urls[0]), ("second", urls[1])] if urls[0] == urls[1] else read_urls(list(urls), "", 0)
    targets = make_targets(named, options)
    samples = make_samples(dataset, find_words(Plan(dataset, load, tokenizer), targets[0]))
    first, second = (ServerContender(target, samples, load, num_checked) for target in targets)
    yield first, second


@contextmanager
def _engines(
    models: Sequence[str],
    dtypes: Sequence[str],
    dataset: DatasetOptions,
    *,
    device: str,
    tokenizer: str | None,
    num_checked: int,
) -> Generator[tuple[Contender, Contender]]:
    need("torch")
    from whimbrel_bench.compare import engine_pair
    from whimbrel_bench.datasets import make_samples
    from whimbrel_bench.words import local_words

    if len(models) > 2 or len(dtypes) > 2 or (len(models) < 2 and len(dtypes) < 2):
        raise SetupError(
            f"{len(models)} models and {len(dtypes)} dtypes make no two sides.",
            hint="whimbrel bench compare URL URL, or MODEL MODEL, or MODEL --dtype float32 --dtype bfloat16",
        )
    sides: list[str | None] = [*models] or [None]
    name = tokenizer or sides[0]
    words = local_words(None if name == "packaged" else name) if dataset.is_random else None
    samples = make_samples(dataset, words)
    with engine_pair(sides, dtypes or ["auto"], device, samples, num_checked=num_checked) as pair:
        yield pair
