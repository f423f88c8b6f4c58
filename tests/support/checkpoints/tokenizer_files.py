"""Small trained tokenizers of every class, as the files of real models have them: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import base64
import copy
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from checkpoints.encoders import CORPUS
from checkpoints.files import write_json
from whimbrel.checkpoint.reader import read_card
from whimbrel.tokenizer import tokenizer as ours
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan

JSON = dict[str, Any]

TEXT = [
    *CORPUS,
    "l'été à la plage, où ça ? naïve café Ünïcode straße",
    "I'll don't we're it's they've 'S 'T\n\n  def f(x):\n    return x ** 2 \t # two",
    "日本語のテキスト 한국어 雪飛 русский текст עברית 🙂🙂",
    "2026 1999 3.14159 100,000 a1b2c3",
]
QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ROBERTA_MASK = AddedToken("<mask>", lstrip=True, special=True, normalized=True)


def load(folder: Path, **stated: Any) -> ours.Tokenizer:
    """Whimbrel's tokenizer of a checkpoint."""
    card = read_card(folder, "m", **stated)
    return ours.Tokenizer(folder, card, make_plan(Options(), card, Hardware(num_cores=1)))


def _content(tokenizer: Tokenizer) -> JSON:
    return json.loads(tokenizer.to_str())


def charsmap() -> JSON:
    """A map of SentencePiece that makes A an a, and nothing else: a double-array trie of 512 nodes, then the strings."""
    nodes = [0] * 512
    nodes[ord("A")] = 256 << 10 | 1 << 8 | ord("A")
    data = struct.pack("<I512I", 512 * 4, *nodes) + b"a\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


@cache  # training is not the same twice
def _wordpiece() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(show_progress=False, vocab_size=400, special_tokens=["[UNK]"])
    )
    return tokenizer.to_str()


def _with_vocabulary(content: JSON, first: list[str], last: list[str] = []) -> JSON:  # noqa: B006
    """A WordPiece file with its special tokens where a model has them."""
    words = [word for word in content["model"]["vocab"] if word not in (*first, *last)]
    content["model"]["vocab"] = {word: number for number, word in enumerate([*first, *words, *last])}
    return content


def bert() -> tuple[JSON, JSON]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer.from_str(json.dumps(_with_vocabulary(json.loads(_wordpiece()), special)))
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
    return _files(tokenizer, "BertTokenizer", roles, do_lower_case=True, strip_accents=None, tokenize_chinese_chars=True)


FAIRSEQ = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>",
    "mask_token": "<mask>",
}  # fmt: skip


def mpnet() -> tuple[JSON, JSON]:
    content = _with_vocabulary(json.loads(_wordpiece()), ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "[UNK]"])
    tokenizer.add_tokens([AddedToken("<unk>", normalized=True)])
    tokenizer.add_special_tokens([ROBERTA_MASK])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    return _files(
        tokenizer, "MPNetTokenizer", FAIRSEQ | {"unk_token": "[UNK]"},
        do_lower_case=True, strip_accents=None, tokenize_chinese_chars=True,
    )  # fmt: skip


