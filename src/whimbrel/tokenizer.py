"""Request -> [Seq]. Knows prompts, special tokens, pairs and truncation; knows nothing of batches.

Texts go through the tokenizer many at a time, whole; what is too long is cut here, between the special tokens that stand
around it, so one tokenizer, never reconfigured, serves all threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final, cast

import numpy as np
import tokenizers

from whimbrel.card import Card, Form
from whimbrel.errors import CheckpointError, InvalidRequest, TooLarge, TooLong
from whimbrel.forms import give_form, is_fixed
from whimbrel.instruction import InstructionFinder
from whimbrel.json_file import JsonFile
from whimbrel.pairs import PairTemplate, check_pairs, cut, find_template, too_long
from whimbrel.parts import common_prefix, split
from whimbrel.parts import spans as spans_of_parts
from whimbrel.plan import Plan
from whimbrel.token_spans import find_spans, unknown_id
from whimbrel.tokenizer_file import read_as_class
from whimbrel.types import Float32Array, Int32Array, Int64Array, Pair, Request, Seq, TokenSpans, Truncate

_FILE: Final = "tokenizer.json"

_RARE: Final = "\U00012000\U0001f9ff"
"""Two characters that few vocabularies have: a tokenizer must have a token for what it does not know."""

MAX_CHARACTERS: Final = 2**20
"""Of one text, prompt included. While it is tokenised a text takes up to some 400 bytes per character; texts are handed over
in slices of as many characters, so this bounds the memory of any request."""
_MAX_PARTS: Final = 2**14
"""Of all texts of a request that are split."""
_MAX_CHARACTERS_PER_TOKEN: Final = 32
"""A request may have so many times the characters that it may have tokens."""


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan, *, tower: int = 0) -> None:
        """`tower` is which of a card's towers `card` is that of."""
        self._tower = tower
        self._card = card
        self._includes_prompt = all(output.include_prompt for output in card.outputs.values())
        self._max_length = plan.max_length
        self._max_request_characters = _MAX_CHARACTERS_PER_TOKEN * plan.max_request_tokens
        self._tokenizer = _load(folder, card)
        vocab_size = self._tokenizer.get_vocab_size()
        if vocab_size > card.encoder.vocab_size:
            raise CheckpointError(
                f"has {vocab_size:,} tokens; the model embeds {card.encoder.vocab_size:,} (config.json: vocab_size).",
                file=_FILE,
            )
        self._bare = card.tokenizer.bare
        self._unknown = _unknown_id(self._tokenizer) if self._bare is not None and self._bare.drop_unknown else None
        self._median_size = _median_size(self._tokenizer) if self._bare is not None and self._bare.cut_characters else 0
        self._prefix, self._suffix, self._type_id = _special_tokens(self._tokenizer, card)
        self._instruction = (
            None if card.instruction is None else InstructionFinder(card.instruction, self._tokenizer, self._prefix)
        )
        self._pairs = self._pair_template() if "scores" in card.outputs else None
        self._unknown_id = unknown_id(self._tokenizer, card.tokenizer)
        for form in (None, *card.forms.values()):
            least, usual, _ = self._lengths(form)
            if usual < least:
                raise CheckpointError(f"max length {usual} leaves no room: every text has {least} tokens or more.", file=_FILE)
        if self._prefix.size != 1 and any(form.marker_id is not None for form in card.forms.values()):
            raise CheckpointError("does not put one token before a text, after which its marker could come.", file=_FILE)

    def encode(self, request: Request) -> list[Seq]:
        """Tokenise all texts of a request.

        Raises InvalidRequest (wrong type, no tokens, id outside the vocabulary, unknown prompt), TooLarge and TooLong.
        """
        if len(request.texts) == 0:
            return []
        if isinstance(request.texts[0], tuple):
            return self._encode_pairs(request)
        form = self._form(request)
        max_length = self._request_max_length(request, form)
        truncate: Truncate = request.truncate or self._card.tokenizer.truncate
        rows, prompt_tokens, shortened = self._rows(request, max_length, truncate)
        given_ids = isinstance(request.texts[0], np.ndarray)
        if form is not None and form.marker_id is not None and not given_ids:
            max_length -= 1
        adapter = self._card.adapter(request.prompt_name)
        seqs = [self._seq(ids, index, prompt_tokens, max_length, truncate, adapter=adapter) for index, ids in enumerate(rows)]
        if shortened:
            seqs = [replace(seq, truncated=True) if seq.index in shortened else seq for seq in seqs]
        if form is None:
            return seqs
        is_query = request.input_type == "query"
        return [give_form(seq, None if given_ids else form, is_query=is_query) for seq in seqs]

    def encode_split(self, request: Request) -> tuple[list[Seq], Int64Array, Float32Array]:
        """The same of texts that may be too long for the model: (seqs, those of text i are offsets_N1[i] to offsets_N1[i + 1],
        tokens of each that are its own).

        Each part has the special tokens and what the text begins with: its prompt, or its instruction.
        """
        if len(request.texts) == 0:
            return [], np.zeros(1, np.int64), np.empty(0, np.float32)
        max_length = self._request_max_length(request)
        rows, prompt_tokens, _ = self._rows(request, max_length, "never")
        prompt = "" if isinstance(request.texts[0], np.ndarray) else self._prompt(request)
        prompt_ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids if prompt else []
        parts: list[tuple[Int32Array, int]] = []
        counts: list[int] = []
        for ids in rows:
            own = self._without_unknown(ids)
            before, after = self._shared(own, prompt_ids)
            if own.size > max_length <= before + after:
                raise InvalidRequest(f"of {before:,} tokens leaves no room for the text.", param="prompt")
            pieces = split(own, before, after, max_length)
            counts.append(len(pieces))
            parts += pieces
        if len(parts) > _MAX_PARTS:
            raise TooLarge(f"the texts have {len(parts):,} parts; the limit is {_MAX_PARTS:,}. Send fewer.", param="input")
        adapter = self._card.adapter(request.prompt_name)
        seqs = [
            self._seq(ids, index, prompt_tokens, max_length, "never", adapter=adapter) for index, (ids, _) in enumerate(parts)
        ]
        weights = np.array([max(1, size) for _, size in parts], np.float32)
        return seqs, np.cumsum([0, *counts], dtype=np.int64), weights

    def encode_document(self, request: Request) -> list[Seq]:
        """The texts of a request as parts of one document: one seq, with a span for each."""
        if len(request.texts) == 0:
            return []
        max_length = self._request_max_length(request)
        texts, prompt = _check_texts(cast(Sequence[object], request.texts)), self._prompt(request)
        ends_N1 = np.cumsum([len(prompt), *map(len, texts)])
        document = prompt + "".join(texts)
        try:
            ((encoding,),) = self._encodings([document], "", [0], located=True)
        except TooLarge:
            raise
        except InvalidRequest as error:
            raise _culprit(texts, prompt, range(len(texts)), error) from None
        ids, offsets_T2 = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if ids.size > max_length:
            raise TooLong(
                f"the texts have {ids.size:,} tokens together; the limit is {max_length:,}, and late chunking runs them in one "
                "pass. Send fewer of them.",
                param="input",
            )
        if self._unknown is not None:
            ids, offsets_T2 = ids[ids != self._unknown], offsets_T2[ids != self._unknown]
        first = self._prefix.size
        spans_S2 = spans_of_parts(ends_N1, offsets_T2[first : ids.size - self._suffix.size]) + np.int32(first)
        if self._instruction is not None:
            spans_S2 = np.maximum(spans_S2, np.int32(self._instruction.count(ids)))
        without = np.flatnonzero(spans_S2[:, 0] == spans_S2[:, 1])
        if without.size:
            raise InvalidRequest("this part of the document has no tokens of its own.", param=f"input[{without[0]}]")
        adapter = self._card.adapter(request.prompt_name)
        return [Seq(ids, 0, type_id=self._type_id, spans_S2=spans_S2, adapter=adapter, tower=self._tower)]

    def _shared(self, ids: Int32Array, prompt_ids: list[int]) -> tuple[int, int]:
        """How many tokens before and after a text each of its parts needs too."""
        prefix, suffix = self._prefix.size, self._suffix.size
        if not (_starts_with(ids, self._prefix) and _ends_with(ids, self._suffix)):
            return 0, 0
        before = prefix + common_prefix(ids[prefix:], prompt_ids)
        return max(before, self._instruction.count(ids) if self._instruction is not None else 0), suffix

    def _without_unknown(self, ids: Int32Array) -> Int32Array:
        return ids if self._unknown is None else ids[ids != self._unknown]

    def _rows(self, request: Request, max_length: int, truncate: Truncate) -> tuple[list[Int32Array], int, frozenset[int]]:
        """(ids of each text, those of the prompt that pooling leaves out, texts whose characters were cut)."""
        prompt_tokens, shortened = 0, frozenset[int]()
        if isinstance(request.texts[0], np.ndarray):
            if request.prompt is not None or request.prompt_name is not None:
                raise InvalidRequest("a prompt cannot be put before token ids; send text.", param="prompt")
            rows = self._check_ids(cast(Sequence[Int64Array], request.texts))
        else:
            prompt = self._prompt(request)
            texts = _check_texts(cast(Sequence[object], request.texts))
            if self._median_size and truncate != "never":
                limit = max_length * self._median_size
                shortened = frozenset(i for i, text in enumerate(texts) if len(prompt) + len(text) > limit)
                kept = slice(limit) if truncate == "right" else slice(-limit, None)
                texts, prompt = [(prompt + text)[kept] for text in texts], ""
            rows = self._encode_texts(texts, prompt)
            prompt_tokens = 0 if self._includes_prompt or not prompt else self._count_prompt_tokens(prompt)
        return rows, prompt_tokens, shortened

    def _form(self, request: Request) -> Form | None:
        forms = self._card.forms
        if forms and request.input_type not in forms:
            raise InvalidRequest(
                'this model treats queries and documents differently; say input_type="query" or "document".',
                param="input_type",
            )
        return None if request.input_type is None else forms.get(request.input_type)

    def locate(self, request: Request) -> tuple[list[Seq], list[TokenSpans]]:
        """As `encode`, of texts; and which characters their tokens are of, those of a prompt not counted."""
        texts, prompt = _check_texts(cast(Sequence[object], request.texts)), self._prompt(request)
        max_length, truncate = self._request_max_length(request), request.truncate or self._card.tokenizer.truncate
        adapter = self._card.adapter(request.prompt_name)
        seqs: list[Seq] = []
        spans: list[TokenSpans] = []
        for encodings in self._encodings(texts, prompt, range(len(texts)), located=True):
            for encoding in encodings:
                ids = np.array(encoding.ids, np.int32)
                seqs.append(self._seq(ids, len(seqs), 0, max_length, truncate, adapter=adapter))
                places = self._kept(ids, max_length, truncate)
                spans.append(find_spans(self._tokenizer, encoding, texts[len(spans)], prompt, self._unknown_id)[places])
        return seqs, spans

    def _pair_template(self) -> PairTemplate | None:
        second_type = self._card.tokenizer.second_type
        return find_template(self._tokenizer, self._card.encoder.type_vocab_size if second_type else 0)

    def _encode_pairs(self, request: Request) -> list[Seq]:
        template = self._pairs
        if template is None:
            raise InvalidRequest("this model takes texts, not pairs of texts.", param="input[0]")
        pairs, prompt = check_pairs(cast(Sequence[object], request.texts)), self._prompt(request)
        if prompt:
            pairs = [(prompt + first, second) for first, second in pairs]
        ids = self._encode_once(pairs)
        max_length = self._request_max_length(request, pair=template.num_special + 2)
        truncate: Truncate = request.truncate or self._card.tokenizer.truncate
        return [
            template.seq(ids[first], ids[second], index, max_length, truncate) for index, (first, second) in enumerate(pairs)
        ]

    def _encode_once(self, pairs: Sequence[Pair]) -> dict[str, Int32Array]:
        """The ids of each text, without special tokens; one that is in many pairs is tokenised once."""
        found: dict[str, int] = {}
        for index, pair in enumerate(pairs):
            for text in pair:
                found.setdefault(text, index)
        texts = list(found)
        return dict(zip(texts, self._encode_texts(texts, "", list(found.values()), special=False), strict=True))

    @property
    def _least_length(self) -> int:
        return self._prefix.size + self._suffix.size + 1

    def _lengths(self, form: Form | None) -> tuple[int, int, int]:
        """Tokens that a text may have: the least that may be asked for, as many as it has if nothing is, and the most."""
        least, most = self._least_length, self._max_length
        if form is None:
            return least, most, most
        least += form.marker_id is not None
        if form.expansion is not None:
            least = max(least, form.expansion.length)
        return least, min(form.max_length, most), form.max_length if is_fixed(form) else most

    def _request_max_length(self, request: Request, form: Form | None = None, *, pair: int = 0) -> int:
        """`pair`: the least that a pair has."""
        least, usual, most = self._lengths(form)
        return request_max_length(request, max(least, pair), usual, most)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer itself, which is not to be changed."""
        return self._tokenizer

    @property
    def around(self) -> tuple[Int32Array, Int32Array]:
        """What stands before and after every text."""
        return self._prefix, self._suffix

    def _prompt(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        name = self._card.prompt_for(request.input_type) if request.prompt_name is None else request.prompt_name
        return "" if name is None else self._card.prompt_text(name)

    def _encode_texts(
        self, texts: Sequence[str], prompt: str, inputs: Sequence[int] | None = None, *, special: bool = True
    ) -> list[Int32Array]:
        """The ids of each text; `inputs` are the places in the request that errors name."""
        inputs = range(len(texts)) if inputs is None else inputs
        slices = self._encodings(texts, prompt, inputs, special=special)
        return [row for encodings in slices for row in _split([encoding.ids for encoding in encodings])]

    def _encodings(
        self, texts: Sequence[str], prompt: str, inputs: Sequence[int], *, special: bool = True, located: bool = False
    ) -> Iterator[list[tokenizers.Encoding]]:
        """Slice by slice; only if they are to be `located` do encodings know which characters their tokens are of."""
        sizes = [len(prompt) + len(text) for text in texts]
        self.check_sizes(sizes, inputs)
        encode = self._tokenizer.encode_batch if located else self._tokenizer.encode_batch_fast
        for part in _slices(sizes):
            prompted = [prompt + text for text in texts[part]] if prompt else texts[part]
            try:
                encodings = encode(prompted, add_special_tokens=special and self._bare is None)
            except BaseException as error:
                if not _is_of_the_binding(error):
                    raise
                raise _culprit(texts, prompt, inputs, error) from None
            yield encodings

    def check_sizes(self, sizes: Sequence[int], inputs: Sequence[int]) -> None:
        """Refuse texts of so many characters, at these places of a request, if that is too much. Raises TooLarge."""
        if (total := sum(sizes)) > self._max_request_characters:
            raise TooLarge(
                f"the texts have {total:,} characters, prompts included; the limit is {self._max_request_characters:,}. "
                "Send fewer texts at once.",
                param="input",
            )
        for index, size in enumerate(sizes):
            if size > MAX_CHARACTERS:
                raise TooLarge(
                    f"the text has {size:,} characters, its prompt included; the limit is {MAX_CHARACTERS:,}. Split it.",
                    param=f"input[{inputs[index]}]",
                )

    def _count_prompt_tokens(self, prompt: str) -> int:
        """Sentence Transformers' count: the prompt alone, cut to the model's length, except a special token that closes it."""
        return min(len(self._tokenizer.encode(prompt).ids), self._max_length) - min(1, self._suffix.size)

    def _check_ids(self, texts: Sequence[Int64Array]) -> list[Int32Array]:
        vocab_size = self._card.encoder.vocab_size
        for index, ids in enumerate(texts):
            _check_row(ids, index)
            wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if wrong.size:
                raise InvalidRequest(
                    f"token id {ids[wrong[0]]:,} is outside the vocabulary of {vocab_size:,}. Were these ids made by "
                    "another model's tokenizer? Send text (LangChain: check_embedding_ctx_length=False).",
                    param=f"input[{index}][{wrong[0]}]",
                )
        return [ids.astype(np.int32) for ids in texts]

    def _seq(
        self, ids: Int32Array, index: int, prompt_tokens: int, max_length: int, truncate: Truncate, *, adapter: int
    ) -> Seq:
        """Cut `ids` to the limit, keeping the special tokens around them; token ids that came without are cut as they are."""
        if ids.size == 0 and self._bare is None:
            raise InvalidRequest("the text has no tokens.", param=f"input[{index}]")
        truncated = ids.size > max_length
        if truncated and truncate == "never":
            raise too_long("text", ids.size, max_length, index)
        ids = ids[self._kept(ids, max_length, truncate)]
        if self._instruction is not None:
            prompt_tokens = max(prompt_tokens, self._instruction.count(ids))
        ids = self._without_unknown(ids)
        if ids.size == 0 and self._bare is not None:
            ids = np.array([self._bare.empty_id], np.int32)
        return Seq(ids, index, prompt_tokens, self._type_id, truncated=truncated, adapter=adapter, tower=self._tower)

    def _kept(self, ids: Int32Array, max_length: int, truncate: Truncate) -> slice | Int32Array:
        """Which tokens are left of a text, the special tokens around it among them."""
        if ids.size <= max_length:
            return slice(None)
        prefix, suffix = self._prefix.size, self._suffix.size
        if not (_starts_with(ids, self._prefix) and _ends_with(ids, self._suffix)):
            prefix = suffix = 0
        places = np.arange(ids.size, dtype=np.int32)
        body = places[prefix : ids.size - suffix]
        body = cut(body, max_length - prefix - suffix, truncate)
        return np.concatenate((places[:prefix], body, places[ids.size - suffix :]))


def request_max_length(request: Request, least: int, usual: int, most: int) -> int:
    """The limit of a request's texts; `usual` where it states none. Raises InvalidRequest."""
    wanted = usual if request.max_tokens is None else request.max_tokens
    if not least <= wanted <= most:
        raise InvalidRequest(
            f"{wanted:,} tokens per text; this model takes {least} to {most:,}.", param="truncate_prompt_tokens"
        )
    return wanted


