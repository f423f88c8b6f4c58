from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of two test processes that spin take each other's cores
os.environ.setdefault("WHIMBREL_HELPERS", "0")  # they spin, too

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import invented_products
from needs import lacks_bfloat16
from parity import WRITTEN, Parity
from promises import promise_of
from selection import mark_extended_cases, mark_wide_files
from serving import Server
from texts import TEXTS
from whimbrel import Engine
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.checkpoint.verified import read_results
from whimbrel.telemetry import trace

if TYPE_CHECKING:
    from exchanges import Small

pytest.register_assert_rewrite("command", "comparisons")

for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
    if signal.getsignal(name) == signal.SIG_IGN:  # by a shell's background job or nohup; servers would inherit it
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this test suite."""
    parser.addoption("--invented-products", action="store_true", help="products whose bits depend on the number of rows")
    parser.addoption("--recipes", action="store_true", help="recipes whose program is missing fail; otherwise they skip")


@pytest.fixture(scope="session", autouse=True)
def _products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Products as the machine has them, or invented ones (invented_products.py)."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--invented-products"):
            invented_products.install(patch)
        yield


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the packaged all-MiniLM-L6-v2."""
    return resolve_checkpoint(None).folder


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """MiniLM with default options."""
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def engine32() -> Iterator[Engine]:
    """MiniLM in float32."""
    with Engine(dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of MiniLM with default options. Tests that stop it, kill its processes or limit it start their own."""
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def server32() -> Iterator[Server]:
    """A server of MiniLM in float32."""
    with Server("--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    """A server of small random models of several kinds."""
    from exchanges import small_server

    with small_server(tmp_path_factory.mktemp("models")) as small:
        yield small


@pytest.fixture(scope="session")
def reference(minilm: Path) -> Any:
    """Sentence Transformers' vectors of TEXTS, float32."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm), device="cpu").encode(TEXTS)


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """Compares with a reference and says which models that verifies: see parity.py."""
    return Parity(request.node.nodeid)


@pytest.fixture(autouse=True)
def _only_the_living_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subscriptions that a test makes, such as the metrics of its app, end with the test."""
    monkeypatch.setattr(trace, "_subscribers", dict(trace._subscribers))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random weights, also those of fixtures, are the same in every run."""
    torch.manual_seed(7)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Write or check the rows that a parity test has declared, if it passes."""
    result = yield
    if isinstance(parity := pyfuncitem.funcargs.get("parity"), Parity):
        if WRITTEN in pyfuncitem.config.stash:
            pyfuncitem.config.stash[WRITTEN].extend(parity.results)
        else:
            parity.check(read_results())
    return result


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the extended cases and the wide files; skip tests that need something that this machine lacks, with the reason."""
    mark_extended_cases(items, config.args)
    mark_wide_files(items, config.args)
    for item in items:
        if item.get_closest_marker("gpu"):
            reason = None if torch.cuda.is_available() else "no CUDA device"
        else:
            reason = lacks_bfloat16() if item.get_closest_marker("bfloat16") else None
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say which promise a failing test holds. Escape lone surrogates, which cannot pass between pytest's processes."""
    report = yield
    if report.failed:
        report.sections.append(("promise", promise_of(item)))
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
