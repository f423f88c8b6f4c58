"""The command `whimbrel run-batch`: a file of requests to a file of answers, as OpenAI's Batch API and vLLM write them.

The exit code is 0, 3 if requests were refused, 1 for an error that ended the run, and 130 after Ctrl-C. After each of the last
two the same command goes on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from hashlib import file_digest
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from whimbrel import __version__
from whimbrel.cli import console
from whimbrel.cli.flags import with_flags
from whimbrel.cli.progress import TextProgress, show_progress
from whimbrel.cli.shared_options import OUTPUT_PANEL, SERVER_PANEL, ModelOption, flag, need, option
from whimbrel.cli.verb_commands import loaded
from whimbrel.errors import InvalidRequest, SetupError

if TYPE_CHECKING:
    from whimbrel.client.base import Settings
    from whimbrel.server.batches.lines import LineAnswer
    from whimbrel.server.batches.partial import RunIdentity
    from whimbrel.server.batches.reading import Line
    from whimbrel.server.batches.run import Written

KEY_VARIABLE: Final = "WHIMBREL_API_KEY"
_SOME_REFUSED: Final = 3
_MAX_LINE: Final = 32 * 2**20
_WAIT_SECONDS: Final = 600.0
"""Time for which a server that cannot be reached, or has no room, is asked again."""
_LONGEST_PAUSE: Final = 30.0

Ask: TypeAlias = "Callable[[str, bytes, str], Awaitable[LineAnswer]]"
"""(path, body, id of the request) -> answer."""


@with_flags("device", "dtype", "max_length", "max_batch_tokens", "pooling", "reranker", "tokenizer", "accept_config")
def run_batch(
    *,
    input_file: Annotated[
        Path,
        typer.Option(
            "--input-file",
            "-i",
            metavar="FILE",
            help="Requests, one to a line.",
            show_default=False,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ],
    output_file: Annotated[
        Path,
        typer.Option(
            "--output-file", "-o", metavar="FILE", help="Answers, in the order of the requests.", show_default=False,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ],
    restart: Annotated[
        bool, flag("--restart", "Drop the answers that an earlier run left, and start anew.", panel=OUTPUT_PANEL)
    ] = False,
    model: ModelOption = None,
    url: Annotated[
        str | None,
        option("URL", f"Server to ask in place of a model here. The key is in {KEY_VARIABLE}.", "--url", panel=SERVER_PANEL),
    ] = None,
    **given: Any,
) -> None:  # fmt: skip
    _check_files(input_file, output_file)
    options = {name: str(value) for name, value in given.items() if value not in (None, False, [], ())}
    if url is not None and (model is not None or options):
        used = "model" if model is not None else next(iter(options))
        raise SetupError(f"--{used.replace('_', '-')} is for a model that runs here, and not for --url.")
    settings = None if url is None else _settings_of(url)
    need("starlette", *(("torch",) if url is None else ()))
    before = _stamp(input_file)
    with console.signals_exit():
        if settings is None:
            with loaded(model, given) as engine:
                from whimbrel.engine.engine import AsyncEngine

                plan = engine.plan
                options |= {"dtype": plan.dtype, "device": plan.device, "max_length": str(plan.max_length)}
                identity = _identity(input_file, plan.served_name, plan.revision, options)
                asking = partial(_asking_here, AsyncEngine(engine))
                code = _run(input_file, output_file, identity, asking, before=before, restart=restart)
        else:
            identity = _identity(input_file, settings.urls[0], "", {})
            code = _run(input_file, output_file, identity, partial(_asking_at, settings), before=before, restart=restart)
    raise typer.Exit(code)


def _check_files(input_file: Path, output_file: Path) -> None:
    """Raise SetupError unless the one can be read from its beginning at any time, and the other written beside its folder."""
    for option_name, file, hint in (
        ("-i", input_file, "fetch it before: curl -o requests.jsonl URL"),
        ("-o", output_file, "send it afterwards: curl -T answers.jsonl URL"),
    ):
        if str(file).lower().startswith(("http:/", "https:/")):
            raise SetupError(f"{option_name} takes a file, and not a URL.", hint=hint)
    if not input_file.is_file():
        raise SetupError(f"{input_file} is no regular file." if input_file.exists() else f"there is no file {input_file}.")
    if not output_file.parent.is_dir():
        raise SetupError(f"cannot write {output_file}: no folder {output_file.parent}.")
    if output_file.exists():
        kind = "a folder" if output_file.is_dir() else "" if output_file.is_file() else "no regular file"
        if kind or output_file.samefile(input_file):
            raise SetupError(f"cannot write {output_file}: it is {kind or 'the input'}.")


def _stamp(file: Path) -> tuple[int, int, int]:
    """Return numbers that differ once a file was changed or replaced."""
    about = file.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


def _identity(input_file: Path, model: str, revision: str, options: dict[str, str]) -> RunIdentity:
    from whimbrel.server.batches.partial import RunIdentity

    try:
        with input_file.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SetupError(f"cannot read {input_file}: {error.strerror or error}.") from None
    return RunIdentity(version=__version__, input_sha256=digest, model=model, revision=revision, options=options)


def _run(
    input_file: Path,
    out: Path,
    identity: RunIdentity,
    asking: Callable[[], Any],
    *,
    before: tuple[int, int, int],
    restart: bool,
) -> int:
    """Run a file, and say what became of it. Returns the exit code. `before` is the stamp of what the identity is of."""
    from whimbrel.server.batches.partial import partial_run

    with _errors_of(out), input_file.open("rb") as stream, show_progress(out, "requests", None, stream) as progress:
        try:
            with partial_run(out, identity, restart=restart) as journal:
                if ran := journal.progress.completed + journal.progress.failed:
                    progress.say(f"{console.count(ran, 'request')} ran before; going on after line {journal.progress.number:,}")
                asyncio.run(_answer_all(input_file, journal, asking, progress, identity.input_sha256))
                counts = journal.progress
                if _stamp(input_file) != before:
                    raise SetupError(f"{input_file} has changed since the run began.", hint="--restart drops the answers")
        except BaseException as error:
            if not isinstance(error, SetupError):
                progress.say("stopped: the same command goes on.")
            raise
        done = counts.completed + counts.failed
        progress.say(f"{console.count(done, 'request')}, of which {counts.failed:,} were refused: {out}")
    return _SOME_REFUSED if counts.failed else 0


async def _answer_all(input_file: Path, journal: Any, asking: Callable[[], Any], progress: TextProgress, seed: str) -> None:
    from whimbrel.server.batches.journal import Progress
    from whimbrel.server.batches.reading import LineReader
    from whimbrel.server.batches.run import Window, run_lines

    start = journal.progress

    def tell(counts: Progress) -> None:
        progress.advance(counts.completed + counts.failed - progress.done, num_tokens=0, num_truncated=0)

    tell(start)
    reader = LineReader(input_file, max_bytes=_MAX_LINE, number=start.number, offset=start.offset)
    with reader:
        async with asking() as ask:
            answer = partial(_answer, ask, _once(progress.say), seed[:16])
            await run_lines(reader, journal, answer, window=Window(), tell=tell)


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that says a text unless it said the same before."""
    said: set[str] = set()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    return tell


