"""Static embedding models, which have a table with one vector per token.

Sentence Transformers' StaticEmbedding and model2vec have a tokenizer.json, used as it is, and the tensors. The table's shape is
in the header of model.safetensors. model2vec drops unknown tokens. It truncates texts first to `max_length` times the median
token length in characters, then to `max_length` tokens.

SparseStaticEmbedding has a weight for each token, usually its inverse document frequency, in a tensor or a JSON file. Its
tokenizer is that of AutoTokenizer, without special tokens around a text.

Sources: sentence_transformers/sentence_transformer/modules/static_embedding.py and sparse_encoder/modules/
sparse_static_embedding.py (6.2); model2vec/model.py and model2vec/persistence/persistence.py (0.10).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from msgspec import DecodeError

from whimbrel.checkpoint.config.common import NO_LAYERS
from whimbrel.checkpoint.json_file import JsonFile, find_file
from whimbrel.checkpoint.sentence_transformers import chained, modules
from whimbrel.checkpoint.summary import read_shapes
from whimbrel.checkpoint.tokenizer.config import read_tokenizer
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, Encoder, Output, StaticTokenizer, TokenizerCard
from whimbrel.types.choices import TokenizerReading
from whimbrel.types.request import OutputName

_WEIGHTS: Final = "model.safetensors"
_TABLES: Final = ("embedding.weight", "embeddings")
UNLIMITED: Final = 2**22
"""Tokens per text without a limit: more than any accepted text has."""
_MODEL2VEC_LENGTH: Final = 512
_SIDES: Final[Mapping[str, Literal["right", "left"]]] = {"Right": "right", "Left": "left"}
# Keys of model2vec's config.json about the table's origin, or that repeat the tensors' shapes.
_INERT: Final = """
    apply_pca apply_zipf architectures embedding_dtype head_config hidden_dim language pooling seq_length sif_coefficient
    tokenizer_name transformers_version vocabulary_quantization
