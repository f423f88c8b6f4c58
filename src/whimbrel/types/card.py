"""Model card: everything a checkpoint states that affects its outputs.

Plain data; `checkpoint/reader.py` reads it from the checkpoint's files. Not the README that the Hub calls a model card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from whimbrel.errors import InvalidRequest
from whimbrel.types.choices import PoolingMode, TokenizerReading
from whimbrel.types.heads import Activation, Dense, Head, MlmHead, OutputActivation, SpanHead
from whimbrel.types.late_interaction import StatedPooling
from whimbrel.types.request import InputType, OutputName, Similarity
from whimbrel.types.template import ListTemplate, Template, TextTemplate

FALLBACK: Final = "hf"
"""Family of an Encoder that transformers runs."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding: rotates pairs of a head's columns by position * frequency."""

    theta: float
    width: int
    interleaved: bool = False
    """Pair adjacent columns instead of columns half a width apart."""
    scaling: Mapping[str, Any] | None = None
    """Scaling of the frequencies for longer texts: "rope_type" and its parameters, as in config.json."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings that may differ between layers."""

    window: int | None = None
    """Attention window: tokens before each token, and unless causal as many after it. None: all tokens."""
    rotary: Rotary | None = None
    num_experts: int = 0
    conv_width: int = 0
    """Taps of a short convolution in place of attention; 0: attention."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (DeepSeek V3): keys and values are made of one narrow row per token, and so may be queries."""

    query_rank: int
    """Columns of the row that queries are made of; 0: the hidden state."""
    key_rank: int
    plain_width: int
    """Columns of a query or key head before the rotated ones."""
    rotary_width: int
    """Rotated columns, which all key heads share."""
    value_width: int

    @property
    def width(self) -> int:
        return self.plain_width + self.rotary_width


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of gated experts by sigmoids (DeepSeek V3, LFM2). A correction is added for the choice alone."""

    intermediate_size: int
    """Inner width of an expert."""
    shared_size: int
    """Inner width of the MLP that all tokens pass; 0: there is none."""
    num_groups: int
    top_groups: int
    """Number of groups, by the sum of their best two experts, of which experts are chosen."""
    normalized: bool
    """Divide the weights of the chosen experts by their sum."""
    scale: float
    corrected: bool = True
    eps: float = 1e-20
    """Added to that sum."""


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Attention that scores relative positions against contents (DeBERTa), with a table of positions that layers share."""

    of_keys: bool
    """Queries meet the positions of keys."""
    of_queries: bool
    """Keys meet the positions of queries."""
    max_distance: int
    """Distance from which on positions are the same."""
    num_buckets: int = 0
    """Positions on each side, half of them logarithmic; 0: one for each distance up to `max_distance`."""
    shared: bool = False
    """Positions pass the linear layers of keys and queries, not their own."""
    normed: bool = False
    """Positions pass a norm first."""

    @property
    def span(self) -> int:
        """Rows of the table on each side of distance 0, which has the first row of the second half."""
        return self.num_buckets or self.max_distance


