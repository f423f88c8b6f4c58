"""Tokenizer of one checkpoint.

Applies prompts, special tokens and truncation to texts and pairs. Texts that exceed the limit are truncated here, inside the
special tokens. So one backend, which nothing reconfigures, serves all threads. Knows nothing of batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.tokenizer import validation
from whimbrel.tokenizer.backend import BackendTokenizer, load_tokenizer
from whimbrel.tokenizer.pairs import PairTemplate, find_template
from whimbrel.tokenizer.prefixes import FILLERS, PROBES, common_end, max_prefix_tokens, probed_prefix, with_prefix
from whimbrel.tokenizer.text_rules import InstructionFinder, add_markers_and_expansion, find_static_rules
from whimbrel.tokenizer.validation import LengthBounds, TruncationLimit
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card, TextFormat
from whimbrel.types.plan import Plan
from whimbrel.types.seq import Seq, TokenInfo

_FILE: Final = "tokenizer.json"
_PROBES: Final = ("a", "the quick brown fox")
"""Texts around which the post-processor must put the same tokens."""
_NOTHING: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SpecialTokens:
    """The tokens before and after a text, and the token type of the whole."""

    before: Int32Array
    after: Int32Array
    type_id: int = 0

    @property
    def num_tokens(self) -> int:
        return self.before.size + self.after.size

    def surround(self, ids: Int32Array) -> bool:
        first, last = ids[: self.before.size], ids[ids.size - self.after.size :]
        return np.array_equal(first, self.before) and np.array_equal(last, self.after)

    def truncate_indices(self, ids: Int32Array, limit: TruncationLimit) -> slice | Int32Array:
        """Return which tokens of a text the limit keeps. Special tokens are kept, unless `ids` came without them."""
        if ids.size <= limit.max_length:
            return slice(None)
        places = np.arange(ids.size, dtype=np.int32)
        if not self.surround(ids):
            return limit.cut(places, limit.max_length)
        first, end = self.before.size, ids.size - self.after.size
        return np.concatenate((places[:first], limit.cut(places[first:end], limit.max_length - self.num_tokens), places[end:]))


@dataclass(frozen=True, slots=True, eq=False)
class ChatFrame:
    """Frame of the chat template around every text of a request."""

    around: tuple[str, str]
    end: Int32Array
    """Last tokens of the template, which are never cut."""
    prompt: str


@dataclass(frozen=True, slots=True)
class EncodeParams:
    """Parameters of the encoding of texts: everything that a tokenizer needs besides them, resolved against its card."""

    limit: TruncationLimit
    prompt: str = ""
    """Text before each text, or before the first of each pair."""
    prompt_tokens: int = 0
    """Leading tokens that pooling skips."""
    adapter: int = -1
    special: bool = True
    """Put the tokenizer's special tokens around texts."""
    frame: ChatFrame | None = None
    form: TextFormat | None = None
    is_query: bool = False


