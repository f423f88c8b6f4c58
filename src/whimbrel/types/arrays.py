"""Array types."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32Array: TypeAlias = NDArray[np.float32]

Int32Array: TypeAlias = NDArray[np.int32]

Int64Array: TypeAlias = NDArray[np.int64]

IntArray: TypeAlias = NDArray[np.integer]
"""Integers of any width."""
