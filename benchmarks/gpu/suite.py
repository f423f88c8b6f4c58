"""The tests marked gpu, in this process: those of kernels alone, or all in eight processes. Failures are named.

In small it is those of one file.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from setting import ROOT, NeedsGpu, Row, Setting

_TESTS = ROOT / "tests"
_MARK = re.compile(r"mark\.gpu|\bDEVICES\b")
_MAX_FAILURES = 40


def run(name: str, setting: Setting) -> Iterator[Row]:
    if setting.device == "cpu" and name == "tests":
        raise NeedsGpu("without one they are skipped, as those of kernels are")
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(_TESTS.rglob("test_*.py"))}
    found = [path for path, text in texts.items() if _MARK.search(text) and (name == "tests" or _is_of_kernels(path, text))]
    found = found[:1] if setting.small else found
    junit, processes = setting.out / f"{name}.xml", 8 if name == "tests" else 0
    options = f"-m gpu -n {processes} -W default -q --tb=short -p no:cacheprovider --continue-on-collection-errors"
    pytest.main([*map(str, found), *options.split(" "), f"--junitxml={junit}"])
    yield from read(junit)


def _is_of_kernels(path: Path, text: str) -> bool:
    return path.parent.name == "model" and ("triton" in text.lower() or path.name == "test_ops.py")


def read(junit: Path) -> Iterator[Row]:
    """Return the counts of a junit file, and a row for each failure."""
    suite = next(ElementTree.parse(junit).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    yield counts | ({"wrong": "see log.txt"} if counts["failures"] or counts["errors"] else {})
    failed = [case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
    for case in failed[:_MAX_FAILURES]:
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        reason = "" if fault is None else fault.get("message", "").partition("\n")[0][:120]
        yield {"failed": f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}", "reason": reason}