class Tokenizer:
    """The tokenizer of one checkpoint. Thread-safe."""

    def __init__(self, folder: Path, card: Card, plan: Plan, *, tower: int = 0) -> None:
        """`tower` is the index of the tower that `card` describes."""
        raw = load_tokenizer(folder, card)
        static = card.tokenizer.static
        self.card = card
        max_characters = validation.MAX_CHARACTERS_PER_TOKEN * plan.max_request_tokens
        self.backend = BackendTokenizer(raw, special=static is None, max_characters=max_characters)
        self.special = find_special_tokens(raw, card)
        self._template = card.text_template
        self.frame = lru_cache(maxsize=16)(self._make_frame)
        self.instruction = card.instruction and InstructionFinder(card.instruction, raw, self.special.before)
        self.static = static and find_static_rules(raw, static)
        self._tower = tower
        self._max_length = plan.max_length
        self._includes_prompt = all(output.include_prompt for output in card.outputs.values())
        num_types = card.encoder.type_vocab_size if card.tokenizer.second_type else 0
        self._pairs = find_template(raw, num_types) if "scores" in card.outputs else None
        self._max_prefix_tokens = max_prefix_tokens(card, plan)
        self._prefix = lru_cache(maxsize=16)(self._find_prefix)
        self._check_card()

    def encode(self, texts: Sequence[object], params: EncodeParams) -> list[Seq]:
        """Tokenise texts, or use ids unchanged. Raises InvalidRequest, TooLarge and TooLong."""
        rows, shortened = self.rows(texts, params)
        seqs = [self.seq(ids, index, params, shortened=index in shortened) for index, ids in enumerate(rows)]
        if params.form is None:
            return self._with_prefixes(seqs, params)
        if validation.has_ids(texts):
            return [replace(seq, is_query=params.is_query) for seq in seqs]
        return [add_markers_and_expansion(seq, params.form, is_query=params.is_query) for seq in seqs]

    def encode_pairs(self, pairs: Sequence[object], params: EncodeParams, *, only_first: bool = False) -> list[Seq]:
        """Tokenise pairs, each distinct text once. Of a pair above the limit the longer text is cut, or `only_first`."""
        template, checked = self._pair_template(), validation.check_pairs(pairs)
        if params.prompt:
            prompted = {first: params.prompt + first for first, _ in checked}
            checked = [(prompted[first], second) for first, second in checked]
        rows = self.backend.encode_pieces(checked)
        seqs = [template.seq(texts, index, params.limit, only_first=only_first) for index, texts in enumerate(rows)]
        return seqs if params.adapter < 0 else [replace(seq, adapter=params.adapter) for seq in seqs]

    def tokens(self, ids: Int32Array) -> tuple[str, ...]:
        names = map(self.backend.raw.id_to_token, ids.tolist())
        return tuple(token or f"<{id_}>" for token, id_ in zip(names, ids.tolist(), strict=True))

    def token_infos(self, texts: list[str], prompt: str, *, special: bool) -> list[TokenInfo]:
        """Return the tokens of texts as they are run. `special`: include special tokens. Raises InvalidRequest and TooLarge."""
        if self._template is None:
            return self.backend.tokens(texts, prompt, special=special)
        return self.backend.tokens(self._framed(texts, self.frame(prompt)), special=False)

    # What `EncodeParams` are made of

    def prompt_tokens(self, prompt: str, *, special: bool) -> int:
        """Return the number of tokens that pooling skips: as in Sentence Transformers, the prompt without a closing token."""
        if self._includes_prompt or not prompt:
            return 0
        (ids,) = self.backend.ids([""], prompt, special=special)
        count = min(ids.size, self._max_length) - (min(1, self.special.after.size) if special else 0)
        return 0 if count == 1 and self.card.tokenizer.pools_one_token else count

    def lengths(self, form: TextFormat | None = None) -> LengthBounds:
        """Return the length bounds of a text in a format."""
        least, most = self.special.num_tokens + 1, self._max_length
        if form is None:
            return LengthBounds(least, most, most)
        least = max(least + form.num_inserted, 0 if form.expansion is None else form.expansion.length)
        return LengthBounds(least, min(form.max_length, most), form.max_length if form.has_fixed_length else most)

    def pair_lengths(self) -> LengthBounds:
        """Return the length bounds of a pair. Raises InvalidRequest if the model takes none."""
        least = max(self._pair_template().num_special + 2, self.special.num_tokens + 1)
        return LengthBounds(least, self._max_length, self._max_length)

    @property
    def has_format(self) -> bool:
        """True if tokens of the model's own stand around or within every text."""
        return bool(self.card.text_formats or self._template or self.instruction)

    # The steps of `encode`, which `chunking.py` and `offsets.py` combine in other ways

    def rows(self, texts: Sequence[object], params: EncodeParams) -> tuple[list[Int32Array], frozenset[int]]:
        """Return the ids of each text with prompt and special tokens, and the indices of texts truncated by characters."""
        if validation.has_ids(texts):
            return validation.check_ids(texts, self.card.encoder.vocab_size), frozenset()
        strings = validation.check_texts(texts)
        if params.frame is not None:
            return self.backend.ids(self._framed(strings, params.frame), special=False), frozenset()
        if self.static is None or not self.static.shortens(params.limit):
            return self.backend.ids(strings, params.prompt, special=params.special), frozenset()
        whole = [params.prompt + text for text in strings]
        short = [self.static.shorten(text, params.limit) for text in whole]
        return self.backend.ids(short), frozenset(i for i, text in enumerate(whole) if len(text) > len(short[i]))

    def seq(self, ids: Int32Array, index: int, params: EncodeParams, *, shortened: bool = False) -> Seq:
        """Truncate `ids` to the limit. Special tokens are kept, unless the ids came without them."""
        if ids.size == 0 and self.static is None:
            raise InvalidRequest("the text has no tokens.", item=index)
        limit, frame = params.limit, params.frame
        truncated = limit.exceeded(ids.size, "text", index) or shortened
        ids = ids[self.special.truncate_indices(ids, limit)] if frame is None else _cut_chat(ids, limit, frame)
        prompt_tokens = max(params.prompt_tokens, self.count_instruction(ids))
        if 0 < ids.size <= prompt_tokens:
            raise InvalidRequest("the text has no tokens but its prompt's, which are not pooled.", item=index)
        ids = ids[self.known(ids)]
        if self.static is not None and not ids.size:
            ids = np.array([self.static.empty_id], np.int32)
        return Seq(
            ids, index, prompt_tokens, self.special.type_id, truncated=truncated, adapter=params.adapter, tower=self._tower
        )

    def _with_prefixes(self, seqs: list[Seq], params: EncodeParams) -> list[Seq]:
        """Return the seqs with the lengths of their prefixes: what stands before every text."""
        if not self._max_prefix_tokens or not (params.prompt or params.frame):
            return seqs
        prefix = self._prefix(params.frame.prompt if params.frame else params.prompt, params.special)
        return [with_prefix(seq, prefix, self._max_prefix_tokens) for seq in seqs]

    def _find_prefix(self, prompt: str, special: bool) -> Int32Array:
        if self._template is not None:
            return probed_prefix(self.backend.ids(self._framed(list(PROBES), self.frame(prompt)), special=False))
        return probed_prefix(self.backend.ids(list(PROBES), prompt, special=special))

    def known(self, ids: Int32Array) -> slice | NDArray[np.bool_]:
        return slice(None) if self.static is None or self.static.unknown_id is None else ids != self.static.unknown_id

    def count_instruction(self, ids: Int32Array) -> int:
        """Return the number of leading tokens that belong to an instruction within the text."""
        return 0 if self.instruction is None else self.instruction.count(ids)

    def _pair_template(self) -> PairTemplate:
        if self._pairs is None:
            raise InvalidRequest("this model takes texts, not pairs of texts.", item=0)
        return self._pairs

    def _framed(self, texts: list[str], frame: ChatFrame) -> list[str]:
        assert self._template is not None
        return [self._template.put(text, frame.around) for text in texts]

    def _make_frame(self, prompt: str) -> ChatFrame:
        """Return what the chat template puts around texts with this prompt. Raises InvalidRequest if it takes none."""
        assert self._template is not None
        if prompt and self._template.prompted is None:
            raise InvalidRequest("this model's chat template has no place for a prompt.", param="prompt")
        around = self._template.around(prompt)
        first, second = self.backend.ids([self._template.put(text, around) for text in FILLERS], special=False)
        size = common_end(first, second)
        end = first[first.size - size :] if size < min(first.size, second.size) else _NOTHING
        return ChatFrame(around, end, prompt)

    def _check_card(self) -> None:
        """Raise CheckpointError if texts cannot have the default length or their marker, or if labels have another token."""
        forms, prompt = self.card.text_formats.values(), self.card.span_prompt
        for bounds in map(self.lengths, (None, *forms)):
            if bounds.default < bounds.minimum:
                reason = f"every text has {bounds.minimum} tokens or more"
                raise CheckpointError(f"max length {bounds.default} leaves no room: {reason}.", file=_FILE)
        if self.special.before.size != 1 and any(form.marker_id is not None for form in forms):
            raise CheckpointError("does not put one token before a text, after which its marker could come.", file=_FILE)
        if prompt is not None and (found := self.backend.raw.token_to_id(prompt.label_token)) != prompt.label_id:
            message = f"{prompt.label_token!r} has the id {found}, and class_token_index is {prompt.label_id}."
            hint = "save the model and its tokenizer together, with the package gliner"
            raise CheckpointError(message, file=_FILE, hint=hint)


