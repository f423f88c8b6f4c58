"""Memory that the largest batch takes while it runs, from the shapes of a model. Pure.

An upper bound, which tests hold against the measured peak: what the layers, attention and the outputs have at the same time, a
quarter more for the allocator, and a constant for buffers of libraries. Weights, caches, requests and results are not in it.

Shapes: R rows of a batch, P rows that run at once (a piece, or all), D model width.
"""

from dataclasses import dataclass
from typing import Final

from whimbrel.types.card import Card, Disentangled, Encoder, Output, Rotary
from whimbrel.types.heads import Dense, SpanHead, SparseAutoencoder

MAX_BLOCK: Final = 512
"""Rows of the largest block of a product, and those of which the second half of a layer runs at once on a CPU."""
MAX_PRODUCT_LENGTH: Final = 896
"""Tokens of the longest text whose scores are computed all at once, by a product, on a CPU in bfloat16."""
QUERIES_AT_A_TIME: Final = 256
"""Queries of a seq whose scores are computed at once by the plain formula."""
MAX_MASK_ELEMENTS: Final = 2**26
"""Elements of masks that are kept for later layers, 256 MB. Each layer rebuilds larger ones."""
MAX_MASKED_KEYS: Final = 1024
"""Kept keys up to which causal queries after them attend with a mask on a CPU. After more, nothing is masked."""

MAX_SHARED: Final = 8
"""Tokens of a batch per row that may be computed for it: keys are put together and rows pooled for all tokens."""

_FLOAT: Final = 4
_INT64: Final = 8
_LEAST_TEXT: Final = 3
"""Tokens of the shortest usual text, of which a batch may be full."""
_MARGIN: Final = 1.25
_CONSTANT: Final = 48 * 2**20


@dataclass(frozen=True, slots=True)
class BatchDevice:
    dtype_bytes: int
    on_cpu: bool
    kernels: bool
    """Whimbrel's own kernels run, whose attention needs no masks unless scores are capped."""

    @property
    def masks(self) -> bool:
        """True if attention needs masks where a layer has windows, or keys are kept."""
        return not self.kernels if self.on_cpu else self.dtype_bytes == _FLOAT

    def biases(self, encoder: Encoder) -> bool:
        """Return whether biases are in masks. Our own kernels read them by their distance."""
        return encoder.positions in ("alibi", "relative") and not (self.on_cpu and self.kernels)


def batch_bytes(card: Card, device: BatchDevice, *, max_batch_tokens: int, max_length: int, in_pieces: bool) -> int:
    """Return the bytes of the largest batch, of `max_batch_tokens` rows or one text; 0: unknown, as transformers runs it."""
    towers = card.towers or (card,)
    if any(tower.encoder.family == "hf" for tower in towers):
        return 0
    rows = max(max_batch_tokens, max_length)
    piece = max_batch_tokens if in_pieces else rows
    largest = max(
        max(
            _encoder(tower.encoder, rows, piece, device),
            _encoder(tower.encoder, max_batch_tokens, max_batch_tokens, device)
            + _shared(tower.encoder, max_batch_tokens, device),
        )
        + max((_output(output, tower, rows, max_batch_tokens) for output in tower.all_outputs.values()), default=0)
        for tower in towers
    )
    return int(_MARGIN * largest) + _CONSTANT


