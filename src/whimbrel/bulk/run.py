"""Bulk run: files to files, or on with a run that ended early: its checks, its manifest, and its pending shards."""

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from whimbrel.bulk.columns import bytes_per_row, widths_of
from whimbrel.bulk.compute import TableForm, form_of
from whimbrel.bulk.embedder import Embedder
from whimbrel.bulk.files import InputFile, find_files, state_of
from whimbrel.bulk.folder import DOUBLED, check_ours, clear, finished, locked, write_manifest
from whimbrel.bulk.job import Job, Totals, Watch
from whimbrel.bulk.manifest import VERSIONS, Manifest, Shard, check_inputs, check_same, read_manifest, with_digest
from whimbrel.bulk.output_files import OutputFormat, holds
from whimbrel.bulk.pipeline import Pipeline, ShardRunner
from whimbrel.bulk.rows import RowReader
from whimbrel.bulk.survey import Doubled, ShardLimits, hash_files, survey
from whimbrel.errors import SetupError

_SHARD_ROWS: Final = 50_000
_INPUT_BYTES: Final = 2**26
_OUTPUT_BYTES: Final = 2**27
_FLOAT_BYTES: Final = 4
_BYTES_OF_TOKEN: Final = 4
"""Bytes of text that a token has, about."""


def run(
    job: Job,
    load: Callable[[], AbstractContextManager[Embedder]],
    watch: Watch,
    totals: Totals,
    runner: Callable[..., ShardRunner] = Pipeline,
) -> None:
    """Run a job, or go on with it. `totals` counts meanwhile. Raises WhimbrelError; what was written before stays.

    `runner` is made with the arguments of `Pipeline`.
    """
    files = find_files(job.inputs, without=job.out)
    with locked(job.out):
        check_ours(job.out)
        old = None if job.restart else read_manifest(job.out)
        states = [state_of(file) for file in files]
        if old is not None:
            watch.tell(f"comparing {_count(files)} with {job.out}")
            _check_same(job, old, files)
        with load() as embedder:
            if job.chunking is not None:
                embedder.check_chunks(job.chunking.tokens)
            manifest, doubled = _new_manifest(job, embedder, files, watch=watch, old=old)
            if old is None:
                clear(job.out)
                write_manifest(job.out, manifest, doubled)
            reader = RowReader(files, job.names, form_of(manifest).copied, states)
            pending, form = _pending(job, manifest, watch=watch, totals=totals)
            if pending:
                runner(job, form, embedder=embedder, reader=reader, watch=watch, totals=totals).run(pending)


def _count(files: list[InputFile]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"


def _about(job: Job) -> dict[str, Any]:
    """Return everything that a user says of a run, by the names in which a difference is told."""
    return {
        **VERSIONS,
        **job.options,
        "text": list(job.names.text),
        "query": job.names.query,
        "separator": job.names.separator,
        "id": job.names.id,
        "keep": None if job.names.keep is None else list(job.names.keep),
        "out_format": job.format,
        "dtype_out": job.dtype,
        "chunk": None if job.chunking is None else list(job.chunking),
        "shard_rows": job.shard_rows,
    }


def _check_same(job: Job, old: Manifest, files: list[InputFile]) -> None:
    """Raise SetupError if the job or its input differs from that of the manifest. The model is compared later."""
    about = _about(job)
    check_same(job.out, {name: value for name, value in old.options.items() if not name.startswith("model_")}, about)
    now = [(file.path, file.size, sha256) for file, sha256 in zip(files, hash_files(files), strict=True)]
    check_inputs(job.out, old.inputs, now)


def _new_manifest(
    job: Job, embedder: Embedder, files: list[InputFile], *, watch: Watch, old: Manifest | None
) -> tuple[Manifest, list[Doubled]]:
    """Return the manifest of a run, the old one if the model is the same, and rows with ids of others. Raises SetupError."""
    widths = widths_of(embedder.run([("a", "a") if job.names.query else "a"]).outputs)
    if not widths:
        raise SetupError("the model gives none of the outputs that a run can write.")
    if job.format == "npy" and (ragged := [name for name in widths if name in ("sparse", "multi_vector")]):
        raise SetupError(f"an .npy file holds no {ragged[0]} vectors.", hint="--format parquet, or arrow")
    model = {f"model_{name}": value for name, value in embedder.settings.items()}
    outputs = widths | ({"labels": list(embedder.labels)} if "scores" in widths and embedder.labels else {})
    if old is not None:
        then = {name: value for name, value in old.options.items() if name.startswith("model_")}
        before = {"model": old.model, "revision": old.revision, "outputs": old.outputs, **then}
        check_same(job.out, before, {"model": embedder.model, "revision": embedder.revision, "outputs": outputs, **model})
        return old, []
    watch.tell(f"reading {_count(files)}, {sum(file.size for file in files) / 1e6:,.1f} MB")
    inputs, schema, doubled = survey(files, job.names, _limits(job, widths))
    _check_columns(TableForm(schema, job.names.id is not None, widths, job.dtype, job.chunking), job.format)
    if doubled:
        first = doubled[0]
        message = f"rows with the id of an earlier row: {len(doubled):,}, the first of them row {first.row:,} of {first.path}"
        watch.tell(f"{message}; all are run, and {job.out}/{DOUBLED} names them")
    manifest = with_digest(
        Manifest(
            model=embedder.model,
            revision=embedder.revision,
            options=_about(job) | model,
            schema=base64.b64encode(schema.serialize().to_pybytes()).decode(),
            outputs=outputs,
            inputs=tuple(inputs),
        )
    )
    return manifest, doubled


def _limits(job: Job, widths: dict[str, int]) -> ShardLimits:
    """Return the bounds of a shard: fewer rows where outputs are wide, fewer bytes where each token or chunk has a vector."""
    rows = job.shard_rows or max(1, min(_SHARD_ROWS, _OUTPUT_BYTES // max(1, bytes_per_row(widths))))
    per_token = _FLOAT_BYTES * widths.get("multi_vector", 1)
    if job.chunking is not None:  # a chunk gives a row for the tokens that it does not share
        tokens, own = job.chunking.tokens, job.chunking.tokens - job.chunking.overlap
        per_token = (per_token * tokens + bytes_per_row(widths)) / own
    return ShardLimits(rows, max(1, min(_INPUT_BYTES, int(_OUTPUT_BYTES * _BYTES_OF_TOKEN / per_token))))


def _check_columns(form: TableForm, kind: OutputFormat) -> None:
    for field in form.copied:
        if not holds(kind, field):
            message = f"the column {field.name!r} is {field.type}, which {kind} files do not hold."
            raise SetupError(message, hint="name the columns to copy with --keep")
    names = form.schema.names
    for name in names:
        if names.count(name) > 1:
            message = f"the output would have two columns {name!r}: one of the input, and one of its own."
            raise SetupError(message, hint="name the columns to copy with --keep, or the ids with --id")


def _pending(job: Job, manifest: Manifest, *, watch: Watch, totals: Totals) -> tuple[list[Shard], TableForm]:
    """Return the shards that are not finished, and the columns of the output. Counts those that are."""
    shards = list(manifest.shards())
    records = finished(job.out, manifest, shards, verify=job.verify, tell=watch.tell)
    totals.shards = len(shards)
    totals.rows = sum(file.rows for file in manifest.inputs)
    totals.rows_before = sum(record.stop - record.start for record in records.values())
    for record in records.values():
        totals.add(record)
    watch.start(totals)
    return [shard for shard in shards if shard.number not in records], form_of(manifest)
