"""A server under load: its model, its readiness, and one run of a workload against it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf, isfinite
from time import monotonic, sleep
from typing import Final

import httpx2
import numpy as np
import orjson

from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.types.arrays import Float32Array
from whimbrel_bench import backends, clients
from whimbrel_bench.answers import Shape, check_first, excerpt
from whimbrel_bench.backends import Backend, Endpoint, Sample
from whimbrel_bench.load import Job
from whimbrel_bench.options import Load, TargetOptions
from whimbrel_bench.results import Result, Setting, make_result

_HINTS: Final[Mapping[int, str]] = {
    404: "the route or the model is not there: check --backend, --endpoint, --model and the URL",
    405: "the route takes no POST: check --backend, --endpoint and the URL",
    401: "pass the server's key with --api-key",
    403: "the key, or the host name of the URL, is not accepted",
    400: "the server refuses the body: check --backend, --model and --extra-body",
    422: "the server refuses the body: check --backend, --model and --extra-body",
}
_PATIENCE: Final = 60.0
"""Seconds for an answer without work: the names of models, tokens of words."""
_MAY_CUT: Final = frozenset({"top_n", "top_k"})
"""Fields of a body after which an answer may have fewer rows than the request has texts."""


def arrival_times(count: int, rate: float, *, seed: int = 0, burstiness: float = 1.0) -> list[float] | None:
    """Return the seconds after the start at which `count` requests are due, or None for an infinite rate.

    The gaps are of a gamma distribution with shape `burstiness`: exponential for 1, more even above. The last request is due at
    count / rate, so that the rate is the one asked for, as in vLLM's benchmark.
    """
    if not isfinite(rate):
        return None
    if burstiness == inf:
        return [(i + 1) / rate for i in range(count)]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), size=count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist() if count else []


class Target:
    """One server. `name` stands for it in results."""

    def __init__(self, url: str, options: TargetOptions, *, name: str = "") -> None:
        self.options = options
        self.endpoint: Endpoint = backends.read_url(url)
        self.name = name or self.endpoint.url
        self.backend: Backend = backends.find_backend(options.backend)
        self.path = backends.read_path(options.endpoint) if options.endpoint else self.backend.path
        self.headers = dict(options.headers)
        key = options.api_key or os.environ.get("WHIMBREL_API_KEY") or os.environ.get("OPENAI_API_KEY")
        if key:
            self.headers["authorization"] = f"Bearer {key}"
        backends.check_headers(self.headers)
        self.model = options.model or ""
        self.shape: Shape | None = None
        """Shape of this server's answers, once it has given one."""

    def client(self) -> httpx2.Client:
        """Return a new client for requests that are not measured. The caller closes it."""
        seconds = min(_PATIENCE, self.options.timeout)
        return httpx2.Client(headers=self.headers, timeout=seconds, verify=self.options.verify_tls, trust_env=False)

    def connect(self) -> None:
        """Find the server and its model. Raises SetupError for a server that cannot be reached or is not ready."""
        deadline = monotonic() + self.options.ready_seconds
        with self.client() as client:
            while True:
                try:
                    response = client.get(f"{self.endpoint.url}/v1/models")
                    if 503 not in (response.status_code, client.get(f"{self.endpoint.url}/health").status_code):
                        break  # servers without /health answer 404
                    reason = "it is not ready yet (503)"
                except httpx2.HTTPError as error:
                    reason = str(error) or type(error).__name__
                if monotonic() >= deadline:
                    raise SetupError(
                        f"cannot reach {self.endpoint.url}: {reason}.",
                        hint="start the server first, for example: whimbrel serve. --ready-check-timeout-sec N waits for it",
                    )
                sleep(0.2)
        if not self.model and response.status_code == 200:
            with suppress(ValueError, KeyError, IndexError, TypeError):
                self.model = str(orjson.loads(response.content)["data"][0]["id"])

    def payload(self, sample: Sample) -> bytes:
        """Return the request of a sample as bytes."""
        body = backends.make_body(self.backend, self.model, sample, dict(self.options.extra_body))
        return backends.make_payload(self.endpoint, self.path, body, self.headers)

    def ask(self, sample: Sample) -> bytes:
        """Send one request and return the body of its answer. Raises SetupError for an error or an unsuitable answer."""
        timeout = self.options.timeout
        body = backends.make_body(self.backend, self.model, sample, dict(self.options.extra_body))
        try:
            with self.client() as client:
                headers = {"content-type": "application/json"}
                response = client.post(self.endpoint.url + self.path, content=body, headers=headers, timeout=timeout)
        except httpx2.HTTPError as error:
            is_late = isinstance(error, httpx2.TimeoutException)
            reason = f" within {timeout:g} s" if is_late else f": {str(error).rstrip('.') or type(error).__name__}"
            raise SetupError(
                f"{self.name} gives no answer to the first request{reason}.",
                hint="see the server's log" + ("; --timeout waits longer" if is_late else ""),
            ) from None
        if response.status_code != 200:
            raise SetupError(
                f"{self.name}{self.path} answers the first request with {response.status_code}: {excerpt(response.content)}",
                hint=_HINTS.get(response.status_code, "see the server's log"),
            )
        self._check(sample, response)
        return response.content

    def _check(self, sample: Sample, response: httpx2.Response) -> None:
        """Learn the shape of answers. Raises SetupError for an answer that is none to the request."""
        num_texts = len(self._texts(sample)) if _MAY_CUT.isdisjoint(self.options.extra_body) else None
        try:
            self.shape = check_first(self.backend, response.headers.get("content-type", ""), response.content, num_texts)
        except SetupError as error:
            raise SetupError(f"{self.name}{self.path}: {error.message}", hint=error.hint) from None

    def _texts(self, sample: Sample) -> Sequence[str]:
        """Return the texts of a request for which there are rows in its answer: a query is one, unless it ranks the others."""
        return sample.texts if self.backend.ranks or sample.query is None else (sample.query, *sample.texts)

    def job(self, samples: Sequence[Sample], load: Load) -> Job:
        """Return the work of the client processes. All bodies are built here, before the clock starts."""
        return Job(
            self.endpoint.host,
            self.endpoint.port,
            [self.payload(sample) for sample in samples],
            num_texts=[len(self._texts(sample)) for sample in samples],
            shape=self.shape,
            schedule=arrival_times(len(samples), load.rate, seed=load.seed, burstiness=load.burstiness),
            concurrency=load.concurrency,
            timeout=self.options.timeout,
            new_connections=load.new_connections,
            duration=load.duration,
            usage=self.backend.usage,
            keep_bodies=load.keep_bodies,
            verify_tls=self.options.verify_tls if self.endpoint.is_tls else None,
        )

    def warm_up(self, samples: Sequence[Sample], load: Load) -> None:
        """Send the first sample once, then `num_warmups` times. Raises SetupError or WhimbrelError if it fails."""
        self.ask(samples[0])
        if not load.num_warmups:
            return
        closed = replace(load, rate=inf, concurrency=load.concurrency or 16, duration=None, processes=1)
        result = self.run([samples[0]] * load.num_warmups, closed)
        if result.interrupted:
            raise KeyboardInterrupt
        if result.failed:
            reason = next(filter(None, result.errors))
            raise WhimbrelError(f"{result.failed} of {load.num_warmups} warm-up requests failed: {reason}")

    def run(
        self,
        samples: Sequence[Sample],
        load: Load,
        *,
        progress: clients.Progress | None = None,
        label: str | None = None,
        tokenizer: str = "",
        notes: tuple[str, ...] = (),
    ) -> Result:
        """Run the load and return its result, also of a run that was stopped. Raises WhimbrelError."""
        processes = load.processes or clients.choose_processes(load.rate, load.concurrency, len(samples))
        reports = clients.run_load(self.job(samples, load), processes=processes, progress=progress)
        amount = sum(len(sample.texts) for sample in samples)
        setting = Setting(self.name, self.options.backend, self.model, tokenizer or self.model, amount, load, label)
        return make_result(setting, samples, reports, notes=notes)

    def rows(self, result: Result) -> dict[int, list[Float32Array]]:
        """Return the vectors or scores of the first answer to each sample of a run that kept the bodies. Raises SetupError."""
        bodies = {index: body for report in result.reports for index, body in report.bodies.items()}
        changed = sorted(index for report in result.reports for index in report.changed)
        if changed:
            raise SetupError(f"{self.name} answers request {changed[0]} differently each time.")
        return {index: backends.read_rows(self.backend, body) for index, body in bodies.items()}
