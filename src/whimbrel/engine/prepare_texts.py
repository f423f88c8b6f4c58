"""Texts of a request: the resolution of its prompt, limit, adapter and format, once, and the way in which they are encoded.

A request ends here. The tokenizers get texts and resolved parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from whimbrel.errors import Hint, InvalidRequest
from whimbrel.outputs.finishers import Finish
from whimbrel.outputs.merge import ReturnRows, ReturnRowsWithOffsets
from whimbrel.outputs.multi_vector import resolve_reduction
from whimbrel.outputs.requested import OutputSpec, resolve_outputs, validate_for_outputs
from whimbrel.tokenizer.chunking import encode_document, encode_fixed_chunks, encode_split
from whimbrel.tokenizer.offsets import encode_spans, encode_with_offsets
from whimbrel.tokenizer.template import TemplateTokenizer
from whimbrel.tokenizer.tokenizer import EncodeParams, Tokenizer
from whimbrel.tokenizer.validation import has_ids
from whimbrel.types.card import Card, TextFormat
from whimbrel.types.plan import Plan, max_length_for
from whimbrel.types.request import Request
from whimbrel.types.seq import Seq, Truncate

Texts: TypeAlias = Sequence[object]
"""The texts, pairs or token ids to encode: those of a request, or the distinct ones among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Tokenized texts, the outputs that are asked for, and what becomes of their rows."""

    card: Card
    specs: list[OutputSpec]
    seqs: list[Seq]
    finish: Finish
    num_cut: int | None = None
    """Number of texts that were cut; None: that of the seqs."""


class TextEncoder:
    """The tokenizers of a model's towers."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        self.card = card
        self.plan = plan
        self.tokenizers: list[Tokenizer | TemplateTokenizer] = [
            (TemplateTokenizer if tower.template else partial(Tokenizer, tower=number))(
                folder, tower, replace(plan, max_length=max_length_for(plan, card, tower))
            )
            for number, tower in enumerate(card.towers or (card,))
        ]

    def encode(self, request: Request, texts: Texts, *, splits: bool = False) -> Encoded:
        """Encode texts as a request says; long ones in parts if `splits`. Raises InvalidRequest, TooLong, TooLarge."""
        tower = self.card.tower_for(request.input_type)
        card, tokenizer = self.card.tower(tower), self.tokenizers[tower]
        specs = resolve_outputs(card, request, matryoshka=self.plan.matryoshka)
        validate_for_outputs(card, request, [spec.name for spec in specs])
        if not request.add_special_tokens and not has_ids(texts):
            _check_bare(request, tokenizer)
        splits = splits or bool(request.split_long)
        if request.late_chunking or request.chunk_tokens or splits:
            return Encoded(card, specs, *_encode_chunks(tokenizer, request, texts, specs, splits=splits))
        if isinstance(tokenizer, TemplateTokenizer):
            return Encoded(card, specs, _encode_in_template(tokenizer, request, texts), ReturnRows())
        if card.span_prompt is not None:
            _check_spans(request, texts)
            seqs, offsets = encode_spans(tokenizer, texts, request.labels, resolve_params(tokenizer, request, texts))
            return Encoded(card, specs, seqs, ReturnRowsWithOffsets(offsets))
        if request.return_offsets:
            seqs, offsets = encode_with_offsets(tokenizer, texts, resolve_params(tokenizer, request, texts))
            return Encoded(card, specs, seqs, ReturnRowsWithOffsets(offsets))
        multi_vector = next((spec for spec in specs if spec.name == "multi_vector"), None)
        reduction = None if multi_vector is None else resolve_reduction(card.outputs["multi_vector"], request, multi_vector)
        return Encoded(card, specs, encode_texts(tokenizer, request, texts), reduction or ReturnRows())

    def may_split(self, request: Request, texts: Texts) -> bool:
        """Return whether the plan runs long texts in parts: none is to be cut, and each gets one dense vector."""
        if not self.plan.split_long or request.split_long is not None or request.late_chunking or request.chunk_tokens:
            return False
        if request.truncate in ("left", "right") or request.max_tokens is not None:
            return False
        tower = self.card.tower_for(request.input_type)
        if isinstance(self.tokenizers[tower], TemplateTokenizer) or self.card.tower(tower).text_template is not None:
            return False
        has_special = request.add_special_tokens or has_ids(texts)
        return has_special and (request.outputs or (next(iter(self.card.outputs)),)) == ("dense",)


