"""Pipeline of a run on a cluster: Ray Data gives shards to actors, and this process writes what they return.

Ray starts actors as the cluster has room, and runs a shard again whose actor or node died. Shards come in any order.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from whimbrel.bulk.arrow import Table
from whimbrel.bulk.compute import TableForm
from whimbrel.bulk.folder import write_record
from whimbrel.bulk.job import Job, Totals, Watch
from whimbrel.bulk.manifest import Record, Shard
from whimbrel.bulk.output_files import write_file
from whimbrel.bulk.rows import RowReader
from whimbrel.errors import SetupError
from whimbrel.ray.cluster import room_for
from whimbrel.ray.modules import ray_module
from whimbrel.ray.probe import ClusterEmbedder, lost
from whimbrel.ray.sources import RemoteError, identity
from whimbrel.ray.worker import ShardTask, ShardWorker

_SHARDS_OF_ACTOR: Final = 2
"""Shards that an actor has at once."""
_RETRIES: Final = 8
"""Times that a shard runs again whose actor died, before the run ends: its texts may be what kills it."""


@dataclass(frozen=True, slots=True)
class ClusterPipeline:
    """The shards of a run on a cluster, with the arguments of `Pipeline`."""

    job: Job
    form: TableForm
    embedder: ClusterEmbedder
    reader: RowReader
    watch: Watch
    totals: Totals

    def run(self, shards: Sequence[Shard]) -> None:
        """Run shards, and return when all are on disk. Raises SetupError."""
        waiting = {shard.number: shard for shard in shards}
        exceptions = ray_module("ray.exceptions")
        try:
            for table in self._answers(shards):
                contents = table.column("contents")
                for index, answer in enumerate(table.drop_columns(["contents"]).to_pylist()):
                    shard = waiting.pop(answer["number"], None)
                    if shard is not None:
                        self._write(shard, answer, contents[index].values)
        except exceptions.RayError as error:
            raise lost(error) from error

    def _answers(self, shards: Sequence[Shard]) -> Iterator[Table]:
        embedder, data = self.embedder, ray_module("ray.data")
        embedder.stop()
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that it raises too
        context = data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        files = [file._replace(url=file.url if "://" in file.url else os.path.abspath(file.url)) for file in self.reader.files]
        reader = RowReader(files, self.reader.names, self.reader.schema, self.reader.states)
        pool, resources = embedder.pool, embedder.resources
        task = ShardTask(embedder.source, resources.cores, self.form, reader, self.job.format, identity(embedder))
        most = min(len(shards), pool.most or len(shards))
        least = min(pool.least, most)
        actors = data.ActorPoolStrategy(
            min_size=least,
            max_size=most,
            initial_size=max(least, min(most, room_for(resources))),
            max_tasks_in_flight_per_actor=_SHARDS_OF_ACTOR,
            max_concurrent_calls_per_actor=_SHARDS_OF_ACTOR,
            enable_true_multi_threading=True,
        )
        tasks = data.from_items([shard._asdict() for shard in shards], override_num_blocks=len(shards))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Ray 2.64 will name the number of retries otherwise
            answers = tasks.map_batches(
                ShardWorker,
                batch_size=1,
                batch_format="pyarrow",
                compute=actors,
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                fn_constructor_args=(task,),
                max_task_retries=_RETRIES,
            )
        return iter(answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))

    def _write(self, shard: Shard, answer: Mapping[str, Any], contents: Any) -> None:
        """Write the files of a shard from Ray's memory, and its record when they are on disk."""
        if answer["error"] is not None:
            raise RemoteError(answer["error"], answer["hint"]).here()
        record = msgspec.json.decode(answer["record"], type=Record)
        for file, data in zip(record.files, contents, strict=True):
            written = write_file(self.job.out, file.path, lambda target, data=data: target.write(data.as_buffer()))
            if written != file:
                raise SetupError(f"{file.path} came with other bytes than were sent.", hint="the same command goes on")
        write_record(self.job.out, shard, record)
        self.totals.add(record)
        self.watch.advance(record.stop - record.start, answer["tokens"])