def _encoder(encoder: Encoder, rows: int, piece: int, device: BatchDevice) -> int:
    width = encoder.hidden_size
    stream = 3 * _FLOAT * rows * width  # the hidden states, those of the next layer, and a norm
    inputs = 4 * _INT64 * rows
    if not encoder.layers:
        return stream + inputs
    rotaries: list[Rotary] = []  # their scalings cannot be hashed
    for layer in encoder.layers:
        if layer.rotary and layer.rotary not in rotaries:
            rotaries.append(layer.rotary)
    angles = sum(3 * _FLOAT * rows * rotary.width // 2 for rotary in rotaries)
    normed = (_FLOAT + device.dtype_bytes) * piece * width
    halves = _attention(encoder, rows, piece, device), _mlp(encoder, piece, device)
    beside = 0 if encoder.neighbours is None else _FLOAT * rows * width * (2 * encoder.neighbours.width + 2)
    return stream + inputs + angles + normed + max(*halves, beside)


def _shared(encoder: Encoder, max_batch_tokens: int, device: BatchDevice) -> int:
    """Return the bytes of shared prefixes: masks behind them, and whole seqs, of which a layer's keys or the hidden states."""
    if not encoder.keeps_keys:
        return 0
    keys = 2 * _FLOAT * encoder.num_kv_heads * _head_width(encoder)
    masks = _masks(encoder, 2 * max_batch_tokens, max_batch_tokens, max_batch_tokens, device)
    return MAX_SHARED * max_batch_tokens * max(keys, 2 * _FLOAT * encoder.hidden_size) + masks


def _attention(encoder: Encoder, rows: int, piece: int, device: BatchDevice) -> int:
    queries, keys = (heads * _head_width(encoder) for heads in (encoder.num_heads, encoder.num_kv_heads))
    projected = device.dtype_bytes * piece * (queries + 2 * keys) + _FLOAT * piece * (queries + keys)
    rotated = 3 * _FLOAT * piece * (queries + keys)
    ordered = _FLOAT * piece * (queries + 3 * keys)  # with heads before tokens
    attended = (2 * _FLOAT + device.dtype_bytes) * piece * queries
    kept = 2 * _FLOAT * rows * keys if piece < rows else 0
    return projected + kept + max(rotated, ordered + attended + _scores(encoder, rows, piece, device))


def _scores(encoder: Encoder, rows: int, piece: int, device: BatchDevice) -> int:
    """Return the bytes of masks, and of scores where the plain formula runs."""
    heads = encoder.num_heads
    if encoder.disentangled is not None:
        return _disentangled(encoder, encoder.disentangled, rows, device)
    biased = device.biases(encoder)
    queries = min(piece, QUERIES_AT_A_TIME) if biased or encoder.softcap is not None else piece
    formula = 3 * _FLOAT * heads * queries * rows + 4 * _FLOAT * rows * heads * _head_width(encoder)
    if encoder.softcap is not None:
        return formula
    if not biased and not any(layer.window for layer in encoder.layers) and piece == rows:
        return 0 if encoder.causal else 3 * _FLOAT * heads * min(rows, MAX_PRODUCT_LENGTH) ** 2
    masks = _masks(encoder, rows, piece, queries, device)
    return masks + formula if biased else masks


def _disentangled(encoder: Encoder, spec: Disentangled, rows: int, device: BatchDevice) -> int:
    """Return the bytes of scores of contents and positions: our own kernels' tables and scores of a head, or the formula's."""
    length, heads = min(rows, encoder.max_positions), encoder.num_heads
    if device.kernels and device.on_cpu:
        return _FLOAT * (4 * (length + QUERIES_AT_A_TIME) * _head_width(encoder) + QUERIES_AT_A_TIME * length)
    one = heads * length * (2 * spec.span + QUERIES_AT_A_TIME)
    largest = one if device.on_cpu else max(one, min(MAX_MASK_ELEMENTS, rows // length * one))
    return 3 * _FLOAT * largest + 3 * _INT64 * QUERIES_AT_A_TIME * length


def _masks(encoder: Encoder, rows: int, piece: int, queries: int, device: BatchDevice) -> int:
    """Return the bytes of the masks of pieces: of those that are kept for later layers, and of the largest while it is made."""
    biased = device.biases(encoder)
    if not biased and (encoder.softcap is not None or not device.masks):
        return 0
    windows = [layer.window for layer in encoder.layers]
    limits = {rows if biased or (window is None and not device.on_cpu) else window or MAX_MASKED_KEYS for window in windows}
    kept = [min(rows - piece, limit) for limit in limits]
    heads = encoder.num_heads if biased else 1
    cached = sum(heads * min(rows, each + 3 * piece) * (piece + 5 * each // 8) for each in kept)
    largest = heads * queries * (piece + max(kept))
    return _FLOAT * min(MAX_MASK_ELEMENTS, cached) + (2 * _FLOAT + 1) * largest


def _mlp(encoder: Encoder, piece: int, device: BatchDevice) -> int:
    block = min(piece, MAX_BLOCK) if device.on_cpu else piece
    chosen = max(1, encoder.experts_per_token)
    inner = chosen * encoder.intermediate_size * (3 if encoder.gated else 2)
    width, dtype_bytes = encoder.hidden_size, device.dtype_bytes
    return block * ((2 * _FLOAT + dtype_bytes) * width + (dtype_bytes + _FLOAT) * inner) + _FLOAT * piece * width


def _head_width(encoder: Encoder) -> int:
    return encoder.head_width if encoder.latent is None else encoder.latent.width


def _output(output: Output, card: Card, rows: int, max_batch_tokens: int) -> int:
    texts = max(1, max_batch_tokens // _LEAST_TEXT)
    layers = [head.out_features for head in output.heads if isinstance(head, Dense | SparseAutoencoder)]
    widest = max(card.encoder.hidden_size, *layers, 0)
    through = 3 * _FLOAT * rows * widest if output.token_head else 0
    if output.vocabulary is not None:
        decoded = (min(rows, MAX_BLOCK) + 2 * texts) * output.vocabulary.out_features
        return through + _FLOAT * (decoded + 2 * rows * widest)
    num_rows, prompt = texts if output.rows in ("text", "none") else rows, card.span_prompt
    spans = 0 if output.spans is None or prompt is None else span_bytes(output.spans, prompt.max_words, rows)
    return through + spans + 3 * _FLOAT * num_rows * max(output.width, widest)


def span_bytes(head: SpanHead, max_words: int, rows: int) -> int:
    """Return the bytes of the layers over the spans of one text, and of its scores. A label has two tokens or more.

    A span has both its ends, the same padded, the four times wider layer between, that with its gaps, and then one row.
    """
    words, scored = min(rows, max_words), min(rows // 2, max_words)
    layers = 13 * head.width * head.max_words * words
    scores = 3 * head.max_words * scored * ((rows - scored) // 2)
    return _FLOAT * (layers + scores + 8 * head.width * rows)