def encode_texts(tokenizer: Tokenizer, request: Request, texts: Texts) -> list[Seq]:
    """Encode texts, pairs or token ids, each as a seq. Raises InvalidRequest, TooLong, TooLarge."""
    if len(texts) == 0:
        return []
    if not request.add_special_tokens and not has_ids(texts) and tokenizer.has_format:
        raise InvalidRequest("this model's tokens around texts belong to their format.", param="add_special_tokens")
    if isinstance(texts[0], tuple):
        card, lengths = tokenizer.card, tokenizer.pair_lengths()
        if not request.add_special_tokens:
            raise InvalidRequest("special tokens stand between the two texts of a pair.", param="add_special_tokens")
        limit = lengths.limit(request.max_tokens, request.truncate or card.tokenizer.truncate)
        params = EncodeParams(limit, _prompt(card, request, ()), adapter=card.adapter(request.prompt_name, request.adapter))
        return tokenizer.encode_pairs(texts, params, only_first=bool(request.hypotheses))
    return tokenizer.encode(texts, resolve_params(tokenizer, request, texts, form=_text_format(tokenizer.card, request)))


def resolve_params(
    tokenizer: Tokenizer, request: Request, texts: Texts, *, form: TextFormat | None = None, truncate: Truncate | None = None
) -> EncodeParams:
    """Resolve how texts or token ids are encoded in a format. `truncate` replaces the request's. Raises InvalidRequest."""
    card, prompt = tokenizer.card, _prompt(tokenizer.card, request, texts)
    limit = tokenizer.lengths(form).limit(request.max_tokens, truncate or request.truncate or card.tokenizer.truncate)
    adapter, is_query = card.adapter(request.prompt_name, request.adapter), request.input_type == "query"
    params = EncodeParams(limit, adapter=adapter, special=request.add_special_tokens, form=form, is_query=is_query)
    if has_ids(texts):
        return params
    if card.text_template is not None:
        return replace(params, frame=tokenizer.frame(prompt))
    num_inserted = 0 if form is None else form.num_inserted
    return replace(
        params,
        limit=replace(limit, max_length=limit.max_length - num_inserted, num_inserted=num_inserted),
        prompt=prompt,
        prompt_tokens=tokenizer.prompt_tokens(prompt, special=request.add_special_tokens),
    )


def resolve_instruction(card: Card, request: Request) -> str | None:
    """Return the instruction, which may also be a prompt, by name or as text, as in Sentence Transformers."""
    values = [request.instruction, request.prompt, request.prompt_name]
    if sum(value is not None for value in values) > 1:
        raise InvalidRequest("an instruction and a prompt are the same to this model; send one.", param="instruction")
    if request.instruction is not None:
        return request.instruction
    if request.prompt is not None:
        return request.prompt or None
    name = card.default_prompt_name if request.prompt_name is None else request.prompt_name
    return None if name is None else card.prompt_text(name) or None


def _encode_in_template(tokenizer: TemplateTokenizer, request: Request, texts: Texts) -> list[Seq]:
    """Encode pairs in a template. Token ids are whole prompts."""
    if len(texts) == 0 or has_ids(texts):
        if len(texts) and request.instruction is not None:
            raise InvalidRequest("an instruction cannot be put around token ids; send pairs.", param="instruction")
        return encode_texts(tokenizer.of_ids, request, texts)
    card = tokenizer.of_ids.card
    limit = tokenizer.lengths.limit(request.max_tokens, request.truncate or card.tokenizer.truncate)
    return tokenizer.encode_pairs(texts, resolve_instruction(card, request), limit, card.adapter(None, request.adapter))


