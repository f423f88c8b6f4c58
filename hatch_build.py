"""Build step: compiles the kernels for CPUs into the wheel, or says in one line why there are none."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler = runpy.run_path(str(Path(self.root) / "src/whimbrel/model/native/compile.py"))
        if (problem := compiler["compile_kernels"]()) is not None:
            self.app.display_warning(f"whimbrel: built without its kernels for CPUs, PyTorch's are used: {problem}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
            folder = "src/whimbrel/model/native"
            build_data["artifacts"] += [f"{folder}/kernels.{name}.so" for name in compiler["INSTRUCTION_SETS"]]
