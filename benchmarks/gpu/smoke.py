"""Smoke: an engine of each kind of model, and its cosines to transformers or Sentence Transformers in float32 on the device.

The checkpoints are the small random ones of the tests, whose weights are large, so bfloat16 shows more than in real models.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from setting import Row, Setting
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from checkpoints.families import CASES, write_model
from checkpoints.files import edit_json
from checkpoints.late_interaction import write_pylate
from checkpoints.late_references import DOCUMENTS, QUERIES
from checkpoints.rerankers import PAIRS, qwen, qwen3_recipe, reference_score, write_reranker
from checkpoints.sparse import as_matrix, splade_layout, write_splade
from hidden_states import random_ids
from whimbrel import Engine
from whimbrel.types.request import Request
from whimbrel_bench.offline import cosines

_LEAST: Final = 0.99
_LIMIT: Final = 100

Pair = tuple[list[Any], list[Any]]
"""Arrays of ours and of the reference."""


def dense(case: str, folder: Path, setting: Setting) -> Pair:
    """Compare the mean of hidden states."""
    model = write_model(folder, *CASES[case]).to(setting.device)
    ids = random_ids()
    with _engine(folder, setting, pooling="mean") as engine:
        found = engine.run(Request([row.astype(np.int64) for row in ids])).outputs.dense
    return list(found), [_states(model, row, setting).last_hidden_state[0].mean(0).cpu().numpy() for row in ids]


def sparse(_: str, folder: Path, setting: Setting) -> Pair:
    """Compare SPLADE's weights of the vocabulary."""
    write_splade(folder)
    splade_layout(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval().to(setting.device)
    for file, key in (("tokenizer_config.json", "model_max_length"), ("sentence_bert_config.json", "max_seq_length")):
        edit_json(folder / file, **{key: _LIMIT})
    ids = random_ids()
    with _engine(folder, setting) as engine:
        found = engine.run(Request([row.astype(np.int64) for row in ids])).outputs.sparse
    logits = [_states(model, row, setting).logits[0] for row in ids]
    expected = [torch.log1p(each.relu()).amax(0).cpu().numpy() for each in logits]
    return list(as_matrix(found, expected[0].size)), expected


def late(_: str, folder: Path, setting: Setting) -> Pair:
    """Compare token vectors of queries that are filled up, and of documents."""
    from sentence_transformers import MultiVectorEncoder

    write_pylate(folder, window=14, do_query_expansion=True)
    model = MultiVectorEncoder(str(folder), device=setting.device)
    with _engine(folder, setting) as engine:
        sides = engine.multi_vector(QUERIES, input_type="query"), engine.multi_vector(DOCUMENTS, input_type="document")
    expected = [*model.encode_query(QUERIES, convert_to_numpy=True), *model.encode_document(DOCUMENTS, convert_to_numpy=True)]
    return [np.asarray(row) for side in sides for row in side], expected


def rerank(_: str, folder: Path, setting: Setting) -> Pair:
    """Compare the logits of a language model that judges documents behind a prefix, twice: computed, then from the cache."""
    model = write_reranker(folder, "Qwen3", qwen(), tie_word_embeddings=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    pairs = PAIRS[:6]
    with _engine(folder, setting, reranker="qwen3") as engine:
        rounds = [engine.run(Request(pairs, activate=False)).outputs.scores.ravel() for _ in range(2)]
    expected = [
        reference_score(model, tokenizer, qwen3_recipe(tokenizer, *pair, None, 1024), ("yes", "no"), 1.0) for pair in pairs
    ]
    return [np.concatenate(rounds)], [np.array(expected * 2)]


CASES_OF_SMOKE: Final[dict[str, tuple[Callable[[str, Path, Setting], Pair], str]]] = {
    "bert": (dense, "bert"),
    "qwen3": (dense, "qwen3"),
    "XLM-R with rotary positions": (dense, "jina v3"),
    "mpnet": (dense, "mpnet"),
    "SPLADE": (sparse, ""),
    "ColBERT, queries filled up": (late, ""),
    "reranker behind a prefix": (rerank, ""),
}


def run(_: str, setting: Setting) -> Iterator[Row]:
    for name, (compare, case) in CASES_OF_SMOKE.items():
        row: Row = {"model": name, "dtype": setting.dtype, "smallest cosine": 0.0}
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(7)
            try:
                ours, theirs = compare(case, Path(folder), setting)
                row["smallest cosine"] = float(cosines(ours, theirs).min())
            except Exception as error:  # the next may work
                yield row | {"wrong": f"{type(error).__name__}: {error}"}
                continue
        yield row | ({} if row["smallest cosine"] > _LEAST else {"wrong": f"at least {_LEAST}"})


def _engine(folder: Path, setting: Setting, **options: Any) -> Engine:
    return Engine(folder, device=setting.device, dtype=setting.dtype, **options)


def _states(model: Any, ids: Any, setting: Setting) -> Any:
    x = torch.from_numpy(ids)[None].long().to(setting.device)
    with torch.inference_mode():
        return model(input_ids=x, attention_mask=torch.ones_like(x))
