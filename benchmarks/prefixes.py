"""Shared prefixes and long texts of causal models: a rerank, short queries beside long texts, and texts split and whole.

    python benchmarks/prefixes.py [--dtype auto] [--rounds 5] [--tables 1,2,3] [--quick]

The model is random, in the layout of Qwen/Qwen3-Reranker-0.6B, with 4 layers of 512 columns.
Its tokenizer is the packaged model's with the template's control tokens, because lookups cost next to nothing. Speed does not
depend on the weights. Contenders take turns, A B A B, after a round that is not counted. Ratios are those of the medians.

1. A rerank of 100 documents of about 100 tokens. Template, instruction and query come to about 150 tokens, with which all
   pairs begin. Each round has a query of its own. Contenders: each pair whole; the prefix once per batch (no cache); once (the
   cache); a query that is in the cache; and Sentence Transformers, which pads, with 32 pairs in a batch.
2. Queries of 12 words, one after another, alone and while texts of 8,192 tokens run one after another. The time of a
   piece is that of a batch of as many tokens as a batch has at most.
3. The texts of vLLM #39533, 16 of 8 to 192 sentences, as documents: whole, and in pieces of 512 and of 128 tokens.
   Its workload over HTTP is `whimbrel bench serve --preset token-vectors`.

--quick is a small model and few rounds, to test that everything runs; its numbers mean nothing.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
import transformers
from common import FOLDER, make_texts, note, print_setting, print_table, turns
from common import options as arguments
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tokenizers import AddedToken, Tokenizer

from whimbrel import Engine
from whimbrel.types.request import Request
from whimbrel_bench.presets import SENTENCE, SENTENCES
from whimbrel_bench.random_models import Size

CONTROLS: Final = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT: Final = (
    '{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}\n'
    '{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}\n'
    "<|im_start|>system\nAnswer yes or no: does the document meet what query and instruction ask for?<|im_end|>\n"
    "<|im_start|>user\n<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n<|im_start|>assistant\n"
)
NORMAL: Final = Size(512, 1536, 4, 8, 4, 64)
QUICK: Final = Size(128, 256, 2, 8, 4, 64)


def write_checkpoint(folder: Path, size: Size, *, positions: int) -> None:
    """Write a random reranker as Sentence Transformers saves it."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROLS])
    tokenizer.no_padding()
    tokenizer.no_truncation()
    base = str(folder / "base")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=positions)
    fast.chat_template = CHAT
    fast.save_pretrained(base)
    config = transformers.Qwen3Config(
        hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_dim, vocab_size=len(fast), max_position_embeddings=positions,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    vocab = fast.get_vocab()
    modules = [Transformer(base, transformer_task="text-generation"), LogitScore(vocab["yes"], vocab["no"])]
    CrossEncoder(modules=modules, activation_fn=torch.nn.Identity()).save(str(folder / "saved"))


def reranks(engine: Engine, queries: Sequence[str], documents: Sequence[str], *, shared: bool = True) -> Callable[[], object]:
    """Return a function that ranks the documents by the next query, with the prefix apart or each pair whole."""
    left = iter(queries)

    def rerank() -> object:
        query = next(left)
        request = engine.preprocessor.preprocess(Request([(query, each) for each in documents], ("scores",)))
        if not shared:
            request = replace(request, seqs=[replace(seq, prefix_tokens=0) for seq in request.seqs])
        return engine.submit_tokenized(request).result().outputs.scores

    return rerank


def rerank(folder: str, rounds: int, options: dict[str, Any], *, num_documents: int) -> list[list[str]]:
    """Return the rows of the first table."""
    queries = make_texts(rounds + 1, words=(88, 92), seed=1)
    documents = make_texts(num_documents, words=(70, 78), seed=2)
    with Engine(folder, **options) as cached, Engine(folder, **options, prefix_cache_bytes=0) as uncached:
        theirs = CrossEncoder(folder, device=cached.plan.device, model_kwargs={"dtype": getattr(torch, cached.plan.dtype)})
        their_queries = iter(queries)

        def sentence_transformers() -> object:
            query = next(their_queries)
            return theirs.predict([(query, each) for each in documents], batch_size=32)

        contenders = {
            "each pair whole": reranks(uncached, queries, documents, shared=False),
            "prefix once per batch": reranks(uncached, queries, documents),
            "prefix once": reranks(cached, queries, documents),
            "prefix from the cache": reranks(cached, [queries[0]] * (rounds + 1), documents),
            "Sentence Transformers": sentence_transformers,
        }
        seconds = dict(zip(contenders, turns(*contenders.values(), rounds=rounds), strict=True))
        seqs = cached.preprocessor.preprocess(Request([(queries[0], each) for each in documents], ("scores",))).seqs
        own = np.mean([seq.ids.size - seq.prefix_tokens for seq in seqs])
        print_setting(cached.plan, documents=num_documents, prefix=seqs[0].prefix_tokens, own_tokens=f"{own:.0f}")
    return rows_of(seconds, lambda ours, whole: f"{whole / ours:.2f}")


def rows_of(seconds: dict[str, list[float]], ratio: Callable[[float, float], str]) -> list[list[str]]:
    """Return the median milliseconds of each contender, and its ratio to the first."""
    medians = {name: median(each) for name, each in seconds.items()}
    first = next(iter(medians.values()))
    return [[name, f"{1e3 * each:,.0f}", ratio(each, first)] for name, each in medians.items()]


def short_queries(folder: str, options: dict[str, Any], *, long_tokens: int, count: int) -> list[list[str]]:
    """Return the rows of the second table."""
    query, stopped = ("how far do birds fly", "some fly ten thousand kilometres"), threading.Event()
    rows: list[list[str]] = []
    with Engine(folder, **options, chunked_prefill=True) as engine:
        piece = engine.plan.max_batch_tokens
        long, of_a_piece = (Request([np.full(size, 2000, np.int32)], ("scores",)) for size in (long_tokens, piece))

        def stream() -> None:
            while not stopped.is_set():
                future = engine.submit(long)
                while not future.done() and not stopped.wait(0.05):
                    pass
                future.cancel()

        def ask(request: Request) -> float:
            started = perf_counter()
            engine.run(request)
            return perf_counter() - started

        seconds_of_piece = median(ask(of_a_piece) for _ in range(5))
        ask(short := Request([query], ("scores",)))
        for name, num_streams in (("alone", 0), ("beside long texts", engine.plan.num_lanes)):
            stopped.clear()
            streams = [threading.Thread(target=stream) for _ in range(num_streams)]
            for each in streams:
                each.start()
            stopped.wait(1.0)  # until every lane runs a long text
            seconds = [ask(short) for _ in range(count)]
            stopped.set()
            for each in streams:
                each.join()
            p50, p99 = np.percentile(seconds, [50, 99])
            rows.append([name, f"{1e3 * p50:,.1f}", f"{1e3 * p99:,.1f}", f"{p99 / seconds_of_piece:.2f}"])
        print_setting(engine.plan, long=long_tokens, piece=piece, piece_ms=f"{1e3 * seconds_of_piece:.1f}")
    return rows


def split_and_whole(folder: str, rounds: int, options: dict[str, Any], *, size: int) -> list[list[str]]:
    """Return the rows of the third table."""
    request = Request([("", SENTENCE * count) for count in SENTENCES], ("scores",))
    limit = options | {"max_batch_tokens": size}
    with Engine(folder, **limit, chunked_prefill=False) as whole, Engine(folder, **limit, chunked_prefill=True) as split:
        seconds = turns(partial(whole.run, request), partial(split.run, request), rounds=rounds)
        found, expected = (np.asarray(each.run(request).outputs.scores) for each in (split, whole))
        print_setting(split.plan, largest_difference=f"{np.abs(found - expected).max():.1e}")
    names = (f"batches of {size} tokens, texts whole", f"in pieces of {size} tokens")
    return rows_of(dict(zip(names, seconds, strict=True)), lambda ours, whole: f"{ours / whole:.3f}")


def main() -> None:
    args = arguments(__doc__, quick=False, rounds=5, tables="1,2,3").parse_args()
    rounds, long_tokens, size = (1, 2048, QUICK) if args.quick else (args.rounds, 8192, NORMAL)
    options: dict[str, Any] = {"dtype": args.dtype}
    with TemporaryDirectory() as name:
        note("writing the checkpoint")
        write_checkpoint(Path(name), size, positions=max(4096, long_tokens))
        folder = str(Path(name) / "saved")
        if "1" in args.tables:
            note("a rerank")
            rows = rerank(folder, rounds, options, num_documents=8 if args.quick else 100)
            print_table(["a rerank", "ms", "each pair whole / this"], rows)
        if "2" in args.tables:
            note("short queries beside long texts")
            rows = short_queries(folder, options, long_tokens=long_tokens, count=5 if args.quick else 100)
            print_table(["short queries", "p50, ms", "p99, ms", "p99 / a piece"], rows)
        if "3" in args.tables:
            note("split and whole")
            rows = [row for limit in (512, 128) for row in split_and_whole(folder, rounds, options, size=limit)]
            print_table(["texts of 8 to 192 sentences", "ms", "this / whole"], rows)


if __name__ == "__main__":
    main()
