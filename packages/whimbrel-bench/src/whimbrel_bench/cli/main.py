"""The commands `whimbrel bench`, `whimbrel eval` and `whimbrel top`, which whimbrel finds by their entry points."""

import typer

from whimbrel.cli.shared_options import help_text
from whimbrel_bench.cli import compare, offline, serve
from whimbrel_bench.cli import evaluate as evaluation
from whimbrel_bench.top.command import top as watch

bench = typer.Typer(
    name="bench",
    help="Measure servers and the engine: load, throughput, latency, comparisons.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

bench.command(
    name="serve",
    help=help_text(
        "Load a server and measure latency and throughput. Options, output and JSON are those of vLLM's benchmark.",
        ("whimbrel bench serve --random-input-len 128", "the server at 127.0.0.1:8000"),
        ("whimbrel bench serve --request-rate 20 --num-prompts 600", "a rate: open loop"),
        ("whimbrel bench serve --sweep 5,10,20,40 --picture sweep.html", "throughput against latency"),
        ("whimbrel bench serve --url ours=URL --url tei=URL --sweep 5,10", "servers side by side"),
        ("whimbrel bench serve --preset gritlm --scale small", "a published workload"),
    ),
)(serve.serve)

bench.command(
    name="offline",
    help=help_text(
        "Measure the engine alone: tokens per second, share of the machine's peak, stages, memory.",
        ("whimbrel bench offline", "the packaged model"),
        ("whimbrel bench offline MODEL --dtype float32 --dtype bfloat16", "dtypes side by side"),
    ),
)(offline.offline)

bench.command(
    name="compare",
    help=help_text(
        "Compare two servers, models or dtypes in turns, after checking that both give the same vectors.",
        ("whimbrel bench compare http://127.0.0.1:8000 http://127.0.0.1:9000", "servers"),
        ("whimbrel bench compare MODEL --dtype float32 --dtype bfloat16", "dtypes"),
        ("whimbrel bench compare MODEL MODEL --min-cosine 0.99", "models"),
    ),
)(compare.compare)

evaluate = typer.Typer(name="eval", add_completion=False, rich_markup_mode="rich")

evaluate.command(
    name="eval",
    help=help_text(
        "Evaluate models on judged queries: nDCG@10, recall and intervals, models and precisions side by side.",
        ("whimbrel eval MODEL --data DIR", "a folder in BEIR's layout"),
        ("whimbrel eval OLD NEW --queries Q --docs D --qrels R", "two models"),
        ("whimbrel eval MODEL --data DIR --compare float32,int8", "two dtypes of one"),
        ("whimbrel eval RERANKER --data DIR --first-stage MODEL", "a reranker"),
        ("whimbrel eval MODEL --mteb NFCorpus", "a task of mteb"),
    ),
)(evaluation.evaluate)

top = typer.Typer(name="top", add_completion=False, rich_markup_mode="rich")

top.command(
    name="top",
    help=help_text(
        "Watch servers in the terminal: requests, tokens, queue, times of stages, engines and caches. q or Ctrl-C ends.",
        ("whimbrel top", "the server on this machine"),
        ("whimbrel top http://a:8000 http://b:8000", "two, and their total"),
        ("whimbrel top --once --json", "for a program"),
    ),
)(watch)
