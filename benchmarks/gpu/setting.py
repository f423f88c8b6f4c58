"""The setting of all steps, and the rows that they give."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]

Row = dict[str, Any]
"""Names and values. The value of "wrong" says why the row is."""


class NeedsGpu(Exception):
    """There is no GPU, and without one the step would show nothing or not end."""


@dataclass(frozen=True)
class Setting:
    """Place of files, and sizes."""

    out: Path
    small: bool
    """Sizes to try the step itself, also on a CPU."""

    @cached_property
    def device(self) -> str:
        """The GPU, or a CPU for small sizes. Raises NeedsGpu."""
        import torch

        if torch.cuda.is_available():
            return "cuda:0"
        if not self.small:
            raise NeedsGpu
        return "cpu"

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"