@cache  # training is not the same twice
def _unigram() -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(show_progress=False, vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


def _with_pieces(first: list[tuple[str, float]]) -> Tokenizer:
    content = json.loads(_unigram())
    pieces = [row for row in content["model"]["vocab"] if row[0] != "<unk>"]
    content["model"]["vocab"] = [*map(list, first), *pieces, ["<mask>", 0.0]]
    content["model"]["unk_id"] = [piece for piece, _ in first].index("<unk>")
    content |= {"added_tokens": [], "normalizer": charsmap()}
    return Tokenizer.from_str(json.dumps(content))


def xlm_roberta() -> tuple[JSON, JSON]:
    tokenizer = _with_pieces([(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")])
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _files(tokenizer, "XLMRobertaTokenizer", FAIRSEQ)


def t5(*, old: bool = False) -> tuple[JSON, JSON]:
    """T5's, whose sentinels are pieces too. `old`: as sentence-transformers' T5s have it, from transformers 4."""
    sentinels = [f"<extra_id_{i}>" for i in range(100)]
    content = json.loads(_unigram())
    pieces = [row for row in content["model"]["vocab"] if row[0] != "<unk>"]
    special = ["<pad>", "</s>", "<unk>"]
    vocab = [*([piece, 0.0] for piece in special), *pieces, *([piece, 0.0] for piece in reversed(sentinels))]
    content["model"] |= {"vocab": vocab, "unk_id": 2}
    tokenizer = Tokenizer.from_str(json.dumps(content | {"added_tokens": [], "normalizer": charsmap()}))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (*special, *sentinels)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    roles = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    content, stated = _files(
        tokenizer, "T5Tokenizer", roles, extra_ids=100, additional_special_tokens=sentinels, model_max_length=512
    )
    if old:
        del stated["added_tokens_decoder"], stated["clean_up_tokenization_spaces"]
        stated |= {"name_or_path": "models/gtr-t5-base", "special_tokens_map_file": "special_tokens_map.json"}
    return content, stated


def camembert() -> tuple[JSON, JSON]:
    unused = [("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0), ("<unk>NOTUSED", -100.0)]
    tokenizer = _with_pieces([*unused, ("<s>", 0.0), ("</s>", 0.0)])
    tokenizer.add_special_tokens(["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 5), ("</s>", 6)]
    )
    extra = ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"]
    return _files(tokenizer, "CamembertTokenizer", FAIRSEQ, additional_special_tokens=extra)


def albert() -> tuple[JSON, JSON]:
    special = ("<pad>", "<unk>", "[CLS]", "[SEP]")
    tokenizer = _with_pieces([(piece, 0.0) for piece in special])
    tokenizer.add_special_tokens(list(special))
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents()]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Lowercase(), tokenizer.normalizer])
    tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "sep_token": "[SEP]", "pad_token": "<pad>"}
    roles |= {"cls_token": "[CLS]", "mask_token": "[MASK]"}
    return _files(tokenizer, "AlbertTokenizer", roles, do_lower_case=True, keep_accents=False, remove_space=True)


def deberta(*, lower: bool = False) -> tuple[JSON, JSON]:
    """DeBERTa v3's: pieces with the roles of BERT's tokens, and a map that the class leaves out."""
    special = ("[PAD]", "[CLS]", "[SEP]", "<unk>")
    tokenizer = _with_pieces([(piece, 0.0) for piece in special])
    content = _content(tokenizer)
    content["model"]["vocab"][3], content["model"]["vocab"][-1] = ["[UNK]", 0.0], ["[unused]", 0.0]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", AddedToken("[UNK]", normalized=True), "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    roles = {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    roles |= {"cls_token": "[CLS]", "mask_token": "[MASK]"}
    return _files(
        tokenizer, "DebertaV2Tokenizer", roles,
        do_lower_case=lower, split_by_punct=lower, sp_model_kwargs={}, vocab_type="spm",
    )  # fmt: skip


@cache  # training is not the same twice
def _bytes_bpe(words: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    if words:
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    first = [] if words else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=600, special_tokens=first, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


def roberta() -> tuple[JSON, JSON]:
    tokenizer = Tokenizer.from_str(_bytes_bpe(""))
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=True) for token in ("<s>", "<pad>", "</s>", "<unk>")])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    return _files(tokenizer, "RobertaTokenizer", FAIRSEQ, add_prefix_space=False)


def gpt2(*, ends: bool = False) -> tuple[JSON, JSON]:
    """Plain byte pairs, as OLMo 2's and Granite's; `ends`: <|endoftext|> after a text."""
    tokenizer = Tokenizer.from_str(_bytes_bpe(""))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = (
        processors.TemplateProcessing(single=f"$A {end[0]}", pair=f"$A {end[0]} $B:1 {end[0]}:1", special_tokens=[end])
        if ends
        else processors.ByteLevel(trim_offsets=True)
    )
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), end[0])
    return _files(tokenizer, "GPT2Tokenizer", roles, add_prefix_space=False)


