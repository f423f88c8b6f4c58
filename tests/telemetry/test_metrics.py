"""Metrics of one process, and of several that count into one directory and may die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from whimbrel.errors import SetupError
from whimbrel.telemetry import metrics, trace
from whimbrel.telemetry.trace import RequestFinished

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

RECORD = RequestFinished("id", "POST", "/x", "/x", "", 200, "ok", model="m", num_texts=2, num_tokens=5, seconds=0.5)
PROCESS = """
import os, signal, sys
from pathlib import Path
from whimbrel.telemetry import metrics, trace
from whimbrel.telemetry.trace import RequestFinished

metrics.use_directory(Path(sys.argv[1]), sys.argv[2])
page = metrics.Metrics(["m"])
for line in sys.stdin:
    eval(line)
sys.stdout.buffer.write(page.render()[0])
"""


def in_process(folder: Path, identity: str, *lines: str, code: int = 0) -> Samples:
    """Run some lines in a process of this identity, and return what it renders then."""
    command = [sys.executable, "-c", PROCESS, str(folder), identity]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return samples(done.stdout)


def samples(text: str) -> Samples:
    families = parse_text(text)
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def finished(outcome: str = "ok", status: int = 200) -> str:
    record = f"'id', 'POST', '/x', '/x', '', {status}, '{outcome}', model='m', num_texts=2, num_tokens=5, seconds=0.5"
    return f"trace.report(RequestFinished({record}))"


def received(route: str = "/x") -> str:
    return f"trace.report(trace.RequestStarted('{route}'))"


def test_processes_count_together_and_a_restart_goes_on(tmp_path: Path) -> None:
    in_process(tmp_path, "worker-0", received(), finished(), "trace.count('retries', 2, model='m')")
    in_process(tmp_path, "worker-1", received(), finished(), "trace.gauge('queue_tokens', 30, model='m')")
    in_process(
        tmp_path, "engine-0-0", "trace.observe('compute', 0.25, model='m')", "trace.observe('batch_tokens', 100, model='m')"
    )
    found = in_process(tmp_path, "worker-0", received(), finished("invalid", 400), "trace.gauge('queue_tokens', 5, model='m')")
    assert value(found, "whimbrel_requests_received_total", route="/x") == 3
    assert value(found, "whimbrel_requests_total", route="/x", model="m", outcome="ok", status="200") == 2
    assert value(found, "whimbrel_requests_total", route="/x", model="m", outcome="invalid", status="400") == 1
    assert value(found, "whimbrel_requests_in_flight", route="/x") == 0
    assert value(found, "whimbrel_request_retries_total", model="m") == 2
    assert value(found, "whimbrel_batch_halvings_total", model="m") == 0
    assert value(found, "whimbrel_tokens_total", model="m") == 15
    assert value(found, "whimbrel_queue_tokens", model="m") == 35
    assert value(found, "whimbrel_stage_seconds_sum", stage="compute", model="m") == 0.25
    assert value(found, "whimbrel_batch_tokens_bucket", model="m", le="128.0") == 1
    assert value(found, "whimbrel_batch_tokens_bucket", model="m", le="64.0") == 0
    assert value(found, "whimbrel_request_seconds_count", route="/x", model="m") == 3
    files = {file.name for file in tmp_path.iterdir()}
    assert len(files) == 3 * 3  # counts, gauges and the pid of each identity, however often it was started


def test_what_a_killed_process_had_under_way_is_lost(tmp_path: Path) -> None:
    die = "os.kill(os.getpid(), signal.SIGKILL)"
    lines = [received(), received(), received(), received("/y"), finished(), "trace.gauge('queue_tokens', 30, model='m')"]
    in_process(tmp_path, "worker-0", *lines, die, code=-signal.SIGKILL)
    before = in_process(tmp_path, "supervisor")
    assert value(before, "whimbrel_requests_in_flight", route="/x") == 2
    assert value(before, "whimbrel_queue_tokens", model="m") == 30

    forgotten = in_process(tmp_path, "supervisor", "metrics.process_ended('worker-0')")
    assert value(forgotten, "whimbrel_requests_in_flight", route="/x") is None
    assert value(forgotten, "whimbrel_queue_tokens", model="m") is None
    assert value(forgotten, "whimbrel_requests_received_total", route="/x") == 3

    for _ in range(2):  # a second restart finds nothing more to settle
        after = in_process(tmp_path, "worker-0")
        assert value(after, "whimbrel_requests_total", route="/x", model="", outcome="lost", status="0") == 2
        assert value(after, "whimbrel_requests_total", route="/y", model="", outcome="lost", status="0") == 1
        assert value(after, "whimbrel_key_requests_total", key="none", model="", outcome="lost") == 3
        assert value(after, "whimbrel_requests_received_total", route="/x") == 3
        assert not value(after, "whimbrel_requests_in_flight", route="/x")


def test_processes_are_seen(tmp_path: Path) -> None:
    (tmp_path / "worker-7.pid").write_text(str(os.getpid()))
    (tmp_path / "worker-8.pid").write_text("99999999")
    found = in_process(tmp_path, "worker-0")
    for process in ("worker-0", "worker-7"):
        assert (value(found, "process_resident_memory_bytes", process=process) or 0) > 10e6
        assert (value(found, "process_cpu_seconds_total", process=process) or 0) > 0
        assert (value(found, "process_open_fds", process=process) or 0) > 2
    assert value(found, "process_open_fds", process="worker-8") is None


def test_the_files_are_as_large_as_they_will_be(tmp_path: Path) -> None:
    """Written to the disk at the start: a full disk refuses to start a server, and does not kill one that runs."""
    in_process(tmp_path, "worker-0", received())
    for file in tmp_path.glob("*.db"):
        assert file.stat().st_blocks * 512 >= file.stat().st_size > 100_000


def test_what_killed_servers_leave_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import time; from whimbrel.telemetry import metrics\nwith metrics.directory() as folder: print(folder, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed, living = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2))
    with killed, living:
        assert killed.stdout is not None
        assert living.stdout is not None
        left, used = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        killed.kill()
        killed.wait()
        with metrics.directory() as own:
            assert left.exists()  # it is young: its server may be about to lock it
        for folder in (left, used):
            os.utime(folder, (0, 0))
        with metrics.directory() as own:
            assert set(tmp_path.iterdir()) == {used, own}
        assert list(tmp_path.iterdir()) == [used]
        living.kill()


def test_a_trap_among_the_temporary_files_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, make in (("fifo", os.mkfifo), ("folder", Path.mkdir), ("link", lambda path: path.symlink_to("/dev/zero"))):
        (tmp_path / f"whimbrel-metrics-{name}").mkdir()
        make(tmp_path / f"whimbrel-metrics-{name}" / "lock")  # pyright: ignore[reportArgumentType, reportCallIssue]
        os.utime(tmp_path / f"whimbrel-metrics-{name}", (0, 0))
    with metrics.directory() as own:
        assert own.exists()


def test_no_place_for_temporary_files_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with pytest.raises(SetupError, match="no place for temporary files"), metrics.directory():
        pass


def test_a_place_that_cannot_be_written_is_a_setup_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(metrics, "_own_files", None)
    monkeypatch.setenv(metrics.DIRECTORY, "")
    with pytest.raises(SetupError, match="cannot keep metrics"):
        metrics.use_directory(tmp_path / "file", "worker-0")
    for identity in ("", "a_b", "../x", "A"):
        with pytest.raises(ValueError, match="identity"):
            metrics.use_directory(tmp_path, identity)


@pytest.mark.parametrize(
    ("tenant", "key"), [("", "none"), ("key1", "key1"), ("key1000", "key1000"), ("key1001", "other"), ("unknown", "other")]
)
def test_requests_are_counted_by_the_name_of_their_key(tenant: str, key: str) -> None:
    page = metrics.Metrics(["m"], [f"key{number}" for number in range(1, 2001)])
    for outcome in ("ok", "overloaded"):
        tokens = 5 if outcome == "ok" else 0
        trace.report(structs.replace(RECORD, tenant=tenant, outcome=outcome, num_tokens=tokens))
    found = samples(page.render()[0].decode())
    page.close()
    assert value(found, "whimbrel_key_requests_total", key=key, model="m", outcome="ok") == 1
    assert value(found, "whimbrel_key_requests_total", key=key, model="m", outcome="overloaded") == 1
    assert value(found, "whimbrel_key_tokens_total", key=key, model="m") == 5


def test_a_server_of_one_process() -> None:
    page = metrics.Metrics(["m"])
    assert not page.shared
    trace.report(trace.RequestStarted("/x"))
    trace.report(RECORD)
    found = samples(page.render()[0].decode())
    assert value(found, "whimbrel_requests_received_total", route="/x") == 1
    assert value(found, "whimbrel_tokens_total", model="m") == 5
    assert (value(found, "process_resident_memory_bytes", process="server") or 0) > 10e6
    page.close()
    trace.report(trace.RequestStarted("/x"))
    assert value(samples(page.render()[0].decode()), "whimbrel_requests_received_total", route="/x") == 1


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", "application/openmetrics-text; version=1.0.0; q=0.9, text/plain"])
def test_the_page_comes_in_the_form_that_is_asked_for(accept: str) -> None:
    page = metrics.Metrics(["m"])
    trace.report(trace.RequestStarted("/x"))
    trace.report(RECORD)
    trace.observe("batch_seqs", 3, model="m")
    content, content_type = page.render(accept)
    page.close()
    openmetrics = "openmetrics" in accept
    families = list((parse_openmetrics if openmetrics else parse_text)(content.decode()))
    assert content_type.startswith("application/openmetrics-text" if openmetrics else "text/plain")
    assert content.endswith(b"# EOF\n") == openmetrics
    assert {family.name for family in families} >= {"whimbrel_requests", "whimbrel_batch_seqs", "whimbrel_requests_in_flight"}


def test_every_name_is_documented() -> None:
    page = metrics.Metrics(["m"])
    trace.observe("read", 1)
    names = {family.name for family in parse_openmetrics(page.render("application/openmetrics-text")[0].decode())}
    page.close()
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert {name for name in names if f"`{name}" not in documented} == set()


def test_every_event_has_a_metric() -> None:
    from typing import get_args

    page = metrics.Metrics()
    for name in (*get_args(trace.Stage), *get_args(trace.Size)):
        trace.observe(name, 1, model="m")
    for name in get_args(trace.Count):
        trace.count(name, model="m")
    for name in get_args(trace.GaugeName):
        trace.gauge(name, 1, model="m")
    text = page.render()[0].decode()
    page.close()
    counted = set(re.findall(r"^(whimbrel_\w+_total)\{", text, re.MULTILINE))
    assert len(counted) == len(get_args(trace.Count))
    assert text.count("_count{") == len(get_args(trace.Stage)) + len(get_args(trace.Size))
