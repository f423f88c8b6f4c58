"""Classes of transformers, in versions of which some lack a class or compute another thing."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

Gemma2PreTrainedModel._supports_sdpa = False  # which in version 5.17 leaves out the cap of scores


def reference_class(name: str) -> Any:
    """Return a class of transformers. Skips the test if the installed version has none of this name."""
    found = getattr(transformers, name, None)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return found