def encode_bare(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[Int32Array]:
    """The ids of texts with nothing around them. Raises InvalidRequest."""
    rows: list[Int32Array] = []
    for part in _slices([len(text) for text in texts]) if texts else ():
        try:
            encodings = tokenizer.encode_batch_fast(texts[part], add_special_tokens=False)
        except BaseException as error:
            if not _is_of_the_binding(error):
                raise
            raise _culprit(texts, "", range(len(texts)), error) from None
        rows += _split([encoding.ids for encoding in encodings])
    return rows


def _load(folder: Path, card: Card) -> tokenizers.Tokenizer:
    """The checkpoint's tokenizer without the padding and truncation that may be saved in its file."""
    file = JsonFile.read(folder / card.path, _FILE).data
    try:
        as_stored = card.tokenizer.bare is not None and card.tokenizer.bare.as_stored
        content = file if as_stored else read_as_class(file, card.tokenizer, card.encoder.vocab_size)
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        tokenizer.encode(_RARE)
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_of_the_binding(error):
            raise
        raise CheckpointError(f"cannot be read by tokenizers {tokenizers.__version__}: {error}.", file=_FILE) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(tokenizer: tokenizers.Tokenizer, card: Card) -> tuple[Int32Array, Int32Array, int]:
    """What the post-processor puts before and after a text, and its token type: the same for every text, or refused."""
    if card.tokenizer.bare is not None:
        return np.empty(0, np.int32), np.empty(0, np.int32), 0
    found = {_around(tokenizer, probe) for probe in ("a", "the quick brown fox")}
    if len(found) != 1:
        raise CheckpointError("does not put the same tokens around every text.", file=_FILE, key="post_processor")
    prefix, suffix, type_ids = found.pop()
    type_id = max(type_ids) if card.encoder.type_vocab_size > 1 else 0
    if card.encoder.type_vocab_size > 1 and (len(set(type_ids)) != 1 or type_id >= card.encoder.type_vocab_size):
        raise CheckpointError(f"gives one text the token types {sorted(type_ids)}.", file=_FILE, key="post_processor")
    return np.array(prefix, np.int32), np.array(suffix, np.int32), type_id


def _unknown_id(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token for what the vocabulary does not have, if there is one."""
    model: dict[str, object] = json.loads(tokenizer.to_str())["model"]
    name, number = model.get("unk_token"), model.get("unk_id")
    return tokenizer.token_to_id(name) if isinstance(name, str) else number if isinstance(number, int) else None


def _median_size(tokenizer: tokenizers.Tokenizer) -> int:
    """Characters of a token of the vocabulary."""
    return int(np.median([len(token) for token in tokenizer.get_vocab()]))


def _around(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    bare = tokenizer.encode(text, add_special_tokens=False).ids
    encoding = tokenizer.encode(text)
    full = encoding.ids
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
    if not bare or start is None:
        raise CheckpointError("does not simply put special tokens around a text.", file=_FILE, key="post_processor")
    return tuple(full[:start]), tuple(full[start + len(bare) :]), frozenset(encoding.type_ids)


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbouring texts of together at most MAX_CHARACTERS."""
    start = total = 0
    for index, size in enumerate(sizes):
        if total + size > MAX_CHARACTERS and index > start:
            yield slice(start, index)
            start, total = index, 0
        total += size
    yield slice(start, len(sizes))


def _split(lists: list[list[int]]) -> list[Int32Array]:
    """Lists of ids -> views of one flat array."""
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.fromiter(chain.from_iterable(lists), np.int32, int(sizes.sum()))
    ends: list[int] = np.cumsum(sizes).tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _starts_with(ids: Int32Array, prefix: Int32Array) -> bool:
    return np.array_equal(ids[: prefix.size], prefix)


def _ends_with(ids: Int32Array, suffix: Int32Array) -> bool:
    return np.array_equal(ids[ids.size - suffix.size :], suffix)


def _check_row(row: object, index: int) -> None:
    if not isinstance(row, np.ndarray):
        raise InvalidRequest("texts and token ids cannot be mixed in one list.", param=f"input[{index}]")
    if cast(Int64Array, row).ndim != 1 or cast(Int64Array, row).dtype.kind not in "iu":
        raise InvalidRequest("must be a text, or an array of token ids of one dimension.", param=f"input[{index}]")


def _check_texts(texts: Sequence[object]) -> list[str]:
    if set(map(type, texts)) != {str}:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequest(f"must be a string, is {type(text).__name__}.", param=f"input[{index}]")
    return cast(list[str], texts)


def _is_of_the_binding(error: BaseException) -> bool:
    """tokenizers also raises bare Exception, and its panics, whose class it does not export, are no Exception at all."""
    return isinstance(error, TypeError | ValueError) or type(error) is Exception or type(error).__name__ == "PanicException"


def _culprit(texts: Sequence[str], prompt: str, inputs: Sequence[int], error: BaseException) -> InvalidRequest:
    named = [("prompt", prompt), *((f"input[{index}]", text) for index, text in zip(inputs, texts, strict=True))]
    for param, text in named:
        try:
            text.encode()
        except UnicodeEncodeError:
            return InvalidRequest("holds a lone surrogate, which is no Unicode text.", param=param)
    return InvalidRequest(f"cannot be tokenised: {error}.", param="input")
