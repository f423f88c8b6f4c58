"""The command `whimbrel eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.markup import escape

from whimbrel.cli.flags import engine_arguments, with_flags
from whimbrel.cli.shared_options import AsJson, flag, need, option
from whimbrel.errors import SetupError
from whimbrel_bench.evaluation.measures import DEFAULT

if TYPE_CHECKING:
    from whimbrel_bench.evaluation.collection import Collection
    from whimbrel_bench.evaluation.models import Model

_DATA_PANEL: Final = "Data"
_RESULTS_PANEL: Final = "Input and output"
_MODELS: Final = (
    "Checkpoint folders, Hub ids, or URLs of servers (URL#NAME for one of several models). "
    "[default: the packaged all-MiniLM-L6-v2]"
)
_COMPARE: Final = (
    "Systems to make of each model, the first of which the others are compared with: a dtype, dim:N, int8-vectors, binary, "
    "pooled:F, muvera, rescore:N, or several joined by +. For example float32,int8,dim:128+binary."
)
_FIRST_STAGE: Final = "Model, or run in TREC's format, whose best documents the models rerank."
_data, _results = partial(option, panel=_DATA_PANEL), partial(option, panel=_RESULTS_PANEL)


@with_flags("device", "dtype", "max_length", "pooling", "reranker", "matryoshka", "tokenizer", "accept_config")
def evaluate(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL|URL", help=escape(_MODELS), show_default=False)] = None,
    *,
    data: Annotated[Path | None, _data("DIR", "Folder with queries, corpus and qrels in BEIR's layout.")] = None,
    split: Annotated[str, _data("NAME", "Judgements of such a folder: qrels/NAME.tsv.")] = "test",
    queries: Annotated[Path | None, _data("FILE", "Queries: JSONL, CSV or TSV with an id and a text.")] = None,
    docs: Annotated[Path | None, _data("FILE", "Documents: the same, with or without a title.")] = None,
    qrels: Annotated[Path | None, _data("FILE", "Judgements: query, document and grade, or TREC's four columns.")] = None,
    incomplete: Annotated[
        bool, flag("--incomplete", "Count relevant documents that are missing as never found.", panel=_DATA_PANEL)
    ] = False,
    mteb: Annotated[str | None, _data("TASK,TASK", "Tasks of mteb in place of your own data (needs whimbrel[mteb]).")] = None,
    compare: Annotated[str | None, option("SYSTEM,SYSTEM", _COMPARE)] = None,
    output: Annotated[
        Literal["dense", "sparse", "multi_vector"] | None,
        option("NAME", "Vectors to search by. [default: the model's main ones]"),
    ] = None,
    first_stage: Annotated[str | None, option("MODEL|FILE", _FIRST_STAGE)] = None,
    top_k: Annotated[int, option("N", "Documents to find for each query, or to rerank.", min=1, max=10_000)] = 100,
    measures: Annotated[str, _results("LIST", "Measures, the first of which is compared.")] = DEFAULT,
    page: Annotated[Path | None, _results("FILE.html", "Write a page with a picture and all tables.")] = None,
    dialect: Annotated[Literal["whimbrel", "openai", "tei", "cohere"], option("NAME", "API of the servers.")] = "whimbrel",
    api_key: Annotated[
        str | None, typer.Option(envvar="WHIMBREL_API_KEY", help="API key of the servers.", metavar="KEY")
    ] = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Evaluate models on judged queries."""
    from whimbrel.cli import console
    from whimbrel_bench.evaluation.models import is_url, open_model

    names: list[str | None] = [*models] if models else [None]
    if not all(each is not None and is_url(each) for each in [*names, *_model_of(first_stage)]):
        need("torch")
    arguments = engine_arguments(given)
    dtype = arguments.pop("dtype", None)
    screen = console.stderr_console()
    with console.signals_exit(), screen.status("reading") as status:

        def open_one(name: str | None, own: str | None) -> AbstractContextManager[Model]:
            served = name is not None and is_url(name)
            chosen = own if served or own is not None else dtype
            tell: Callable[[str], None] = lambda phase: status.update(escape(f"{name or 'the packaged model'}: {phase}"))  # noqa: E731
            return open_model(name, chosen, {} if served else arguments, dialect=dialect, api_key=api_key, tell=tell)

        if mteb is not None:
            _check_alone({"--data": data, "--queries": queries, "--docs": docs, "--qrels": qrels, "--compare": compare,
                          "--first-stage": first_stage, "--page": page})  # fmt: skip
            results = _run_mteb(names, dtype, output, mteb, open_one)
            shown, text = results, _mteb_table(results)
        else:
            from whimbrel_bench.evaluation.measures import read_measures
            from whimbrel_bench.evaluation.report import make_report, to_json, to_page, to_text
            from whimbrel_bench.evaluation.run import Evaluation, run
            from whimbrel_bench.evaluation.variants import read_variants

            _check_page(page)
            chosen = read_measures(measures)
            if deep := next((each for each in chosen if each.depth > top_k), None):
                raise SetupError(
                    f"{deep.label} needs {deep.depth} documents; --top-k is {top_k}.", hint=f"--top-k {deep.depth}"
                )
            evaluation = Evaluation(names, read_variants(compare, dtype), top_k, output, first_stage)
            collection = _read(data, split, queries, docs, qrels, incomplete=incomplete)
            systems = run(evaluation, collection, open_one, lambda words: status.update(escape(words)))
            status.update("computing intervals")
            report = make_report(collection, chosen, systems)
            shown, text = to_json(report), to_text(report)
            if page is not None:
                from whimbrel_bench.cli.files import write_errors

                with write_errors(page):
                    page.write_text(to_page(report), encoding="utf-8")
    if as_json:
        console.print_json(shown)
    else:
        typer.echo(text)
    if page is not None:
        screen.print(f"wrote {page}", markup=False)


