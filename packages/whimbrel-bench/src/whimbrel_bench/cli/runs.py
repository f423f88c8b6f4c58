"""Course of `whimbrel bench serve`: words, samples, warm-up and runs, for servers that are there or a preset's own."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf, isfinite

import typer

from whimbrel.errors import SetupError
from whimbrel_bench import presets
from whimbrel_bench.backends import Sample
from whimbrel_bench.cli.output import Output, progress_bar
from whimbrel_bench.datasets import make_samples
from whimbrel_bench.machine import describe_machine, gpu_name
from whimbrel_bench.options import DatasetOptions, Load, SweepOptions, TargetOptions
from whimbrel_bench.results import Result
from whimbrel_bench.target import Target
from whimbrel_bench.words import Words, approximate, local_words, server_words


def run_plan(dataset: DatasetOptions, load: Load, sweep: SweepOptions, targets: Sequence[Target], output: Output) -> int:
    """Run the load on the servers, show the results, and return the exit code. Raises WhimbrelError."""
    words = {target.name: find_words(dataset, target) for target in targets}
    samples = {target.name: make_samples(dataset, words[target.name]) for target in targets}
    for target in targets:
        output.say(_describe(dataset, samples[target.name], words[target.name], target))
        target.warm_up(samples[target.name], load)
    named = len(targets) > 1 or sweep.rates is not None

    def run(target: Target, rate: float) -> Result:
        own = samples[target.name]
        if sweep.rates is not None and isfinite(rate):
            own = own[: max(1, round(rate * sweep.seconds))]
        tokenizer = dataset.tokenizer or ""
        changed = replace(load, rate=rate)
        return run_once(target, own, changed, output=output, words=words[target.name], named=named, tokenizer=tokenizer)

    return output.finish(run_rates(targets, sweep.rates or [load.rate], run))


def run_rates(targets: Sequence[Target], rates: Sequence[float], run: Callable[[Target, float], Result]) -> list[Result]:
    """Run every rate on every server, in turns, so that a change of the machine touches all of them alike.

    A server that does not keep up with a rate is not asked for higher ones but the infinite one. A run that was stopped is the
    last.
    """
    results: list[Result] = []
    behind: set[str] = set()
    for rate in rates:
        for target in targets:
            if target.name in behind and isfinite(rate):
                continue
            results.append(run(target, rate))
            if results[-1].interrupted:
                return results
            if results[-1].request_throughput < 0.7 * rate:
                behind.add(target.name)
    return results


def find_words(dataset: DatasetOptions, target: Target) -> Words | None:
    """Return the words of random prompts: by --tokenizer, the server's tokenizer, or without one."""
    if not dataset.is_random:
        return None
    if dataset.tokenizer is not None:
        return local_words(dataset.tokenizer)
    with target.client() as client:
        return server_words(client, target.endpoint.url, target.model) or approximate()


def _describe(dataset: DatasetOptions, samples: Sequence[Sample], words: Words | None, target: Target) -> str:
    texts = sum(len(sample.texts) for sample in samples)
    tokens = sum(sample.num_tokens or 0 for sample in samples)
    amount = f", {tokens:,} tokens" if tokens else ""
    source = f"; {words.source}" if words is not None else ""
    return f"{target.name}: {len(samples):,} requests, {texts:,} texts{amount} ({dataset.name}{source})"


def run_once(
    target: Target,
    samples: Sequence[Sample],
    load: Load,
    *,
    output: Output,
    words: Words | None = None,
    named: bool = False,
    tokenizer: str = "",
) -> Result:
    """Run one load with a progress bar, and show its result."""
    notes = (f"Lengths are approximate: {words.source}.",) if words is not None and not words.exact else ()
    total = len(samples) if load.duration is None else None
    rate = "" if load.rate == inf else f" at {load.rate:g}/s"
    with progress_bar(output.console, total, f"{target.name}{rate}") as progress:
        result = target.run(samples, load, progress=progress, label=output.files.label, tokenizer=tokenizer, notes=notes)
    output.show(result, named=named)
    return result


def run_preset(
    name: str,
    scale: str,
    servers: Sequence[tuple[str, str]],
    options: TargetOptions,
    output: Output,
    *,
    random_weights: bool,
    arguments: str,
) -> int:
    """Run a published workload, print its figures beside the published ones, and return the exit code."""
    preset = presets.PRESETS[name](small=scale == "small")
    is_random = scale == "small" or random_weights
    if len(servers) > 1:
        raise SetupError("a preset runs on one server.", hint="name one --url, or none for a server of its own")
    with ExitStack() as stack:
        if servers:
            ((label, url),) = servers
            model = f"the server at {url}"
        else:
            made = presets.preset_server(preset, random_weights=is_random, arguments=shlex.split(arguments), say=output.say)
            label, url = "whimbrel", stack.enter_context(made)
            model = f"{scale} random weights, shape of {preset.model}" if is_random else preset.model
        extra = {**preset.extra_body, **options.extra_body}
        target = Target(url, replace(options, backend=preset.backend, extra_body=extra), name=label)
        target.connect()
        target.warm_up(preset.samples, preset.load)
        found = run_once(target, preset.samples, preset.load, output=output)
    early = ", stopped early" if found.interrupted else ""
    amount = f"{found.completed:,} requests, {found.total_input_sequences:,} texts, {found.total_input:,} tokens{early}"
    machine = "of that server" if servers else gpu_name() or describe_machine()
    ours = presets.figures(found)
    typer.echo("\n" + presets.beside_published(preset, ours, hardware=machine, model=f"{model}; {amount}"))
    return output.finish([found])
