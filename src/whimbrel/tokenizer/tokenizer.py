"""Tokenizer of one checkpoint.

Applies prompts, special tokens and truncation to texts and pairs. Texts that exceed the limit are truncated here, inside the
special tokens. So one backend, which nothing reconfigures, serves all threads. Knows nothing of batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from whimbrel.errors import CheckpointError, Hint, InvalidRequest
from whimbrel.tokenizer.backend import BackendTokenizer, load_tokenizer
from whimbrel.tokenizer.colbert import add_markers_and_expansion, length_bounds, remaining_limit
from whimbrel.tokenizer.gritlm import InstructionFinder
from whimbrel.tokenizer.pairs import find_template
from whimbrel.tokenizer.prefixes import PROBES, max_prefix_tokens, probed_prefix, with_prefix
from whimbrel.tokenizer.static import find_static_rules
from whimbrel.tokenizer.validation import (
    MAX_CHARACTERS_PER_TOKEN,
    LengthBounds,
    TruncationLimit,
    check_ids,
    check_pairs,
    check_texts,
    has_ids,
)
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card, SpanPrompt, TextFormat
from whimbrel.types.plan import Plan
from whimbrel.types.request import Request
from whimbrel.types.seq import Seq, TokenInfo
from whimbrel.types.template import common_end

_FILE: Final = "tokenizer.json"
_PROBES: Final = ("a", "the quick brown fox")
"""Texts around which the post-processor must put the same tokens."""
_FILLERS: Final = ("0", "1 2 3 4")
"""Texts whose last tokens differ, so a common end belongs to the template (as in sentence_transformers' transformer.py)."""
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


@dataclass(frozen=True, slots=True)
class EncodeParams:
    prompt: str
    prompt_tokens: int
    """Leading tokens that pooling skips."""
    limit: TruncationLimit
    adapter: int
    frame: ChatFrame | None = None


class Tokenizer:
    """The tokenizer of one checkpoint. Thread-safe."""

    def __init__(self, folder: Path, card: Card, plan: Plan, *, tower: int = 0) -> None:
        """`tower` is the index of the tower that `card` describes."""
        raw = load_tokenizer(folder, card)
        static = card.tokenizer.static
        self.card = card
        self.backend = BackendTokenizer(
            raw, special=static is None, max_characters=MAX_CHARACTERS_PER_TOKEN * plan.max_request_tokens
        )
        self.special = find_special_tokens(raw, card)
        self._template = card.text_template
        self._frame = lru_cache(maxsize=16)(self._make_frame)
        self.instruction = card.instruction and InstructionFinder(card.instruction, raw, self.special.before)
        self.static = static and find_static_rules(raw, static)
        self._tower = tower
        self._max_length = plan.max_length
        self._includes_prompt = self._template is not None or all(output.include_prompt for output in card.outputs.values())
        num_types = card.encoder.type_vocab_size if card.tokenizer.second_type else 0
        self._pairs = find_template(raw, num_types) if "scores" in card.outputs else None
        self._max_prefix_tokens = max_prefix_tokens(card, plan)
        self._prefix = lru_cache(maxsize=16)(self._find_prefix)
        self._check_text_formats()
        if card.span_prompt is not None:
            _check_label_token(raw, card.span_prompt)

    def encode(self, request: Request) -> list[Seq]:
        """Tokenise all texts of a request.

        Raises InvalidRequest (wrong type, no tokens, id outside the vocabulary, unknown prompt), TooLarge and TooLong.
        """
        if len(request.texts) == 0:
            return []
        if not request.add_special_tokens and not has_ids(request) and self._has_format():
            raise InvalidRequest("this model's tokens around texts belong to their format.", param="add_special_tokens")
        if isinstance(request.texts[0], tuple):
            return self._encode_pairs(request)
        form = self._text_format(request)
        terms = self.encode_params(request, form)
        rows, shortened = self.rows(request, terms)
        seqs = [self.seq(ids, index, terms, shortened=index in shortened) for index, ids in enumerate(rows)]
        if form is None:
            return self._with_prefixes(seqs, request, terms)
        is_query = request.input_type == "query"
        if has_ids(request):
            return [replace(seq, is_query=is_query) for seq in seqs]
        return [add_markers_and_expansion(seq, form, is_query=is_query) for seq in seqs]

    def tokens(self, ids: Int32Array) -> tuple[str, ...]:
        names = map(self.backend.raw.id_to_token, ids.tolist())
        return tuple(token or f"<{id_}>" for token, id_ in zip(names, ids.tolist(), strict=True))

    def token_infos(self, texts: list[str], prompt: str, *, special: bool) -> list[TokenInfo]:
        """Return the tokens of texts as they are run. `special`: include special tokens. Raises InvalidRequest and TooLarge."""
        if self._template is None:
            return self.backend.tokens(texts, prompt, special=special)
        return self.backend.tokens(self._framed(texts, self._frame(prompt)), special=False)

    # The steps of `encode`, which `chunking.py` and `offsets.py` combine in other ways

    def encode_params(self, request: Request, form: TextFormat | None = None) -> EncodeParams:
        """Resolve the request's prompt, limit and adapter. Raises InvalidRequest."""
        prompt = self._prompt(request)
        limit = self._lengths(form).limit(request, self.card.tokenizer.truncate)
        if self._template is not None and not has_ids(request):
            return EncodeParams("", 0, limit, self.card.adapter(request.prompt_name, request.adapter), self._frame(prompt))
        return EncodeParams(
            prompt,
            0 if self._includes_prompt or not prompt else self._count_prompt_tokens(prompt, special=request.add_special_tokens),
            limit if form is None or has_ids(request) else remaining_limit(form, limit),
            self.card.adapter(request.prompt_name, request.adapter),
        )

    def rows(self, request: Request, terms: EncodeParams) -> tuple[list[Int32Array], frozenset[int]]:
        """Return the ids of each text with prompt and special tokens, and the indices of texts truncated by characters."""
        if has_ids(request):
            return check_ids(request.texts, self.card.encoder.vocab_size), frozenset()
        texts = check_texts(request.texts)
        if terms.frame is not None:
            return self.backend.ids(self._framed(texts, terms.frame), special=False), frozenset()
        if self.static is None or not self.static.shortens(terms.limit):
            return self.backend.ids(texts, terms.prompt, special=request.add_special_tokens), frozenset()
        whole = [terms.prompt + text for text in texts]
        short = [self.static.shorten(text, terms.limit) for text in whole]
        return self.backend.ids(short), frozenset(i for i, text in enumerate(whole) if len(text) > len(short[i]))

    def seq(self, ids: Int32Array, index: int, terms: EncodeParams, *, shortened: bool = False) -> Seq:
        """Truncate `ids` to the limit. Special tokens are kept, unless the ids came without them."""
        if ids.size == 0 and self.static is None:
            raise InvalidRequest("the text has no tokens.", item=index)
        truncated = terms.limit.exceeded(ids.size, "text", index) or shortened
        ids = (
            ids[self.special.truncate_indices(ids, terms.limit)] if terms.frame is None else _cut_chat(ids, terms, terms.frame)
        )
        prompt_tokens = max(terms.prompt_tokens, self.count_instruction(ids))
        if 0 < ids.size <= prompt_tokens:
            raise InvalidRequest("the text has no tokens but its prompt's, which are not pooled.", item=index)
        ids = ids[self.known(ids)]
        if self.static is not None:
            ids = self.static.fill_empty(ids)
        return Seq(
            ids, index, prompt_tokens, self.special.type_id, truncated=truncated, adapter=terms.adapter, tower=self._tower
        )

    def _with_prefixes(self, seqs: list[Seq], request: Request, terms: EncodeParams) -> list[Seq]:
        """Return the seqs with the lengths of their prefixes: what stands before every text of the request."""
        prompt = self._prompt(request)
        if not self._max_prefix_tokens or has_ids(request) or not (prompt or terms.frame):
            return seqs
        prefix = self._prefix(prompt, request.add_special_tokens)
        return [with_prefix(seq, prefix, self._max_prefix_tokens) for seq in seqs]

    def _find_prefix(self, prompt: str, special: bool) -> Int32Array:
        if self._template is not None:
            return probed_prefix(self.backend.ids(self._framed(list(PROBES), self._frame(prompt)), special=False))
        return probed_prefix(self.backend.ids(list(PROBES), prompt, special=special))

    def known(self, ids: Int32Array) -> slice | NDArray[np.bool_]:
        unknown_id = None if self.static is None else self.static.unknown_id
        return slice(None) if unknown_id is None else ids != unknown_id

    def count_instruction(self, ids: Int32Array) -> int:
        """Return the number of leading tokens that belong to an instruction within the text."""
        return 0 if self.instruction is None else self.instruction.count(ids)

    def _encode_pairs(self, request: Request) -> list[Seq]:
        if self._pairs is None:
            raise InvalidRequest("this model takes texts, not pairs of texts.", item=0)
        if not request.add_special_tokens:
            raise InvalidRequest("special tokens stand between the two texts of a pair.", param="add_special_tokens")
        pairs, prompt = check_pairs(request.texts), self._prompt(request)
        if prompt:
            prompted = {first: prompt + first for first, _ in pairs}
            pairs = [(prompted[first], second) for first, second in pairs]
        limit = self._lengths(least=self._pairs.num_special + 2).limit(request, self.card.tokenizer.truncate)
        ids = self.backend.encode_unique(pairs)
        adapter = self.card.adapter(request.prompt_name, request.adapter)
        only_first = bool(request.hypotheses)
        return [
            self._pairs.seq(ids[first], ids[second], index, limit, adapter, only_first=only_first)
            for index, (first, second) in enumerate(pairs)
        ]

    def _text_format(self, request: Request) -> TextFormat | None:
        forms = self.card.text_formats
        if forms and request.input_type not in forms:
            raise InvalidRequest(
                "this model treats queries and documents differently", param="input_type", hint=Hint.INPUT_TYPE
            )
        return None if request.input_type is None else forms.get(request.input_type)

    def _has_format(self) -> bool:
        return bool(self.card.text_formats or self._template or self.instruction)

    def _prompt(self, request: Request) -> str:
        if has_ids(request):
            if request.prompt is not None or request.prompt_name is not None:
                raise InvalidRequest("a prompt cannot be put before token ids; send text.", param="prompt")
            return ""
        if request.prompt is not None:
            return request.prompt
        name = self.card.prompt_for(request.input_type) if request.prompt_name is None else request.prompt_name
        return "" if name is None else self.card.prompt_text(name)

    def _count_prompt_tokens(self, prompt: str, *, special: bool) -> int:
        """Count as Sentence Transformers does: the prompt alone, truncated to the limit, without a closing special token."""
        (ids,) = self.backend.ids([""], prompt, special=special)
        count = min(ids.size, self._max_length) - (min(1, self.special.after.size) if special else 0)
        return 0 if count == 1 and self.card.tokenizer.pools_one_token else count

    def _framed(self, texts: list[str], frame: ChatFrame) -> list[str]:
        assert self._template is not None
        return [self._template.put(text, frame.around) for text in texts]

    def _make_frame(self, prompt: str) -> ChatFrame:
        """Return what the chat template puts around texts with this prompt. Raises InvalidRequest if it takes none."""
        assert self._template is not None
        if prompt and self._template.prompted is None:
            raise InvalidRequest("this model's chat template has no place for a prompt.", param="prompt")
        around = self._template.around(prompt)
        first, second = self.backend.ids([self._template.put(text, around) for text in _FILLERS], special=False)
        size = common_end(first.tolist(), second.tolist())
        return ChatFrame(around, first[first.size - size :] if size < min(first.size, second.size) else _NOTHING)

    def _lengths(self, form: TextFormat | None = None, *, least: int = 0) -> LengthBounds:
        """Return the length bounds of a text in a format, or of a pair with at least `least` tokens."""
        least = max(least, self.special.num_tokens + 1)
        if form is None:
            return LengthBounds(least, self._max_length, self._max_length)
        return length_bounds(form, least, self._max_length)

    def _check_text_formats(self) -> None:
        """Raise CheckpointError if a text cannot have the default length, or has no place for its marker."""
        forms = self.card.text_formats.values()
        for bounds in map(self._lengths, (None, *forms)):
            if bounds.default < bounds.minimum:
                raise CheckpointError(
                    f"max length {bounds.default} leaves no room: every text has {bounds.minimum} tokens or more.", file=_FILE
                )
        if self.special.before.size != 1 and any(form.marker_id is not None for form in forms):
            raise CheckpointError("does not put one token before a text, after which its marker could come.", file=_FILE)


def _check_label_token(raw: tokenizers.Tokenizer, prompt: SpanPrompt) -> None:
    """Raise CheckpointError if the token before each label has not the id by which the model finds it."""
    if (found := raw.token_to_id(prompt.label_token)) != prompt.label_id:
        message = f"{prompt.label_token!r} has the id {found}, and class_token_index is {prompt.label_id}."
        raise CheckpointError(message, file=_FILE, hint="save the model and its tokenizer together, with the package gliner")


def _cut_chat(ids: Int32Array, terms: EncodeParams, frame: ChatFrame) -> Int32Array:
    """Cut a text in a chat template to the limit, then write the template's end over the last tokens."""
    if ids.size < terms.limit.max_length:
        return ids
    end = frame.end[max(0, frame.end.size - terms.limit.max_length) :]
    kept = terms.limit.cut(ids, terms.limit.max_length)
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
