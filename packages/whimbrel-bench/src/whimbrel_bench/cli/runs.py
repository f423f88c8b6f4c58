"""Course of `whimbrel bench serve`: words, samples, warm-up and runs, for servers that are there or a preset's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import typer

from whimbrel.errors import SetupError
from whimbrel_bench import presets
from whimbrel_bench.backends import Sample
from whimbrel_bench.cli.output import Output, progress_bar
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.machine import describe_machine, gpu_name
from whimbrel_bench.results import Result
from whimbrel_bench.sweep import read_rates, run_sweep
from whimbrel_bench.target import Load, Target, TargetOptions
from whimbrel_bench.words import Words, approximate, local_words, server_words


@dataclass(frozen=True)
class Plan:
    """Load of one or several servers."""

    dataset: DatasetOptions
    load: Load
    tokenizer: str | None = None
    sweep: str | None = None
    sweep_seconds: float = 30.0


def run_plan(plan: Plan, targets: Sequence[Target], output: Output) -> int:
    """Run a plan on the servers, show the results, and return the exit code. Raises WhimbrelError."""
    rates = read_rates(plan.sweep) if plan.sweep is not None else None
    words = {target.name: find_words(plan, target) for target in targets}
    samples: dict[str, list[Sample]] = {}
    for target in targets:
        own = words[target.name]
        samples[target.name] = make_samples(plan.dataset, own)
        output.say(_describe(plan.dataset, samples[target.name], own, target))
        target.warm_up(samples[target.name], plan.load)
    named = len(targets) > 1 or rates is not None
    run = partial(run_once, output=output, words=words, named=named, tokenizer=plan.tokenizer or "")
    if rates is None:
        found: list[Result] = []
        for target in targets:
            found.append(run(target, samples[target.name], plan.load))
            if found[-1].interrupted:
                break
    else:
        found = run_sweep(targets, lambda target: samples[target.name], plan.load, rates, run=run, seconds=plan.sweep_seconds)
    return output.finish(found)


def find_words(plan: Plan, target: Target) -> Words | None:
    """Return the words of random prompts: by --tokenizer, the server's tokenizer, or without one."""
    if not plan.dataset.is_random:
        return None
    if plan.tokenizer is not None:
        return local_words(None if plan.tokenizer == "packaged" else plan.tokenizer)
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
    words: dict[str, Words | None],
    named: bool,
    tokenizer: str = "",
) -> Result:
    """Run one load with a progress bar, and show its result."""
    own = words.get(target.name)
    notes = (f"Lengths are approximate: {own.source}.",) if own is not None and not own.exact else ()
    total = len(samples) if load.duration is None else None
    rate = "" if load.rate == float("inf") else f" at {load.rate:g}/s"
    with progress_bar(output.console, total, f"{target.name}{rate}") as progress:
        result = target.run(samples, load, progress=progress, label=output.label, tokenizer=tokenizer, notes=notes)
    output.show(result, named=named)
    return result


# Presets


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
        found = run_once(target, preset.samples, preset.load, output=output, words={}, named=False)
    early = ", stopped early" if found.interrupted else ""
    amount = f"{found.completed:,} requests, {found.total_input_sequences:,} texts, {found.total_input:,} tokens{early}"
    machine = "of that server" if servers else gpu_name() or describe_machine()
    ours = presets.figures(found)
    typer.echo("\n" + presets.beside_published(preset, ours, hardware=machine, model=f"{model}; {amount}"))
    return output.finish([found])