def modernbert() -> tuple[JSON, JSON]:
    tokenizer = Tokenizer.from_str(_bytes_bpe(QWEN2_WORDS))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tokenizer.add_tokens(["|||EMAIL|||", AddedToken("        ", normalized=True)])
    tokenizer.add_special_tokens([*special, AddedToken("[MASK]", lstrip=True)])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )
    roles = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
    return _files(tokenizer, "PreTrainedTokenizerFast", roles, model_input_names=["input_ids", "attention_mask"])


def qwen(*, suffix: bool) -> tuple[JSON, JSON]:
    """Qwen2's, and with a suffix that of Qwen3's embedding models."""
    tokenizer = Tokenizer.from_str(_bytes_bpe(QWEN2_WORDS))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    bytes_ = processors.ByteLevel(trim_offsets=False)
    template = processors.TemplateProcessing(
        single=f"$A {end[0]}:0", pair=f"$A {end[0]}:0 $B:1 {end[0]}:1", special_tokens=[end]
    )
    tokenizer.post_processor = processors.Sequence([bytes_, template]) if suffix else bytes_
    return _files(
        tokenizer, "Qwen2Tokenizer", {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None},
        add_bos_token=False, add_prefix_space=False, errors="replace", split_special_tokens=False, chat_template="{{ x }}",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip


def lfm2() -> tuple[JSON, JSON]:
    """LFM2's: byte pairs after a token that begins a text; no mask token."""
    tokenizer = Tokenizer.from_str(_bytes_bpe(QWEN2_WORDS))
    tokenizer.add_special_tokens(["<|pad|>", "<|startoftext|>", "<|im_end|>"])
    start = ("<|startoftext|>", tokenizer.token_to_id("<|startoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A", pair="<|startoftext|> $A <|startoftext|>:1 $B:1", special_tokens=[start]
    )
    return _files(
        tokenizer, "PreTrainedTokenizerFast", {"bos_token": start[0], "eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
        add_bos_token=True, add_eos_token=False, add_prefix_space=None, legacy=False, sp_model_kwargs={},
        spaces_between_special_tokens=False, use_default_system_prompt=False, model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens={},
    )  # fmt: skip


@cache  # training is not the same twice
def _pieces_bpe(first: tuple[str, ...]) -> str:
    """Byte pairs of SentencePiece: all bytes as tokens, words that begin with the sign for a space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=800, special_tokens=[*first, *all_bytes], limit_alphabet=60)
    tokenizer.train_from_iterator([" " + text for text in TEXT], trainer)
    content = _content(tokenizer) | {"added_tokens": [], "pre_tokenizer": None}
    return json.dumps(content)


def llama(*, ends: bool = False, old: bool = True) -> tuple[JSON, JSON]:
    """Llama 2's; `old`: a normalizer puts the space in front; `ends`: </s> after a text, by flag and post-processor."""
    tokenizer = Tokenizer.from_str(_pieces_bpe(("<unk>", "<s>", "</s>")))
    if old:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    single, second = ("<s> $A </s>", "<s>:1 $B:1 </s>:1") if ends else ("<s> $A", "<s>:1 $B:1")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} {second}", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return _files(
        tokenizer, "LlamaTokenizer", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
        add_bos_token=True, add_eos_token=ends, legacy=True, sp_model_kwargs={}, use_default_system_prompt=False,
        spaces_between_special_tokens=False, additional_special_tokens=[], padding_side="left",
    )  # fmt: skip


def e5_mistral() -> tuple[JSON, JSON]:
    """That of intfloat/e5-mistral-7b-instruct, whose flags ask for </s> and whose post-processor adds none."""
    content, config = llama()
    return content, config | {"add_eos_token": True}


def gemma() -> tuple[JSON, JSON]:
    """Gemma 3's, whose token for images has no row in the table of the models that know only text."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    tokenizer = Tokenizer.from_str(_pieces_bpe(special))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("\u2581\u2581", normalized=False)])
    tokenizer.add_special_tokens(["<start_of_turn>"])
    ends = [("<bos>", 2), ("<eos>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos>:0 $A:0 <eos>:0", pair="<bos>:0 $A:0 <eos>:0 <bos>:1 $B:1 <eos>:1", special_tokens=ends
    )
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return _files(
        tokenizer, "GemmaTokenizer", roles,
        add_bos_token=True, add_eos_token=True, boi_token="<start_of_turn>", sp_model_kwargs=None,
        spaces_between_special_tokens=False, use_default_system_prompt=False, extra_special_tokens={"boi_token": "<start_of_turn>"},
    )  # fmt: skip


def _files(tokenizer: Tokenizer, tokenizer_class: str, roles: JSON, **config: Any) -> tuple[JSON, JSON]:
    """tokenizer.json and tokenizer_config.json."""
    content = _content(tokenizer)
    added = {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in content["added_tokens"]}
    return content, {
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": tokenizer_class,
        **roles,
        **config,
    }


SIZES = {
    "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 60,
    "vocab_size": 2000, "pad_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, tuple[JSON, JSON]]] = {
    "bert": ("Bert", bert()),
    "roberta": ("Roberta", roberta()),
    "xlm-roberta": ("XLMRoberta", xlm_roberta()),
    "camembert": ("Camembert", camembert()),
    "distilbert": ("DistilBert", bert()),
    "electra": ("Electra", bert()),
    "mpnet": ("MPNet", mpnet()),
    "deberta-v2": ("DebertaV2", deberta()),
    "nomic_bert": ("NomicBert", bert()),
    "gte": ("Gte", xlm_roberta()),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", xlm_roberta()),
    "modernbert": ("ModernBert", modernbert()),
    "llama": ("Llama", llama()),
    "mistral": ("Mistral", llama(ends=True)),
    "qwen2": ("Qwen2", qwen(suffix=False)),
    "qwen3": ("Qwen3", qwen(suffix=True)),
    "lfm2": ("Lfm2", lfm2()),
    "gemma": ("Gemma", gemma()),
    "gemma2": ("Gemma2", gemma()),
    "gemma3_text": ("Gemma3Text", gemma()),
    "t5": ("T5", t5()),
    "mt5": ("MT5", t5(old=True)),
    "albert": ("Albert", albert()),
    "gpt2": ("GPT2", gpt2()),
    "olmo2": ("Olmo2", gpt2(ends=True)),
    "phi3": ("Phi3", llama()),
}


def write(folder: Path, family: str, config: JSON | None = None, tokenizer: JSON | None = None, **model: Any) -> None:
    """config.json and the tokenizer of a family, with keys of tokenizer_config.json and tokenizer.json changed.

    "ABSENT" takes a key away.
    """
    name, (content, stated) = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    sizes = dict(SIZES)
    if family == "distilbert":
        sizes |= {"dim": 48, "n_layers": 1, "n_heads": 4, "hidden_dim": 96}
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            del sizes[key]
    if family in ("t5", "mt5"):
        sizes = {"d_model": 48, "num_layers": 1, "num_heads": 4, "d_kv": 12, "d_ff": 96, "vocab_size": 2000}
    if family == "gpt2":
        sizes = {"n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 60, "vocab_size": 2000, "pad_token_id": 1}
    if family in ("llama", "mistral", "qwen2", "qwen3", "lfm2", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3"):
        sizes["num_key_value_heads"] = 4
    if family == "deberta-v2":
        sizes |= {"relative_attention": True, "pos_att_type": "p2c|c2p"}
    settings = getattr(transformers, f"{name}Config")(**sizes, architectures=[f"{name}Model"]).to_dict()
    write_json(folder / "config.json", _changed(settings, model))
    write_json(folder / "tokenizer_config.json", _changed(stated, config or {}))
    write_json(folder / "tokenizer.json", _changed(content, tokenizer or {}))


def _changed(value: JSON, changes: JSON) -> JSON:
    return {key: item for key, item in copy.deepcopy(value | changes).items() if item != "ABSENT"}


GTE_QWEN2 = {
    "add_eos_token": True,
    "auto_map": {
        "AutoTokenizer": [
            f"Alibaba-NLP/gte-Qwen2-7B-instruct--tokenization_qwen.Qwen2Tokenizer{ending}" for ending in ("", "Fast")
        ]
    },
}