@dataclass(frozen=True, slots=True)
class NeighbourLayer:
    """Convolution over the embeddings of neighbouring tokens, added to the first layer's result before a norm."""

    width: int
    """Number of tokens, the middle one of which is the token itself."""
    activation: Activation


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """LoRA adapter that a user adds to a model, in a folder as PEFT saves it: weight + alpha / rank * B @ A."""

    name: str
    folder: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ranks of some modules, by patterns of the ends of their names."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    by_root: bool = False
    """Divide alpha by the square root of the rank (rsLoRA)."""
    other_base: str = ""
    """Hub id of the model that the adapter was made for, if it has another name than this one."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Transformer as config.json describes it: tokens in, hidden states out. Bidirectional or causal."""

    family: str
    """Key of `model/families.py`, which names the weights. "hf": transformers runs the model and reads config.json itself, and
    only table sizes, positions, padding and width are set below."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    num_heads: int
    max_positions: int
    """Limit in tokens per text."""
    norm_eps: float
    activation: Activation
    num_kv_heads: int = 0
    """Number of key and value heads (grouped-query attention); 0: `num_heads`."""
    head_width: int = 0
    """Columns of a head; 0: hidden_size / num_heads."""
    embedding_size: int = 0
    """Columns of the embedding tables; if not hidden_size, a linear layer follows. 0: hidden_size."""
    embedding_scale: float = 1.0
    positions: Literal["learned", "rotary", "relative", "alibi"] = "learned"
    num_buckets: int = 0
    """Buckets of distances, for learned biases by relative positions."""
    max_distance: int = 0
    """Distance from which on all are in the last bucket of their direction."""
    disentangled: Disentangled | None = None
    """None: scores depend on contents, and at most on a bias."""
    neighbours: NeighbourLayer | None = None
    position_offset: int = 0
    """Row of the position table of the first token: 0, or pad id + 1 in the RoBERTa family."""
    pad_id: int = 0
    type_vocab_size: int = 0
    causal: bool = False
    norm: Literal["layer", "rms", "rms_plus_one"] = "layer"
    """LayerNorm, RMSNorm, or RMSNorm whose weights are stored minus one, as in Gemma."""
    norm_bias: bool = True
    gated: bool = False
    """Gated MLP: activation(gate) * up instead of activation(up)."""
    experts_per_token: int = 0
    routing: Routing | None = None
    """None: experts as in Nomic's mixture."""
    latent: Latent | None = None
    """None: queries, keys and values are linear functions of the hidden state."""
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    conv_bias: bool = False
    """Biases of short convolutions and of the linear layers around them."""
    score_scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head width)."""
    idf: str | None = None
    """JSON file with a weight per token, for static models without a tensor of weights."""
    softcap: float | None = None
    """Cap of the attention scores: softcap * tanh(scores / softcap)."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters, of which a text may use one: weight + adapter_scale * B @ A."""
    adapter_rank: int = 0
    adapter_scale: float = 0.0
    adapter_paths: tuple[str, ...] = ()
    """Folder of each adapter; empty: the adapters are among the model's weights."""
    lora: tuple[LoraAdapter, ...] = ()
    """Adapters that the user adds, in place of the checkpoint's own; `adapter_rank` is their highest rank."""

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        fill(self, "head_width", self.head_width or self.hidden_size // self.num_heads)
        fill(self, "embedding_size", self.embedding_size or self.hidden_size)

    @property
    def keeps_keys(self) -> bool:
        """True if a text can run in parts, of which each attends to the kept keys and values of those before it."""
        return self.causal and bool(self.layers) and not any(layer.conv_width for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a model, computed from hidden states.

    Tokens pass through `token_head` and are pooled, unless each token has its own row. Rows pass through `head`, are cut to
    the requested width, and the activation is applied.
    """

    width: int
    default_width: int = 0
    """Number of leading columns that a request gets by default; 0: all."""
    rows: Literal["none", "text", "token", "entry", "vocabulary", "span"] = "text"
    """Rows of a text: one; one per token; one per vocabulary entry in the text, the largest of its tokens; one over the
    whole vocabulary; or one per span of words and label. Of the vocabulary the nonzero entries are returned. "none": the
    scores of a list are computed from the vectors of its texts."""
    modes: tuple[PoolingMode, ...] = ()
    """Pooling modes, whose results are concatenated in this order."""
    include_prompt: bool = True
    token_head: tuple[Head, ...] = ()
    vocabulary: MlmHead | None = None
    """Head that pools tokens to one row over the vocabulary; replaces `modes`."""
    spans: SpanHead | None = None
    """Head that scores spans; replaces `modes`."""
    head: tuple[Head, ...] = ()
    max_entries: int = 0
    """Number of the largest entries that a text keeps; 0: all."""
    activation: OutputActivation = "identity"
    activated: bool = True
    skip_ids: tuple[int, ...] = ()
    query_skip_ids: tuple[int, ...] | None = None
    """Those of queries; None: `skip_ids`."""
    frame_ids: tuple[int, ...] = ()
    """Token ids without a row where a text begins or ends with one."""
    skip_first: int = 0
    """Number of leading tokens without a row."""
    keep_ids: tuple[int, ...] = ()
    """Token ids that have a row, e.g. the tags at the end of each step of a solution; empty: all."""
    keep_in_queries: bool = True
    similarity: Similarity | None = None
    """Similarity of pairs by this output, unless the card states another; None: the usual one."""
    token_pooling: Mapping[InputType, StatedPooling] = field(default_factory=dict[InputType, StatedPooling])
    """Default pooling of token vectors, by input type."""
    padding_id: int | None = None
    """Id of trailing tokens that are no last token, unless every token has it, as in transformers' decoder classifiers."""

    @property
    def heads(self) -> tuple[Head, ...]:
        return (*self.token_head, *filter(None, (self.vocabulary, self.spans)), *self.head)


@dataclass(frozen=True, slots=True)
class Instruction:
    """Markers of an instruction within a text; `tokenizer/text_rules.py` finds it."""

    opening: str
    """Start of a text with an instruction that is not empty; the instruction and a new line follow."""
    closing: str
    """Text after the instruction, or at the start of a text without one."""


TokenizerClass: TypeAlias = Literal[
    "tokenizer.json", "AlbertTokenizer", "BertTokenizer", "CamembertTokenizer", "DebertaV2Tokenizer", "GPT2Tokenizer",
    "GemmaTokenizer", "LlamaTokenizer", "MPNetTokenizer", "Qwen2Tokenizer", "RobertaTokenizer", "T5Tokenizer",
    "XLMRobertaTokenizer",
]  # fmt: skip
AddedToken: TypeAlias = Mapping[str, Any]
"""Token with its flags as in tokenizer.json: content, single_word, lstrip, rstrip, normalized, special, optionally id."""


@dataclass(frozen=True, slots=True)
class StaticTokenizer:
    """Tokenizer of static embeddings: adds no special tokens; a text may have no tokens."""

    empty_id: int
    """Token id of a text without tokens; callers cannot send it."""
    as_stored: bool = True
    """Use tokenizer.json as it is instead of the checkpoint's tokenizer class."""
    drop_unknown: bool = False
    """Leave out tokens that are not in the vocabulary."""
    cut_characters: bool = False
    """Truncate texts to characters first: the limit in tokens times the median token length."""


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """Tokenizer settings besides tokenizer.json; `checkpoint/tokenizer/classes.py` combines the two."""

    tokenizer_class: TokenizerClass
    """transformers' class that builds the tokenizer, or "tokenizer.json" for the file as it is."""
    truncate: Literal["right", "left"] = "right"
    lowercase: bool = False
    """Sentence Transformers' do_lower_case, applied first."""
    do_lower_case: bool = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True
    add_prefix_space: bool | None = None
    legacy: bool = False
    """LlamaTokenizer's `legacy`: prefix every piece between special tokens with a space, not only the first."""
    split_by_punct: bool = False
    """DebertaV2Tokenizer's `split_by_punct`: each punctuation mark is a piece of its own."""
    ends: bool = False
    """Append the eos token to every text, regardless of tokenizer.json."""
    special_tokens: Mapping[str, AddedToken | None] = field(default_factory=dict[str, AddedToken | None])
    """Role ("cls", "sep", ..., or a custom name) -> token, or None if the file says null."""
    extra_tokens: tuple[AddedToken, ...] | None = None
    """Special tokens without a role; None: not stated."""
    second_type: bool = False
    """Give the second text of a pair its own token type, if there are types."""
    legacy_tokens: tuple[str, ...] = ()
    """Tokens of added_tokens.json, for checkpoints whose tokenizer_config.json does not list them."""
    added_tokens: tuple[AddedToken, ...] | None = None
    """Added tokens of tokenizer_config.json, with ids and flags; None: not stated."""
    static: StaticTokenizer | None = None
    """Settings of static embeddings; None: a transformer."""
    pools_one_token: bool = False
    """Pool prompts of one token, although others are left out (INSTRUCTOR)."""
    reading: TokenizerReading = "transformers"
    flags: tuple[bool, bool] | None = None
    """`add_bos_token` and `add_eos_token`, for a class whose special tokens transformers 4 makes from them."""
    reason: str = ""
    """Reason for a reading that neither the user chose nor is the default one."""


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Expansion tokens that fill up a short query. Each has a vector and attends to the query's own tokens."""

    token_id: int
    length: int
    """Number of tokens of an expanded query."""
    attended: bool
    """Attend to expansion tokens too."""
    stands_for: int | None = None
    """Token id of a query that is replaced by the expansion token; None: none."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Tokenization of texts of one input type, for models that tokenize queries and documents differently."""

    max_length: int
    """Limit in tokens, added tokens included; a request may set another limit."""
    marker_id: int | None = None
    """Token id inserted after the first token; None: none."""
    expansion: QueryExpansion | None = None

    @property
    def num_inserted(self) -> int:
        return 0 if self.marker_id is None else 1

    @property
    def has_fixed_length(self) -> bool:
        """True if short texts are filled up to the limit, so that all have the same length."""
        return self.expansion is not None and self.expansion.length == self.max_length


@dataclass(frozen=True, slots=True)
class SpanPrompt:
    """Prompt before the words of a text whose spans are scored: each label after a token of its own, then one token."""

    label_token: str
    label_id: int
    end_token: str
    max_words: int
    """Words that a text keeps."""


@dataclass(frozen=True, slots=True)
class Card:
    """Everything the checkpoint states that affects an output."""

    name: str
    path: str
    """Subfolder of config.json, tokenizer and weights: "", or in old layouts "0_Transformer"."""
    encoder: Encoder
    outputs: Mapping[OutputName, Output]
    """Outputs of the model, the main one first."""
    max_length: int
    """Limit in tokens per text, special tokens included."""
    tokenizer: TokenizerCard
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt_name: str | None = None
    default_adapter: str | None = None
    """Adapter of texts for which none is named."""
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    """Names of the classes: the columns of `scores` and `token_scores`."""
    entailment: int | None = None
    """Index of the label that means entailment, of a model for natural language inference; None: the model is none."""
    similarity: str | None = None
    text_formats: Mapping[InputType, TextFormat] = field(default_factory=dict[InputType, TextFormat])
    """Formats by input type, for models that tokenize these differently; `input_type` is then required."""
    template: Template | None = None
    """Template of a pair; None: the tokenizer's pairs."""
    list_template: ListTemplate | None = None
    """Template of a query with all its documents, of a listwise reranker; None: the model judges no lists."""
    span_prompt: SpanPrompt | None = None
    """Prompt with the labels of a request, of a model that finds entities of any label; None: labels are the model's."""
    text_template: TextTemplate | None = None
    """Chat template of each text; None: texts are tokenised as they are."""
    instruction: Instruction | None = None
    """Markers of an instruction within a text, which outputs with include_prompt=False leave out."""
    towers: tuple[Card, ...] = ()
    """Cards of a model with one encoder (tower) per input type. This card is that of texts without an input type."""
    tower_of: Mapping[InputType | None, int] = field(default_factory=dict["InputType | None", int])
    all_outputs: Mapping[OutputName, Output] = field(init=False)
    """`outputs`, and the per-token outputs that a model computes on request; see `_token_outputs`."""

    def __post_init__(self) -> None:
        token_outputs = _token_outputs(self.outputs, self.encoder.hidden_size)
        object.__setattr__(self, "all_outputs", {**self.outputs, **token_outputs})

    @property
    def judges_pairs(self) -> bool:
        """True if the scores are a reranker's: those of pairs, not classes of texts."""
        return "scores" in self.outputs and bool(self.template or self.list_template or len(self.labels) <= 1)

    def tower_for(self, input_type: InputType | None) -> int:
        """Return the index of the tower for an input type. Raises InvalidRequest if there is none."""
        if not self.towers or input_type in self.tower_of:
            return self.tower_of.get(input_type, 0)
        names = ", ".join(repr(name) for name in self.tower_of if name is not None)
        raise InvalidRequest(f"this model runs texts in different ways; say which, of: {names}.", param="input_type")

    def tower(self, number: int) -> Card:
        return self.towers[number] if self.towers else self

    @property
    def dense(self) -> Output:
        """Output of dense vectors. Raises InvalidRequest if the model has none."""
        return self.output("dense")

    def output(self, name: OutputName) -> Output:
        if name not in self.all_outputs:
            raise InvalidRequest(f"this model gives no {name!r}; it gives: {', '.join(self.all_outputs)}.", param="outputs")
        return self.all_outputs[name]

    def prompt_for(self, input_type: InputType | None) -> str | None:
        """Return the name of the prompt for an input type by Sentence Transformers' conventions, else of the default prompt."""
        names = {"query": ("query",), "document": ("document", "passage", "corpus"), None: ()}[input_type]
        return next((name for name in names if name in self.prompts), self.default_prompt_name)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Adapters of the checkpoint that no prompt chooses, as those of jina-embeddings-v5."""
        return () if self.encoder.lora else tuple(name for name in self.encoder.adapters if name not in self.prompts)

    def adapter(self, prompt_name: str | None, requested: str | None = None) -> int:
        """Return the index of the adapter for a request: the `requested` one, else the one of the prompt; -1: none.

        The checkpoint's own adapters may be named like prompts, and one may be the default. A default prompt selects no
        adapter, as in Sentence Transformers. Raises InvalidRequest for an adapter that the model does not have.
        """
        if requested is not None and requested not in self.encoder.adapters:
            names = ", ".join(self.encoder.adapters) or "none"
            raise InvalidRequest(f"no adapter {requested[:100]!r}; this model's adapters: {names}.", param="adapter")
        own = () if self.encoder.lora else self.encoder.adapters
        name = requested or (prompt_name if prompt_name in own else self.default_adapter)
        return -1 if name is None else self.encoder.adapters.index(name)

    def prompt_text(self, name: str) -> str:
        """Return the text of the prompt called `name`. Raises InvalidRequest with the known names."""
        if name in self.prompts:
            return self.prompts[name]
        names = ", ".join(sorted(self.prompts)) if self.prompts else "none"
        raise InvalidRequest(f"no prompt {name!r}; this model's prompts: {names}.", param="prompt_name")


def _token_outputs(outputs: Mapping[OutputName, Output], hidden_size: int) -> dict[OutputName, Output]:
    """Return outputs with a row for every token, also of special tokens and prompts, without pooling.

    `hidden` is the output of the last layer; `token_dense` has also passed the heads of the dense vector. The latter does not
    exist if several pooling modes are concatenated, because the heads then expect that width. `token_scores` are those of the
    classifier for each token, or the weight that each token of the text itself has in a sparse vector (vLLM).
    """
    token_outputs: dict[OutputName, Output] = {}
    if (dense := outputs.get("dense")) is not None:
        token_outputs["hidden"] = Output(hidden_size, rows="token", activation="normalize", activated=False)
        if len(dense.modes) == 1:
            token_outputs["token_dense"] = replace(dense, rows="token", modes=(), include_prompt=True)
    if "token_scores" not in outputs and (of_tokens := _token_scores(outputs, hidden_size)) is not None:
        token_outputs["token_scores"] = of_tokens
    return token_outputs


def _token_scores(outputs: Mapping[OutputName, Output], hidden_size: int) -> Output | None:
    if (scores := outputs.get("scores")) is not None:
        layers = [layer for layer in scores.head if isinstance(layer, Dense) and layer.name.startswith(("classifier", "score"))]
        if not layers or layers[0].in_features != hidden_size or layers[-1] is not scores.head[-1]:
            return None
        first = scores.head.index(layers[0])  # layers before it belong to the pooling
        return replace(scores, rows="token", modes=(), include_prompt=True, head=scores.head[first:], padding_id=None)
    sparse = outputs.get("sparse")
    if sparse is None or not sparse.frame_ids:
        return None
    return replace(sparse, rows="token", skip_ids=())