""".split()


def is_model2vec(root: Path) -> bool:
    return JsonFile.read_optional(root, "config.json").data.get("model_type") == "model2vec"


def read_static_card(folder: Path, name: str, rows: modules.Rows, reading: TokenizerReading | None) -> Card:
    """Read the card of a table of vectors and the modules after it. Raises CheckpointError."""
    kind, path = rows[0]
    path = Path(path).as_posix() if Path(path).parts else ""
    sentence = modules.read_sentence(folder, modules.model_kind(rows))
    max_entries = sentence.positive("max_active_dims", 0)
    if kind == "SparseStaticEmbedding":
        encoder, tokenizer, max_length, entries = _read_sparse_table(folder, path, reading)
        outputs: dict[OutputName, Output] = {"sparse": replace(entries, max_entries=max_entries)}
    else:
        encoder, tokenizer, max_length, normalized = _read_table(folder / path)
        mean = Output(encoder.hidden_size, modes=("mean",), activation="normalize", activated=False)
        outputs = chained.finish_output(folder, {"sentence_embedding": mean}, rows[1:], max_entries)
        if (dense := outputs.get("dense")) is not None:
            dense = dense if normalized is None else replace(dense, activated=normalized)
            outputs["dense"] = chained.cut_output(dense, sentence)
    card = Card(name, path, encoder, outputs, max_length, tokenizer, *modules.read_prompts(sentence))
    is_cut = sentence.data.get("truncate_dim") is not None
    return replace(card, matryoshka=is_cut, similarity=sentence.data.get("similarity_fn_name"))


def _read_table(root: Path) -> tuple[Encoder, TokenizerCard, int, bool | None]:
    """Return (encoder, tokenizer, limit in tokens, whether vectors are normalised, or None if not stated)."""
    shapes = _shapes(root)
    name = next((name for name in _TABLES if name in shapes), _TABLES[0])
    if len(shape := shapes.get(name, [])) != 2 or min(shape) < 1:
        raise CheckpointError(f"must be a table of vectors, is {shape or 'not there'}.", file=_WEIGHTS, key=name)
    mapping = shapes.get("mapping", shape)
    encoder = _table_encoder(mapping[0] if mapping else 0, shape[1])
    tokenizer = JsonFile.read(root, "tokenizer.json")
    if is_model2vec(root):
        config = JsonFile.read(root, "config.json")
        length = config.data.get("max_length", _MODEL2VEC_LENGTH)
        limit = UNLIMITED if length is None else config.positive("max_length", _MODEL2VEC_LENGTH)
        normalized = config.get("normalize", bool, False)
        config.reject_unread_keys(_INERT, {"max_length", "model_type"})
        bare = StaticTokenizer(encoder.vocab_size, drop_unknown=True, cut_characters=length is not None)
        return encoder, _bare_tokenizer(bare), limit, normalized
    limit, side, truncation = UNLIMITED, "right", tokenizer.section("truncation")
    if truncation.data:  # Sentence Transformers keeps it
        truncation.reject_unknown_keys({"direction", "max_length", "strategy", "stride"})
        limit, side = truncation.positive("max_length"), truncation.choice("direction", _SIDES, "Right")
    return encoder, _bare_tokenizer(StaticTokenizer(encoder.vocab_size), side), limit, None


def _read_sparse_table(folder: Path, path: str, reading: TokenizerReading | None) -> tuple[Encoder, TokenizerCard, int, Output]:
    """Return (encoder, tokenizer, limit in tokens, sparse output) of a SparseStaticEmbedding."""
    root = folder / path
    config = JsonFile.read_optional(root, "config.json")
    config.reject_unknown_keys({"frozen", "path"})
    stated = JsonFile.read_optional(root, "tokenizer_config.json")
    none = JsonFile("config.json", {"model_type": "none"})
    tokenizer = read_tokenizer(folder, path, none, stated, reading=reading, lowercase=False)
    idf = None
    if config.data.get("path") is not None:
        file = config.get("path", str)
        if Path(file).name != file or not file.endswith(".json"):
            raise config.error(f"{file!r:.80} is no JSON file of this folder.", "path")
        places = (f"{path}/{file}".lstrip("/"), file)  # in the module's folder or the checkpoint's
        idf = next((place for place in places if (folder / place).exists()), None)
        if idf is None:
            raise config.error("this file is not in the checkpoint.", "path")
        ids, _ = read_vocabulary(root, tokenizer, vocab_size=2**31)
        shape = [1 + max(ids.values(), default=0)]
    elif len(shape := _shapes(root).get("weight", [])) != 1:
        raise CheckpointError(f"must be a row of weights, is {shape or 'not there'}.", file=_WEIGHTS, key="weight")
    encoder = replace(_table_encoder(shape[0], 1), idf=idf)
    limit = modules.read_max_length(encoder, JsonFile("", {}), stated)
    bare = StaticTokenizer(encoder.vocab_size, as_stored=False)
    return encoder, replace(tokenizer, static=bare), limit, Output(1, rows="entry", skip_ids=(bare.empty_id,))


def _table_encoder(vocab_size: int, width: int) -> Encoder:
    return Encoder(family="static", vocab_size=vocab_size, hidden_size=width, max_positions=UNLIMITED, **NO_LAYERS)


def _bare_tokenizer(bare: StaticTokenizer, side: Literal["right", "left"] = "right") -> TokenizerCard:
    """Return the card of tokenizer.json without any other file, which all versions run as it is."""
    return TokenizerCard("tokenizer.json", truncate=side, static=bare, reading="file")


def _shapes(root: Path) -> dict[str, list[int]]:
    try:
        return dict(read_shapes(find_file(root, _WEIGHTS)))
    except FileNotFoundError:
        raise CheckpointError(f"not found in {root}.", file=_WEIGHTS) from None
    except (OSError, ValueError, RecursionError, DecodeError) as error:
        raise CheckpointError(f"cannot be read ({error}); is the download complete?", file=_WEIGHTS) from None
