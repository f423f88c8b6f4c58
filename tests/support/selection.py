"""Selection of the tests that `make test` runs.

Four markers say which tests are left to other commands:

- `wide`: a test of the files and folders in `WIDE`, which take long. `make test-all` runs it, as CI does.
- `extended`: a test that repeats a point with other inputs, or at length. `make check` runs it.
- `sample(n)`: of a test's cases, n evenly spaced ones, the first among them, run everywhere. The others are extended.
- `slow`: a test of `make soak` only.

A file or folder that the command line names is not wide, and a case that it names by its id is not extended. So
`pytest FILE::TEST[CASE]` runs that case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parent.parent
WIDE: Final = (
    *("bench", "browser", "cluster", "faults", "deploy/test_container.py", "deploy/test_prometheus.py", "deploy/test_scale.py"),
    *("checkpoint/test_chains.py", "checkpoint/test_chat_texts.py", "checkpoint/test_convert.py"),
    *("checkpoint/test_t5.py", "checkpoint/test_token_chains.py"),
    *("cli/test_cli_models.py", "client/test_client_info.py", "client/test_client_verbs.py", "client/test_truncation.py"),
    *("dialects/test_clients_in_the_wild.py", "dialects/test_programs.py"),
    *("engine/test_document_cache.py", "engine/test_int8.py"),
    *("house/test_benchmarks.py", "house/test_peers.py", "house/test_recipes.py", "house/test_suite.py"),
    *("model/test_attention_ragged.py", "model/test_maxsim_triton.py", "model/test_rowwise.py"),
    *("model/test_batch_memory.py", "model/test_fallback.py", "model/test_kernels.py", "model/test_other_tasks.py"),
    *("outputs/test_explain.py", "outputs/test_listwise.py", "outputs/test_saturation.py", "outputs/test_scores.py"),
    *("outputs/test_stored_vectors.py", "outputs/test_zero_shot.py", "tokenizer/test_pair_errors.py"),
    *("server/test_process_parts.py", "server/test_sharding.py", "server/test_tls.py", "stores/test_stores.py"),
    *("types/test_machine_limits.py",),
)
"""Files and folders of tests that take about ten seconds or more in all."""


def mark_wide_files(items: Sequence[pytest.Item], arguments: Sequence[str]) -> None:
    """Mark as wide the tests in `WIDE` whose file or folder the command line does not name."""
    named = [path for argument in arguments if (path := Path(argument.partition("::")[0]).resolve()) not in TESTS.parents]
    wide = [TESTS / name for name in WIDE]
    for item in items:
        within = (item.path, *item.path.parents)
        if any(path in within for path in wide) and not any(path in within and path != TESTS for path in named):
            item.add_marker(pytest.mark.wide)


def mark_extended_cases(items: Sequence[pytest.Item], arguments: Sequence[str]) -> None:
    """Mark as extended the cases that the samples of their tests leave out."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("sample")
        for index in range(len(same)) if marker else ():
            if index not in spaced(len(same), *marker.args) and not _is_named(same[index], arguments):  # pyright: ignore
                same[index].add_marker(pytest.mark.extended)


def spaced(total: int, count: int) -> set[int]:
    """Return `count` evenly spaced indices below `total`, or all of them; 0 is always one."""
    return set(range(total)) if total <= count else {index * total // count for index in range(count)}


def _is_named(item: pytest.Item, arguments: Sequence[str]) -> bool:
    return any(argument.endswith(item.nodeid) for argument in arguments if "[" in argument)
