"""The setting of all steps, and the rows that they give."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

ROOT: Final = Path(__file__).parents[2]

Row = dict[str, Any]
"""Names and values. The value of "wrong" says why the row is."""


class NeedsGpu(Exception):
    """There is no GPU, for the stated reason, and without one the step would show nothing or not end."""


@dataclass(frozen=True)
class Setting:
    """Place of files, and sizes."""

    out: Path
    small: bool
    """Sizes to try the step itself, also on a CPU."""

    @cached_property
    def device(self) -> str:
        """The GPU, or a CPU for small sizes. Raises NeedsGpu."""
        from whimbrel.model.gpus import find_gpus

        gpus, problem = find_gpus()
        if gpus:
            return gpus[0].device
        if not self.small:
            raise NeedsGpu(problem)
        return "cpu"

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"


@contextmanager
def wrapped_by(name: str) -> Iterator[None]:
    """Let engines that are loaded within have the wrapper of this folder that is called `module:callable`."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, {"WHIMBREL_RUNNER": name, "PYTHONPATH": path}):
        yield