def _cut_chat(ids: Int32Array, limit: TruncationLimit, frame: ChatFrame) -> Int32Array:
    """Cut a text in a chat template to the limit, then write the template's end over the last tokens."""
    if ids.size < limit.max_length:
        return ids
    end = frame.end[max(0, frame.end.size - limit.max_length) :]
    kept = limit.cut(ids, limit.max_length)
    return np.concatenate((kept[: kept.size - end.size], end))


def find_special_tokens(tokenizer: tokenizers.Tokenizer, card: Card) -> SpecialTokens:
    """Return the special tokens. Raises CheckpointError if they depend on the text or have an unknown token type."""
    if card.tokenizer.static is not None or card.text_template is not None:
        return SpecialTokens(_NOTHING, _NOTHING)
    results = {_split_text(tokenizer, probe) for probe in _PROBES}
    if len(results) != 1:
        raise CheckpointError("does not put the same tokens around every text.", file=_FILE, key="post_processor")
    before, after, type_ids = results.pop()
    num_types = card.encoder.type_vocab_size
    type_id = max(type_ids) if num_types > 1 else 0
    if num_types > 1 and (len(type_ids) != 1 or type_id >= num_types):
        raise CheckpointError(f"gives one text the token types {sorted(type_ids)}.", file=_FILE, key="post_processor")
    return SpecialTokens(np.array(before, np.int32), np.array(after, np.int32), type_id)


def _split_text(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    own = tokenizer.encode(text, add_special_tokens=False).ids
    encoding = tokenizer.encode(text)
    ids = encoding.ids
    start = next((i for i in range(len(ids) - len(own) + 1) if ids[i : i + len(own)] == own), None)
    if not own or start is None:
        raise CheckpointError("does not simply put special tokens around a text.", file=_FILE, key="post_processor")
    return tuple(ids[:start]), tuple(ids[start + len(own) :]), frozenset(encoding.type_ids)