async def _answer(ask: Ask, tell: Callable[[str], None], seed: str, line: Line) -> Written:
    from whimbrel.server.batches import lines
    from whimbrel.server.batches.partial import ANSWERS
    from whimbrel.server.batches.run import Written

    line_id = lines.id_of(seed, line.number)
    try:
        if line.is_too_long:
            raise lines.LineError("request_too_large", f"the line has {line.size:,} bytes; the limit is {_MAX_LINE:,}.")
        request = lines.parse_line(line.raw)
    except lines.LineError as error:
        custom_id, answer = error.custom_id, lines.refusal(error, line.number)
    else:
        custom_id, answer = request.custom_id, lines.readable(await _patiently(ask, tell, request, line_id))
    return Written(ANSWERS, lines.render_for_vllm(line_id, custom_id, answer), answer.is_good)


async def _patiently(ask: Ask, tell: Callable[[str], None], request: Any, line_id: str) -> LineAnswer:
    """Return the answer to a request. One that may succeed later is sent again."""
    start = perf_counter()
    while True:
        answer = await ask(request.url, bytes(request.body), line_id)
        if answer.retry_after is None:
            return answer
        if perf_counter() - start > _WAIT_SECONDS:
            raise SetupError(f"no answer for {_WAIT_SECONDS:,.0f} s: {_reason(answer)}", hint="the same command goes on")
        tell(f"waiting up to {_WAIT_SECONDS:,.0f} s: {_reason(answer)}")
        await asyncio.sleep(min(answer.retry_after, _LONGEST_PAUSE))


def _reason(answer: LineAnswer) -> str:
    return f"status {answer.status}" if answer.body.startswith(b"{") else answer.body[:200].decode("utf-8", "replace")


@asynccontextmanager
async def _asking_here(engine: Any) -> AsyncGenerator[Ask]:
    from whimbrel.server.app.app import create_app
    from whimbrel.server.app.routing import ModelRegistry

    app = create_app(ModelRegistry(engine))

    async def ask(path: str, body: bytes, request_id: str) -> LineAnswer:
        return await app.ask(path, body, request_id=request_id)

    yield ask


def _settings_of(url: str) -> Settings:
    """Return the options of a client of this server. Raises SetupError."""
    from whimbrel.client.base import Settings, parse_urls

    try:
        return Settings(parse_urls(url), os.environ.get(KEY_VARIABLE) or None, _WAIT_SECONDS, 0, 64, 1, progress=False)
    except InvalidRequest as error:
        raise SetupError(f"--url {error.message}") from None


@asynccontextmanager
async def _asking_at(settings: Settings) -> AsyncGenerator[Ask]:
    import httpx2

    from whimbrel.client.base import join_url
    from whimbrel.server.app.guards import no_route
    from whimbrel.server.app.routing import ROUTES_BY_PATH, render_error
    from whimbrel.server.batches.lines import LineAnswer

    base = settings.urls[0]
    async with settings.make_http(httpx2.AsyncClient) as http:

        async def ask(path: str, body: bytes, request_id: str) -> LineAnswer:
            headers = {"content-type": "application/json", "x-request-id": request_id}
            if path not in ROUTES_BY_PATH:  # a file asks for nothing else with the key of the one who runs it
                return LineAnswer(*render_error(no_route(path), path))
            try:
                answer = await http.post(join_url(base, path), content=body, headers=headers)
            except httpx2.RequestError as error:
                return LineAnswer(503, f"{base}: {error or type(error).__name__}".encode(), retry_after=1.0)
            waits = _seconds(answer.headers) if answer.status_code in (429, 502, 503) else None
            return LineAnswer(answer.status_code, answer.content, answer.headers.get("content-type", ""), waits)

        yield ask


def _seconds(headers: Mapping[str, str]) -> float:
    try:
        return max(0.1, float(headers.get("retry-after", "1")))
    except ValueError:
        return 1.0


@contextmanager
def _errors_of(out: Path) -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(f"cannot write {out}: {error.strerror or error}.", hint="the same command goes on") from None