def _model_of(first_stage: str | None) -> list[str]:
    """Return the model of a first stage, none if it is a file."""
    return [] if first_stage is None or Path(first_stage).is_file() else [first_stage]


def _check_alone(others: Mapping[str, object]) -> None:
    if named := next((name for name, value in others.items() if value is not None), None):
        raise SetupError(f"--mteb brings its own data and measures; {named} is for yours.", hint=f"leave out --mteb or {named}")


def _check_page(page: Path | None) -> None:
    if page is None:
        return
    from whimbrel_bench.cli.files import check_writable

    if page.suffix.lower() != ".html":
        raise SetupError(f"cannot write {page.name} as a page.", hint="--page takes a path that ends in .html")
    check_writable(page)


def _read(
    data: Path | None, split: str, queries: Path | None, docs: Path | None, qrels: Path | None, *, incomplete: bool
) -> Collection:
    from whimbrel_bench.evaluation.collection import find_files, read_collection

    files = {"--queries": queries, "--docs": docs, "--qrels": qrels}
    if data is not None:
        if named := next((name for name, value in files.items() if value is not None), None):
            raise SetupError(f"--data and {named} are two ways to say the same.", hint="leave one of them out")
        return read_collection(*find_files(data, split), incomplete=incomplete)
    if queries is None or docs is None or qrels is None:
        missing = next(name for name, value in files.items() if value is None)
        raise SetupError(f"{missing} is missing.", hint="name --queries, --docs and --qrels, or a folder with these: --data")
    return read_collection(queries, docs, qrels, incomplete=incomplete)


def _run_mteb(
    names: Sequence[str | None],
    dtype: str | None,
    output: str | None,
    tasks: str,
    open_one: Callable[[str | None, str | None], AbstractContextManager[Model]],
) -> list[dict[str, Any]]:
    from whimbrel_bench.evaluation.mteb_models import evaluate_tasks

    results: list[dict[str, Any]] = []
    for name in names:
        with open_one(name, dtype) as model:
            results += [{"model": model.name, "about": model.about, **each} for each in evaluate_tasks(model, output, tasks)]
    return results


def _mteb_table(results: Sequence[Mapping[str, Any]]) -> str:
    from whimbrel_bench.tables import table

    rows = [[f"{each['task']} ({each['type']})", each["model"], each["measure"], f"{each['score']:.4f}"] for each in results]
    return table(["task", "model", "measure", "score"], rows)
