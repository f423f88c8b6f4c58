"""Steps of the benchmark of one GPU, in the order in which they are worth having if time runs out, and their estimates.

The sum of the estimates is the time of one run. They are for an H200 with 16 cores and have not been checked on one.
"""

from typing import Final, NamedTuple

SECONDS: Final = 420
"""Time of a whole run."""
ROOM: Final = 10.0
"""Seconds of it that are kept for a step that must be stopped, and for the table."""


class Step(NamedTuple):
    """A part of the run, in a process of its own. Its limit is twice its estimate."""

    name: str
    seconds: int
    """Estimate. A step is not begun with less time left."""
    module: str
    gives: str


STEPS: Final = (
    Step("facts", 12, "facts", "versions, card, driver, compiler, bandwidth of copies, peak of products"),
    Step("smoke", 25, "smoke", "cosines of seven kinds of models to transformers or Sentence Transformers"),
    Step("kernel-tests", 25, "suite", "pytest -m gpu of kernels, in one process"),
    Step("tests", 75, "suite", "pytest -m gpu of all files, in eight processes"),
    Step("kernels", 25, "kernels", "microseconds of kernels, and the share of what bytes and products allow"),
    Step("engines", 70, "engines", "tokens/s, stages and launches with ready-made ids; latency of one text; top kernels"),
    Step("rerank", 40, "workloads", "the seed's workload on our server: jina-colbert-v2's shape"),
    Step("token-vectors", 40, "workloads", "the seed's workload on our server: Qwen3-Embedding-0.6B's shape"),
    Step("gritlm", 55, "workloads", "the seed's workload on our server: GritLM-7B's shape, drawn on the device"),
    Step("host", 40, "host", "the server with a runner that computes nothing, 2, 4 and 8 workers; also without a GPU"),
)


def table_of_steps() -> str:
    """Return the steps as text, with the sum of their estimates."""
    lines = [f"{step.seconds:4} s  {step.name:13}  {step.gives}" for step in STEPS]
    return "\n".join([*lines, f"{sum(step.seconds for step in STEPS):4} s  in all"])
