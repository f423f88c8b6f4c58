"""The card: what a checkpoint says about itself, and nothing that it does not. `card_reader` makes it from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from whimbrel.errors import InvalidRequest
from whimbrel.types.heads import Activation, Head, MlmHead, OutputActivation
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import InputType, OutputName, Similarity
from whimbrel.types.template import Template

PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: Final[tuple[PoolingMode, ...]] = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PoolingOption: TypeAlias = PoolingMode | Literal["splade", "math-shepherd"]
"""What a user may say of a checkpoint that does not say it: how tokens are pooled, or that its language-modelling head makes
weights of vocabulary entries, or rewards of steps."""
POOLING_OPTIONS: Final[tuple[PoolingOption, ...]] = (*POOLING_MODES, "splade", "math-shepherd")


RerankerName: TypeAlias = Literal["qwen3", "mxbai-v2", "bge-gemma", "nemotron", "zerank"]
RERANKERS: Final[tuple[RerankerName, ...]] = ("qwen3", "mxbai-v2", "bge-gemma", "nemotron", "zerank")
"""Conventions of rerankers, which their files do not name: see card_rerankers."""

NormKind: TypeAlias = Literal["layer", "rms", "rms_plus_one"]
"""LayerNorm; RMSNorm; RMSNorm whose weights are stored less one, as Gemma's."""
Positions: TypeAlias = Literal["learned", "rotary", "relative", "alibi"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions: pairs of a head's columns are turned by position * frequency."""

    theta: float
    width: int
    """Columns of each head that are turned, the first ones."""
    interleaved: bool = False
    """Whether a pair are neighbours, or lie half a width apart."""
    scaling: Mapping[str, Any] | None = None
    """How frequencies are changed for longer texts: "rope_type" and its parameters, as in config.json."""


@dataclass(frozen=True, slots=True)
class Layer:
    """In what one layer may differ from the next."""

    window: int | None = None
    """How far a token sees: so many tokens before it, and unless the model is causal as many after. None: all."""
    rotary: Rotary | None = None
    num_experts: int = 0
    """MLPs among which each token has a choice; 0: there is one, for all."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """A transformer that turns tokens into hidden states, as config.json describes it. Bidirectional or causal."""

    family: str
    """Whose names the weights have: a row of models/families.py. "hf": transformers runs it and reads config.json itself, and
    of what follows only sizes of the tables, positions, padding and width are said here."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    num_heads: int
    max_positions: int
    """Tokens that a text may have."""
    norm_eps: float
    activation: Activation
    num_kv_heads: int = 0
    """Heads of keys and values, each shared by as many heads of queries; 0: as many as those."""
    head_width: int = 0
    """0: hidden_size / num_heads."""
    embedding_size: int = 0
    """Width of the tables, if it is not hidden_size: then a linear layer lies between."""
    embedding_scale: float = 1.0
    positions: Positions = "learned"
    num_buckets: int = 0
    """Of relative positions."""
    position_offset: int = 0
    """Row of the position table for the first token: 0, or pad id + 1 in the RoBERTa family."""
    pad_id: int = 0
    type_vocab_size: int = 0
    """0: no token types."""
    causal: bool = False
    norm: NormKind = "layer"
    norm_bias: bool = True
    gated: bool = False
    """activation(gate) * up, or activation(up)."""
    experts_per_token: int = 0
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    score_scale: float | None = None
    """What queries times keys are multiplied by; None: 1 / sqrt(head width)."""
    idf: str | None = None
    """Of a table: the JSON file of a weight for each token, where there is no tensor."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""
    adapters: tuple[str, ...] = ()
    """Names of low-rank additions to the weights, one of which a text may ask for: weight + adapter_scale * B @ A."""
    adapter_rank: int = 0
    """Rows of A."""
    adapter_scale: float = 0.0
    adapter_paths: tuple[str, ...] = ()
    """The folder of each adapter; none: all lie among the weights."""

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        fill(self, "head_width", self.head_width or self.hidden_size // self.num_heads)
        fill(self, "embedding_size", self.embedding_size or self.hidden_size)


@dataclass(frozen=True, slots=True)
class Output:
    """One of the things that a model gives, as it comes from hidden states.

    Tokens go through `token_head`; then they are pooled, unless each gives a row of its own; rows go through `head`; they are
    cut to the width asked for, and finished.
    """

    width: int
    """Columns of a row."""
    default_width: int = 0
    """So many are kept, the first ones, where a request does not say; 0: all."""
    rows: Literal["text", "token", "entry", "vocabulary"] = "text"
    """A row for each text; for each token; for each entry of the vocabulary that the text has, the largest of its tokens; or
    one over the vocabulary for each text, of which what is not 0 is given."""
    modes: tuple[PoolingMode, ...] = ()
    """How the tokens of a text become one row: modes are concatenated in this order."""
    include_prompt: bool = True
    token_head: tuple[Head, ...] = ()
    vocabulary: MlmHead | None = None
    """What makes one row over the vocabulary of a text's tokens, in place of `modes`."""
    head: tuple[Head, ...] = ()
    max_entries: int = 0
    """So many entries a text keeps, the largest; 0: all."""
    activation: OutputActivation = "identity"
    activated: bool = True
    """Whether rows are finished where a request does not say."""
    skip_ids: tuple[int, ...] = ()
    """Tokens that give no row,"""
    skip_in_queries: bool = True
    """in queries too."""
    skip_first: int = 0
    """So many leading tokens give no row, whatever they are."""
    keep_ids: tuple[int, ...] = ()
    """If any are named, no other tokens give a row: the tags at the end of each step of a solution."""
    similarity: Similarity | None = None
    """How pairs are compared by it, where the card says nothing else; None: in the usual way."""
    token_pooling: TokenPooling | None = None
    """How the vectors of a document's tokens become fewer; None: they do not."""
    padding_id: int | None = None
    """Tokens of this id at the end of a text do not count, padding or not; a text of nothing else ends with its first token.
    So transformers finds the last token that a decoder's classes come from."""

    @property
    def heads(self) -> tuple[Head, ...]:
        """All of them."""
        return (*self.token_head, *([self.vocabulary] if self.vocabulary else []), *self.head)


@dataclass(frozen=True, slots=True)
class Instruction:
    """How an instruction within a text is known; `instruction` finds it."""

    opening: str
    """What the text begins with, if it has one that is not empty; the instruction and a new line come next."""
    closing: str
    """What comes next, or first."""


TokenizerClass: TypeAlias = Literal[
    "tokenizer.json",
    "AlbertTokenizer",
    "BertTokenizer",
    "CamembertTokenizer",
    "GPT2Tokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
    "MPNetTokenizer",
    "Qwen2Tokenizer",
    "RobertaTokenizer",
    "XLMRobertaTokenizer",
]
AddedToken: TypeAlias = Mapping[str, Any]
"""A token with its flags, as tokenizer.json lists them: content, single_word, lstrip, rstrip, normalized, special, maybe id."""


@dataclass(frozen=True, slots=True)
class StaticTokenizer:
    """Texts have no special tokens around them, and may have no tokens at all."""

    empty_id: int
    """Stands for a text without any; callers cannot send it."""
    as_stored: bool = True
    """tokenizer.json is used as it is, and not as the checkpoint's tokenizer class makes it."""
    drop_unknown: bool = False
    """Tokens that the vocabulary does not have are left out."""
    cut_characters: bool = False
    """A text that may be cut is first cut to as many characters as its limit of tokens has at their median length."""


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """What the tokenizer's files say beyond tokenizer.json itself; `tokenizer_file` puts it together."""

    tokenizer_class: TokenizerClass
    """Who builds the tokenizer: one of transformers' classes, or the file alone."""
    truncate: Literal["right", "left"]
    lowercase: bool
    """Sentence Transformers' do_lower_case: before anything else."""
    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool
    add_prefix_space: bool | None
    legacy: bool
    """LlamaTokenizer's: a space before every piece of a text that special tokens cut, not before the first alone."""
    ends: bool
    """The eos token comes after every text, whatever tokenizer.json says."""
    special_tokens: Mapping[str, AddedToken | None]
    """Role ("cls", "sep", ..., or a name of the model's own) -> token, or None where null is stated."""
    extra_tokens: tuple[AddedToken, ...] | None
    """More special tokens, without a role; None: it does not say."""
    second_type: bool
    """Whether the tokens of a pair's second text have a type of their own, if there are types."""
    legacy_tokens: tuple[str, ...]
    """What added_tokens.json names, in checkpoints whose tokenizer_config.json does not list its added tokens."""
    added_tokens: tuple[AddedToken, ...] | None
    """What tokenizer_config.json adds, with ids and flags; None: it does not say."""
    static: StaticTokenizer | None = None
    """Of models that are mere tables."""


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Tokens that a short query is filled up with. Each gives a vector, and attends to what the query has itself."""

    token_id: int
    length: int
    """Tokens of a query that has been filled up."""
    attended: bool
    """Whether they are attended to as well."""
    stands_for: int | None = None
    """This token of a query becomes such a token too."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How texts of one input type become tokens, where queries and documents do so in ways of their own."""

    max_length: int
    """Tokens, all that is put around a text included; a request may set another limit."""
    marker_id: int | None = None
    """This token comes after the first one."""
    expansion: QueryExpansion | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """Everything the checkpoint says that changes a vector."""

    name: str
    path: str
    """Where config.json, tokenizer and weights lie in the checkpoint's folder: "", or in old layouts "0_Transformer"."""
    encoder: Encoder
    outputs: Mapping[OutputName, Output]
    """What the model gives; first what it is made for."""
    max_length: int
    """Tokens per text, special tokens included."""
    tokenizer: TokenizerCard
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt_name: str | None = None
    default_adapter: str | None = None
    """That of texts for which none is named."""
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    """The names of the columns of `scores` and `token_scores`, of a checkpoint with classes."""
    similarity: str | None = None
    text_formats: Mapping[InputType, TextFormat] = field(default_factory=dict[InputType, TextFormat])
    """Of models that treat queries and documents differently: then every request says which its texts are."""
    template: Template | None = None
    """Into what a pair is put; None: pairs are pairs."""
    instruction: Instruction | None = None
    """Texts may hold an instruction, and outputs with include_prompt=False are made of what comes after it."""
    towers: tuple[Card, ...] = ()
    """Of a model that runs queries and documents in different ways: a card for each. This one is then that for texts of which
    nothing is said."""
    tower_of: Mapping[InputType | None, int] = field(default_factory=dict["InputType | None", int])
    token_outputs: Mapping[OutputName, Output] = field(init=False)
    """What a model with dense vectors gives too, where it is asked for: see `_of_tokens`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_outputs", _of_tokens(self.outputs, self.encoder))

    @property
    def all_outputs(self) -> Mapping[OutputName, Output]:
        """Everything that may be asked for."""
        return {**self.outputs, **self.token_outputs}

    def tower_for(self, input_type: InputType | None) -> int:
        """The number of the tower for such texts. Raises InvalidRequest if there is none."""
        if not self.towers or input_type in self.tower_of:
            return self.tower_of.get(input_type, 0)
        ways = ", ".join(repr(way) for way in self.tower_of if way is not None)
        raise InvalidRequest(f"this model runs texts in different ways; say which, of: {ways}.", param="input_type")

    def tower(self, number: int) -> Card:
        """The card of one of the towers."""
        return self.towers[number] if self.towers else self

    @property
    def dense(self) -> Output:
        """The output of that name. Raises InvalidRequest if the model has none."""
        return self.output("dense")

    def output(self, name: OutputName) -> Output:
        """One of the outputs. Raises InvalidRequest with the names there are."""
        outputs = self.all_outputs
        if name not in outputs:
            raise InvalidRequest(f"this model gives no {name!r}; it gives: {', '.join(outputs)}.", param="outputs")
        return outputs[name]

    def prompt_for(self, input_type: InputType | None) -> str | None:
        """The name of the prompt for such texts, by the conventions of Sentence Transformers; else of the default prompt."""
        names = {"query": ("query",), "document": ("document", "passage", "corpus"), None: ()}[input_type]
        return next((name for name in names if name in self.prompts), self.default_prompt_name)

    def adapter(self, prompt_name: str | None) -> int:
        """Number of the adapter for a request: that which the prompt asked for is called after, else the default; -1: none.

        A default prompt chooses no adapter: Sentence Transformers then puts the text before the input and nothing else.
        """
        name = prompt_name if prompt_name in self.encoder.adapters else self.default_adapter
        return -1 if name is None else self.encoder.adapters.index(name)

    def prompt_text(self, name: str) -> str:
        """The text of the prompt called `name`. Raises InvalidRequest with the names there are."""
        if name in self.prompts:
            return self.prompts[name]
        names = ", ".join(sorted(self.prompts)) if self.prompts else "none"
        raise InvalidRequest(f"no prompt {name!r}; this model's prompts: {names}.", param="prompt_name")


def _of_tokens(outputs: Mapping[OutputName, Output], encoder: Encoder) -> dict[OutputName, Output]:
    """Rows of every token of a text, also of special ones and of prompts, which nothing pools: hidden states as the last layer
    leaves them, and what those become by all that makes a dense vector but the pooling.

    Tokens have no vectors of the latter kind where several poolings are concatenated: layers after them are as wide as all.
    """
    dense = outputs.get("dense")
    if dense is None:
        return {}
    found: dict[OutputName, Output] = {
        "hidden": Output(encoder.hidden_size, rows="token", activation="normalize", activated=False)
    }
    if len(dense.modes) == 1:
        found["token_dense"] = replace(dense, rows="token", modes=(), include_prompt=True)
    return found
