"""K1 of the catalogue, in short: `make soak` runs the same for as long as one likes, and with closer limits."""

from __future__ import annotations

import pytest

from leaks import LIMITS, Limit
from soak import Options, soak

PATIENT = {**LIMITS, "memory, MiB": Limit(1.0, 96.0), "shared segments": Limit(2.0, 64.0)}
"""Some hundred requests do not fill the caches and pools of a server; only a gross leak can be told from that."""


@pytest.mark.slow
def test_K1_mixed_load_and_a_kill() -> None:
    """Every answer right, no descriptor, thread or socket lost, all metrics add up, nothing left behind."""
    report = soak(Options(seconds=25, round_seconds=1.5, clients=4, kill_every=8, limits=PATIENT))
    assert report.failures == []
    assert report.tally.kills > 0
    assert report.tally.statuses[200] > 20
    measured = {trend.process for trend in report.trends if trend.slope == trend.slope}  # not NaN
    assert measured >= {"supervisor", "worker-0"}
