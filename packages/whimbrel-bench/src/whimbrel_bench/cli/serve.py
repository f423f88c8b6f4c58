"""The command `whimbrel bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from whimbrel.cli.shared_options import flag, need, option
from whimbrel_bench.cli.bench_options import (
    LOAD_PANEL,
    PRESET_PANEL,
    RESULTS_PANEL,
    SERVER_PANEL,
    ApiKey,
    Backend,
    BatchSize,
    DatasetName,
    DatasetPath,
    Endpoint,
    ExtraBody,
    Headers,
    InputLen,
    ModelName,
    NumPrompts,
    RangeRatio,
    Ready,
    Seed,
    TokenizerName,
    check_dataset,
    check_metrics,
    check_options,
    finite,
    make_targets,
    read_extra_body,
    read_pairs,
    read_percentiles,
    read_urls,
)


def serve(
    context: typer.Context,
    *,
    urls: Annotated[
        list[str] | None,
        option(
            "[NAME=]URL", "Server. May be repeated. [default: --host and --port]", "--url", "--base-url", panel=SERVER_PANEL
        ),
    ] = None,
    host: Annotated[str, option("HOST", "Address of the server.", panel=SERVER_PANEL)] = "127.0.0.1",
    port: Annotated[int, option("PORT", "Port of the server.", min=1, max=65535, panel=SERVER_PANEL)] = 8000,
    backend: Backend = "openai-embeddings",
    endpoint: Endpoint = None,
    model: ModelName = None,
    api_key: ApiKey = None,
    header: Headers = None,
    extra_body: ExtraBody = None,
    insecure: Annotated[bool, flag("--insecure", "Accept any TLS certificate.", panel=SERVER_PANEL)] = False,
    ready_seconds: Ready = 0.0,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 1000,
    random_input_len: InputLen = 128,
    random_range_ratio: RangeRatio = 0.0,
    random_batch_size: BatchSize = 1,
    tokenizer: TokenizerName = None,
    seed: Seed = 0,
    request_rate: Annotated[
        str, option("RATE", "Requests per second, as a Poisson process. inf sends all at once.", panel=LOAD_PANEL)
    ] = "inf",
    burstiness: Annotated[
        float, option("B", "Evenness of a rate: 1 is Poisson, less comes in bursts, more is even.", min=0.01, panel=LOAD_PANEL)
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, option("N", "Maximum requests on their way. [default: no limit]", min=1, panel=LOAD_PANEL)
    ] = None,
    num_warmups: Annotated[int, option("N", "Requests before the clock starts.", min=0, panel=LOAD_PANEL)] = 0,
    timeout: Annotated[
        float, option("SECONDS", "Time after which a request has failed.", min=0.1, callback=finite, panel=LOAD_PANEL)
    ] = 600.0,
    client_processes: Annotated[
        int | None, option("N", "Client processes. [default: by the load]", min=1, max=256, panel=LOAD_PANEL)
    ] = None,
    sweep: Annotated[str | None, option("RATES", "Run at each of these rates, e.g. 5,10,20,inf.", panel=LOAD_PANEL)] = None,
    sweep_seconds: Annotated[
        float,
        option(
            "SECONDS",
            "Time of each rate of a sweep, as far as --num-prompts suffices.",
            min=0.1,
            callback=finite,
            panel=LOAD_PANEL,
        ),
    ] = 30.0,
    percentile_metrics: Annotated[str, option("NAMES", "Metrics with percentiles: e2el.", panel=RESULTS_PANEL)] = "e2el",
    metric_percentiles: Annotated[str, option("LIST", "Percentiles, e.g. 50,95,99.", panel=RESULTS_PANEL)] = "99",
    save_result: Annotated[
        bool, flag("--save-result", "Write a JSON file per run, with vLLM's keys.", panel=RESULTS_PANEL)
    ] = False,
    save_detailed: Annotated[
        bool, flag("--save-detailed", "Write the latency and the error of each request too.", panel=RESULTS_PANEL)
    ] = False,
    result_dir: Annotated[Path | None, option("DIR", "Folder of the JSON files.", panel=RESULTS_PANEL)] = None,
    result_filename: Annotated[str | None, option("NAME", "Name of the JSON file.", panel=RESULTS_PANEL)] = None,
    label: Annotated[str | None, option("TEXT", "Label in the results. [default: the backend]", panel=RESULTS_PANEL)] = None,
    metadata: Annotated[
        list[str] | None, option("NAME=VALUE", "Field of the JSON files. May be repeated.", panel=RESULTS_PANEL)
    ] = None,
    markdown: Annotated[Path | None, option("PATH", "Write a Markdown table of all runs.", panel=RESULTS_PANEL)] = None,
    picture: Annotated[
        Path | None,
        option("PATH", "Draw throughput against latency: .html, .svg or .png (needs whimbrel[bench]).", panel=RESULTS_PANEL),
    ] = None,
    preset: Annotated[
        Literal["gritlm", "token-vectors", "rerank"] | None,
        option(
            "NAME",
            "Published workload: gritlm, token-vectors or rerank. Starts a server, unless --url names one.",
            panel=PRESET_PANEL,
        ),
    ] = None,
    scale: Annotated[
        Literal["full", "small"],
        option("SCALE", "full: for a GPU; small: a small random model, for a CPU.", panel=PRESET_PANEL),
    ] = "full",
    random_weights: Annotated[
        bool,
        flag(
            "--random-weights", "Random weights in the real model's size, made here, in place of the Hub's.", panel=PRESET_PANEL
        ),
    ] = False,
    serve_args: Annotated[str, option("ARGS", "Further arguments of the preset's `whimbrel serve`.", panel=PRESET_PANEL)] = "",
) -> None:
    """Load a server and measure latency and throughput."""
    need("httptools")
    check_options(context, preset)
    check_metrics(percentile_metrics)
    check_dataset(dataset_name, dataset_path)
    from whimbrel.cli import console
    from whimbrel_bench.arrivals import read_rate
    from whimbrel_bench.cli.output import Output
    from whimbrel_bench.cli.runs import Plan, run_plan, run_preset
    from whimbrel_bench.datasets import DatasetOptions
    from whimbrel_bench.target import Load, TargetOptions

    target_options = TargetOptions(
        backend,
        endpoint,
        model,
        api_key,
        read_pairs(header, "header"),
        read_extra_body(extra_body),
        verify_tls=not insecure,
        ready_seconds=ready_seconds,
        timeout=timeout,
    )
    load = Load(
        read_rate(request_rate),
        burstiness,
        max_concurrency,
        num_warmups,
        seed,
        client_processes,
        read_percentiles(metric_percentiles),
    )
    output = Output(
        label=label,
        metadata=read_pairs(metadata, "metadata"),
        save=save_result,
        detailed=save_detailed,
        folder=result_dir,
        filename=result_filename,
        markdown=markdown,
        picture=picture,
    )
    output.check()
    dataset = DatasetOptions(
        dataset_name, dataset_path, num_prompts, seed, random_input_len, random_range_ratio, random_batch_size
    )
    with console.signals_exit():
        if preset is not None:
            servers = read_urls(urls, host, port) if urls else []
            code = run_preset(
                preset, scale, servers, target_options, output, random_weights=random_weights, arguments=serve_args
            )
        else:
            plan = Plan(dataset, load, tokenizer, sweep, sweep_seconds)
            code = run_plan(plan, make_targets(read_urls(urls, host, port), target_options), output)
    raise typer.Exit(code)
