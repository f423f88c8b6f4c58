"""`whimbrel.ray.Embed` over pyarrow's tables: the columns of a bulk run, in the order of the batch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bulk_runs import WIDTH, vector_of
from ray_nodes import HashSource
from whimbrel.errors import InvalidRequest, SetupError
from whimbrel.ray import Embed

TEXTS = ["a", "b", "a", "b @@cut", "c"]


@pytest.fixture
def source(tmp_path: Path) -> HashSource:
    return HashSource(str(tmp_path))


def test_a_batch_gets_a_column_for_each_output(source: HashSource) -> None:
    """Vectors are lists of a fixed size; the batch's own columns stay as they are."""
    batch = pa.table({"id": range(5), "text": TEXTS})
    done = Embed(source=source)(batch)
    assert done.column_names == ["id", "text", "cut", "dense"]
    assert done.select(["id", "text"]) == batch
    assert done.schema.field("dense").type == pa.list_(pa.float32(), WIDTH)
    assert done.column("cut").to_pylist() == [False, False, False, True, False]
    vectors = done.column("dense").combine_chunks().flatten().to_numpy().reshape(-1, WIDTH)
    assert np.array_equal(vectors, np.stack([vector_of(text) for text in TEXTS]))


def test_columns_are_joined_and_numbers_made_small(source: HashSource) -> None:
    batch = pa.table({"title": ["a", None, "b"], "body": ["c", "d", ""]}).slice(0, 3)
    embed = Embed(source=source, text=("title", "body"), separator=": ", dtype_out="float16", errors="null")
    done = embed(batch)
    assert done.schema.field("dense").type == pa.list_(pa.float16(), WIDTH)
    assert done.column("error").to_pylist() == [None, "title is null", None]
    assert np.array_equal(done.column("dense")[0].values.to_numpy(), vector_of("a: c").astype(np.float16))


def test_rows_that_cannot_run_are_said_or_left_empty(source: HashSource) -> None:
    """A null, an empty text and one that the model refuses raise an error; or their outputs are null, with the reason."""
    batch = pa.table({"text": ["a", None, " ", "@@bad", "b"]})
    with pytest.raises(
        InvalidRequest, match=r'3 of 5 rows cannot be run, the first of them row 1 of the batch: text is null\. errors="null"'
    ):
        Embed(source=source)(batch)
    done = Embed(source=source, errors="null")(batch)
    assert done.column("error").to_pylist() == [None, "text is null", "text: the text is empty", "this text is bad.", None]
    assert done.column("dense").is_null().to_pylist() == [False, True, True, True, False]
    assert done.column("cut").to_pylist() == [False, None, None, None, False]
    assert np.array_equal(done.column("dense")[4].values.to_numpy(), vector_of("b"))


@pytest.mark.parametrize("text", [pa.array([], pa.string()), pa.array([None, None]), pa.chunked_array([["a"], ["b"]])])
def test_batches_of_any_size_have_one_schema(source: HashSource, text: Any) -> None:
    done = Embed(source=source, errors="null")(pa.table({"text": text}))
    assert done.num_rows == len(text)
    assert done.schema.types[1:] == [pa.bool_(), pa.list_(pa.float32(), WIDTH), pa.string()]


def test_the_model_is_loaded_once_by_a_process_and_pickled_unloaded(source: HashSource, tmp_path: Path) -> None:
    embed = Embed(source=source)
    copy = pickle.loads(pickle.dumps(embed))
    assert not list(tmp_path.iterdir())
    batch = pa.table({"text": TEXTS})
    assert copy(batch) == embed(batch) == next(embed.frames([batch]))
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_right_is_said(source: HashSource) -> None:
    for batch, words in (
        (pa.table({"body": ["a"]}), "the batch has no column text; it has body."),
        (pa.table({"text": [1]}), "the column text has no texts, but int64."),
        (pa.table({"text": ["a"], "cut": [1]}), "the batch has a column cut already; rename it first."),
    ):
        with pytest.raises(InvalidRequest, match=words):
            Embed(source=source)(batch)
    with pytest.raises(SetupError, match=r"a batch is a pyarrow\.Table or a pandas\.DataFrame, not dict"):
        Embed(source=source)({"text": ["a"]})
    for options in ({"dtype_out": "int4"}, {"errors": "ignore"}):
        with pytest.raises(SetupError, match="takes"):
            Embed(**options)  # pyright: ignore