def _encode_chunks(
    tokenizer: Tokenizer | TemplateTokenizer, request: Request, texts: Texts, specs: Sequence[OutputSpec], *, splits: bool
) -> tuple[list[Seq], Finish]:
    """Encode texts in chunks: those of one document for late chunking, or those of each long text."""
    asked = {"late_chunking": request.late_chunking, "chunk_tokens": request.chunk_tokens, "split_long": splits}
    param, *others = (name for name, value in asked.items() if value)
    if others:
        raise InvalidRequest(f"cannot go with {others[0]}.", param=param)
    if [spec.name for spec in specs] != ["dense"] or isinstance(tokenizer, TemplateTokenizer):
        raise InvalidRequest("is for dense vectors alone.", param=param)
    card = tokenizer.card
    if card.text_template is not None:
        raise InvalidRequest("is not for a model that puts every text into a chat template.", param=param)
    if not splits and set(card.dense.modes) != {"mean"}:
        raise InvalidRequest(f"is for models that pool by the mean; this one by {', '.join(card.dense.modes)}.", param=param)
    if len(texts) == 0 and request.chunk_tokens is None:
        return [], ReturnRows()
    params = resolve_params(tokenizer, request, texts, truncate=None if request.late_chunking else "never")
    if splits:
        return encode_split(tokenizer, texts, params, normalized=specs[0].activated)
    if request.chunk_tokens is not None:
        seqs, offsets = encode_fixed_chunks(tokenizer, texts, params, request.chunk_tokens)
        return seqs, ReturnRowsWithOffsets(offsets)
    return encode_document(tokenizer, texts, params), ReturnRows()


def _prompt(card: Card, request: Request, texts: Texts) -> str:
    """Return the text that stands before each text, or before the first of each pair."""
    if has_ids(texts):
        if request.prompt is not None or request.prompt_name is not None:
            raise InvalidRequest("a prompt cannot be put before token ids; send text.", param="prompt")
        return ""
    if request.prompt is not None:
        return request.prompt
    name = card.prompt_for(request.input_type) if request.prompt_name is None else request.prompt_name
    return "" if name is None else card.prompt_text(name)


def _text_format(card: Card, request: Request) -> TextFormat | None:
    if card.text_formats and request.input_type not in card.text_formats:
        raise InvalidRequest("this model treats queries and documents differently", param="input_type", hint=Hint.INPUT_TYPE)
    return None if request.input_type is None else card.text_formats.get(request.input_type)


def _check_bare(request: Request, tokenizer: Tokenizer | TemplateTokenizer) -> None:
    """Raise InvalidRequest if texts cannot go without their special tokens."""
    if isinstance(tokenizer, TemplateTokenizer):
        raise InvalidRequest("this model's tokens around texts belong to its template.", param="add_special_tokens")
    if request.late_chunking or request.chunk_tokens or request.split_long or request.return_offsets:
        raise InvalidRequest("cannot go with late chunking, split_long or offsets.", param="add_special_tokens")


def _check_spans(request: Request, texts: Texts) -> None:
    """Raise InvalidRequest if a request has fields that a model which finds the entities of labels does not take."""
    if has_ids(texts):
        raise InvalidRequest("this model takes texts, not token ids.", item=0)
    if request.prompt is not None or request.prompt_name is not None:
        raise InvalidRequest("this model's prompt is made of the labels.", param="prompt")
    if not request.add_special_tokens:
        raise InvalidRequest("this model's tokens around texts belong to their format.", param="add_special_tokens")
    if request.truncate == "left":
        raise InvalidRequest("this model keeps the first words of a text; it takes right and never.", param="truncate")
