"""`whimbrel.ray.Embed` in Ray Data's map_batches and in Spark: the vectors of the engine, in types that others read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulk_runs import vector_of
from ray_nodes import HashSource, nodes
from whimbrel import Engine
from whimbrel.errors import InvalidRequest
from whimbrel.ray import Embed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]

TEXTS = [f"text {number} " + "of some words " * (number % 7) for number in range(60)]


@pytest.fixture(scope="module")
def expected() -> Any:
    with Engine(dtype="float32") as engine:
        return engine.embed(TEXTS)


def available(request: pytest.FixtureRequest, package: str) -> None:
    if not request.config.getoption("--recipes"):
        pytest.importorskip(package, reason=f"{package} is not installed; `make ray` installs it")


def test_ray_data(request: pytest.FixtureRequest, expected: Any, tmp_path: Path) -> None:
    """Parquet files by two actors have lists of a fixed size, and not Ray's own tensors."""
    available(request, "ray")
    pq.write_table(pa.table({"id": range(60), "body": TEXTS}), tmp_path / "in.parquet", row_group_size=20)
    with nodes(3):  # one more than actors: tasks that read need a processor, and would wait for ever
        import ray

        arguments = {"text": "body", "engine": {"dtype": "float32"}, "cores": 1}
        dataset = ray.data.read_parquet(str(tmp_path / "in.parquet"), ray_remote_args={"num_cpus": 0}, override_num_blocks=3)
        dataset = dataset.map_batches(
            Embed, fn_constructor_kwargs=arguments, batch_format="pyarrow", batch_size=20, concurrency=2, num_cpus=1
        )
        dataset.write_parquet(str(tmp_path / "out"), ray_remote_args={"num_cpus": 0})
    done = pq.read_table(tmp_path / "out").sort_by("id")
    assert done.schema.field("dense").type.equals(pa.list_(pa.float32(), 384))
    assert np.array_equal(done.column("dense").combine_chunks().flatten().to_numpy().reshape(60, -1), expected)


def test_pandas(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Columns and index of a DataFrame stay, and a value that is no text is said."""
    available(request, "pandas")
    import pandas as pd

    embed = Embed(source=HashSource(str(tmp_path)), errors="null")
    frame = pd.DataFrame({"text": ["a", None, "b"], "n": [1, 2, 3]}, index=[7, 7, 9])
    done = embed(frame)
    assert done[["text", "n"]].equals(frame)
    assert done["error"].dropna().tolist() == ["text is null"]
    assert np.array_equal(done["dense"].iloc[2], vector_of("b"))
    with pytest.raises(InvalidRequest, match=r"the column text has values that are no texts\."):
        embed(pd.DataFrame({"text": ["a", 1]}))


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Spark in this process, with one process of Python."""
    available(request, "pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
    yield session
    session.stop()


def test_spark(spark: Any, expected: Any) -> None:
    """Rows by mapInPandas, and a column by a pandas UDF."""
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    embed = Embed(text="body", engine={"dtype": "float32"}, cores=1)
    frame = spark.createDataFrame(pd.DataFrame({"id": range(60), "body": TEXTS}))
    rows = frame.mapInPandas(embed.frames, "id long, body string, cut boolean, dense array<float>").collect()
    by_id = {row["id"]: row for row in rows}
    assert np.array_equal(np.array([by_id[number]["dense"] for number in range(60)], np.float32), expected)
    assert [by_id[number]["body"] for number in range(60)] == TEXTS

    def dense(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        for texts in batches:
            yield embed(texts.to_frame("body"))["dense"]

    dense.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    found = frame.select("id", pandas_udf(dense, "array<float>")("body").alias("dense")).collect()
    ordered = sorted(found, key=lambda row: row["id"])
    assert np.array_equal(np.array([row["dense"] for row in ordered], np.float32), expected)
