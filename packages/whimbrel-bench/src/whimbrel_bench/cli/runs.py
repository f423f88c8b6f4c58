"""Course of `whimbrel bench serve`: servers, words, samples, warm-up and runs, or a preset in their place."""

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
from whimbrel_bench.machine import describe_machine
from whimbrel_bench.options import DatasetOptions, Load, PresetOptions, SweepOptions, TargetOptions
from whimbrel_bench.results import Result
from whimbrel_bench.target import Target
from whimbrel_bench.words import APPROXIMATE, Words, local_words, server_words


def read_urls(urls: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and URLs of the servers. A URL without a name is its own. Raises SetupError."""
    found: list[tuple[str, str]] = []
    for value in urls:
        name, sign, url = value.partition("=")
        named = bool(sign) and "/" not in name and ":" not in name
        found.append((name, url) if named else ("", value))
    names = [name or url for name, url in found]
    if len(set(names)) < len(names):
        raise SetupError("a server is named twice.", hint="give each a name: --url NAME=URL")
    return found


def make_targets(urls: Sequence[tuple[str, str]], options: TargetOptions) -> list[Target]:
    """Return the servers, each reachable. Raises SetupError."""
    targets = [Target(url, options, name=name) for name, url in urls]
    for target in targets:
        target.connect()
    return targets


def run_plan(dataset: DatasetOptions, load: Load, sweep: SweepOptions, targets: Sequence[Target], output: Output) -> int:
    """Run the load on the servers, show the results, and return the exit code. Raises WhimbrelError."""
    words = {target.name: find_words(dataset, target) for target in targets}
    samples = {target.name: make_samples(dataset, words[target.name]) for target in targets}
    for target in targets:
        output.say(_describe(dataset, samples[target.name], words[target.name], target))
        target.warm_up(samples[target.name], load)
    named = len(targets) > 1 or sweep.rates is not None

    def run(target: Target, rate: float) -> Result:
        own, found = samples[target.name], words[target.name]
        if sweep.rates is not None and isfinite(rate):
            own = own[: max(1, round(rate * sweep.seconds))]
        notes = (f"Lengths are approximate: {found.source}.",) if found is not None and not found.exact else ()
        changed = replace(load, rate=rate)
        return run_once(target, own, changed, output, named=named, tokenizer=dataset.tokenizer or "", notes=notes)

    return output.finish(run_rates(targets, sweep.rates or [load.rate], run))


def run_once(
    target: Target,
    samples: Sequence[Sample],
    load: Load,
    output: Output,
    *,
    named: bool = False,
    tokenizer: str = "",
    notes: tuple[str, ...] = (),
) -> Result:
    """Run one load with a progress bar, and show its result."""
    total = len(samples) if load.duration is None else None
    rate = "" if load.rate == inf else f" at {load.rate:g}/s"
    with progress_bar(output.console, total, f"{target.name}{rate}") as progress:
        result = target.run(samples, load, progress=progress, label=output.files.label, tokenizer=tokenizer, notes=notes)
    output.show(result, named=named)
    return result


def run_preset(
    name: str, options: PresetOptions, servers: Sequence[tuple[str, str]], target_options: TargetOptions, output: Output
) -> int:
    """Run a published workload, print its figures beside the published ones, and return the exit code."""
    if len(servers) > 1:
        raise SetupError("a preset runs on one server.", hint="name one --url, or none for a server of its own")
    preset = presets.read_preset(name, options.scale)
    samples, arguments = preset.samples(), shlex.split(options.serve_args)
    with ExitStack() as stack:
        if servers:
            ((label, url),) = servers
            model, machine = f"the server at {url}", "of that server"
        else:
            is_random = options.scale == "small" or options.random_weights
            made = presets.preset_server(preset, random_weights=is_random, arguments=arguments, say=output.say)
            label, url = "whimbrel", stack.enter_context(made)
            model = f"{options.scale} random weights, shape of {preset.model}" if is_random else preset.model
            machine = describe_machine()
        extra = {**preset.target.extra_body, **target_options.extra_body}
        own = replace(target_options, backend=preset.target.backend, extra_body=extra)
        (target,) = make_targets([(label, url)], own)
        target.warm_up(samples, preset.load)
        found = run_once(target, samples, preset.load, output)
    early = ", stopped early" if found.interrupted else ""
    amount = f"{found.completed:,} requests, {found.total_input_sequences:,} texts, {found.total_input:,} tokens{early}"
    typer.echo("\n" + presets.beside_published(preset, found, hardware=machine, model=f"{model}; {amount}"))
    return output.finish([found])


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
        return server_words(client, target.endpoint.url, target.model) or APPROXIMATE


def _describe(dataset: DatasetOptions, samples: Sequence[Sample], words: Words | None, target: Target) -> str:
    texts = sum(len(sample.texts) for sample in samples)
    tokens = sum(sample.num_tokens or 0 for sample in samples)
    amount = f", {tokens:,} tokens" if tokens else ""
    source = f"; {words.source}" if words is not None else ""
    return f"{target.name}: {len(samples):,} requests, {texts:,} texts{amount} ({dataset.name}{source})"
