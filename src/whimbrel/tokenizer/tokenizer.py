"""Request -> [Seq]. Knows prompts, special tokens, pairs and truncation; knows nothing of batches.

Texts go through the tokenizer many at a time, whole; what is too long is cut here, between the special tokens that stand
around it, so one tokenizer, never reconfigured, serves all threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import CheckpointError, Hint, InvalidRequest
from whimbrel.tokenizer.backend import BackendTokenizer, load_tokenizer
from whimbrel.tokenizer.colbert import add_markers_and_expansion, length_bounds, remaining_limit
from whimbrel.tokenizer.gritlm import InstructionFinder
from whimbrel.tokenizer.pairs import find_template
from whimbrel.tokenizer.special_tokens import find_special_tokens
from whimbrel.tokenizer.static import find_static_rules
from whimbrel.tokenizer.truncation import MAX_CHARACTERS_PER_TOKEN, LengthBounds, TruncationLimit
from whimbrel.tokenizer.validation import check_ids, check_pairs, check_texts, has_ids
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card, TextFormat
from whimbrel.types.plan import Plan
from whimbrel.types.request import Request
from whimbrel.types.seq import Seq

_FILE: Final = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class EncodeParams:
    """What holds for all texts of a request."""

    prompt: str
    prompt_tokens: int
    """Leading tokens that pooling leaves out."""
    limit: TruncationLimit
    adapter: int


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan, *, tower: int = 0) -> None:
        """`tower` is which of a card's towers `card` is that of."""
        raw = load_tokenizer(folder, card)
        bare = card.tokenizer.static
        self.card = card
        self.backend = BackendTokenizer(
            raw, special=bare is None, max_characters=MAX_CHARACTERS_PER_TOKEN * plan.max_request_tokens
        )
        self.special = find_special_tokens(raw, card)
        self.instruction = card.instruction and InstructionFinder(card.instruction, raw, self.special.before)
        self.static = bare and find_static_rules(raw, bare)
        self._tower = tower
        self._max_length = plan.max_length
        self._includes_prompt = all(output.include_prompt for output in card.outputs.values())
        num_types = card.encoder.type_vocab_size if card.tokenizer.second_type else 0
        self._pairs = find_template(raw, num_types) if "scores" in card.outputs else None
        self._check_text_formats()

    def encode(self, request: Request) -> list[Seq]:
        """Tokenise all texts of a request.

        Raises InvalidRequest (wrong type, no tokens, id outside the vocabulary, unknown prompt), TooLarge and TooLong.
        """
        if len(request.texts) == 0:
            return []
        if isinstance(request.texts[0], tuple):
            return self._encode_pairs(request)
        form = self._text_format(request)
        terms = self.encode_params(request, form)
        rows, shortened = self.rows(request, terms)
        seqs = [self.seq(ids, index, terms, shortened=index in shortened) for index, ids in enumerate(rows)]
        if form is None:
            return seqs
        is_query = request.input_type == "query"
        return [add_markers_and_expansion(seq, None if has_ids(request) else form, is_query=is_query) for seq in seqs]

    def tokens(self, ids: Int32Array) -> tuple[str, ...]:
        """How tokens stand in the vocabulary."""
        found = map(self.backend.raw.id_to_token, ids.tolist())
        return tuple(token or f"<{id_}>" for token, id_ in zip(found, ids.tolist(), strict=True))

    # The steps of `encode`, which `part_tokenizer` and `token_spans` take in other ways

    def encode_params(self, request: Request, form: TextFormat | None = None) -> EncodeParams:
        """What a request says of all its texts. Raises InvalidRequest."""
        prompt = self._prompt(request)
        limit = self._lengths(form).limit(request, self.card.tokenizer.truncate)
        return EncodeParams(
            prompt,
            0 if self._includes_prompt or not prompt else self._count_prompt_tokens(prompt),
            limit if has_ids(request) else remaining_limit(form, limit),
            self.card.adapter(request.prompt_name),
        )

    def rows(self, request: Request, terms: EncodeParams) -> tuple[list[Int32Array], frozenset[int]]:
        """The ids of each text, prompt and special tokens included; and which texts were cut before they were tokenised."""
        if has_ids(request):
            return check_ids(request.texts, self.card.encoder.vocab_size), frozenset()
        texts = check_texts(request.texts)
        if self.static is None or not self.static.shortens(terms.limit):
            return self.backend.ids(texts, terms.prompt), frozenset()
        whole = [terms.prompt + text for text in texts]
        short = [self.static.shorten(text, terms.limit) for text in whole]
        return self.backend.ids(short), frozenset(i for i, text in enumerate(whole) if len(text) > len(short[i]))

    def seq(self, ids: Int32Array, index: int, terms: EncodeParams, *, shortened: bool = False) -> Seq:
        """Cut `ids` to the limit, keeping the special tokens around them; token ids that came without are cut as they are."""
        if ids.size == 0 and self.static is None:
            raise InvalidRequest("the text has no tokens.", item=index)
        truncated = terms.limit.exceeded(ids.size, "text", index) or shortened
        ids = ids[self.special.truncate_indices(ids, terms.limit)]
        prompt_tokens = max(terms.prompt_tokens, self.count_instruction(ids))
        if 0 < ids.size <= prompt_tokens:
            raise InvalidRequest("the text has no tokens but its prompt's, of which no vector is made.", item=index)
        ids = ids[self.known(ids)]
        if self.static is not None:
            ids = self.static.filled(ids)
        return Seq(
            ids, index, prompt_tokens, self.special.type_id, truncated=truncated, adapter=terms.adapter, tower=self._tower
        )

    def known(self, ids: Int32Array) -> slice | NDArray[np.bool_]:
        """Which tokens are not left out for being unknown."""
        unknown_id = None if self.static is None else self.static.unknown_id
        return slice(None) if unknown_id is None else ids != unknown_id

    def count_instruction(self, ids: Int32Array) -> int:
        """Leading tokens that belong to an instruction within the text."""
        return 0 if self.instruction is None else self.instruction.count(ids)

    def _encode_pairs(self, request: Request) -> list[Seq]:
        if self._pairs is None:
            raise InvalidRequest("this model takes texts, not pairs of texts.", item=0)
        pairs, prompt = check_pairs(request.texts), self._prompt(request)
        if prompt:
            pairs = [(prompt + first, second) for first, second in pairs]
        limit = self._lengths(least=self._pairs.num_special + 2).limit(request, self.card.tokenizer.truncate)
        ids = self.backend.encode_unique(pairs)
        return [self._pairs.seq(ids[first], ids[second], index, limit) for index, (first, second) in enumerate(pairs)]

    def _text_format(self, request: Request) -> TextFormat | None:
        forms = self.card.text_formats
        if forms and request.input_type not in forms:
            raise InvalidRequest(
                "this model treats queries and documents differently", param="input_type", hint=Hint.INPUT_TYPE
            )
        return None if request.input_type is None else forms.get(request.input_type)

    def _prompt(self, request: Request) -> str:
        """The text put before each text."""
        if has_ids(request):
            if request.prompt is not None or request.prompt_name is not None:
                raise InvalidRequest("a prompt cannot be put before token ids; send text.", param="prompt")
            return ""
        if request.prompt is not None:
            return request.prompt
        name = self.card.prompt_for(request.input_type) if request.prompt_name is None else request.prompt_name
        return "" if name is None else self.card.prompt_text(name)

    def _count_prompt_tokens(self, prompt: str) -> int:
        """Sentence Transformers' count: the prompt alone, cut to the model's length, except a special token that closes it."""
        (ids,) = self.backend.ids([""], prompt)
        return min(ids.size, self._max_length) - min(1, self.special.after.size)

    def _lengths(self, form: TextFormat | None = None, *, least: int = 0) -> LengthBounds:
        """Tokens that a text of a form may have, or a pair, which has `least`."""
        return length_bounds(form, max(least, self.special.num_tokens + 1), self._max_length)

    def _check_text_formats(self) -> None:
        """Refuse a checkpoint whose texts cannot be of its own length, or have no place for their marker."""
        forms = self.card.text_formats.values()
        for found in map(self._lengths, (None, *forms)):
            if found.default < found.minimum:
                raise CheckpointError(
                    f"max length {found.default} leaves no room: every text has {found.minimum} tokens or more.", file=_FILE
                )
        if self.special.before.size != 1 and any(form.marker_id is not None for form in forms):
            raise CheckpointError("does not put one token before a text, after which its marker could come.", file=_FILE)
