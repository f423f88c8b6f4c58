"""Build step: compiles the kernels for CPUs into the wheel, and says in one line why some or all are missing."""

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
        problem, made = compiler["compile_kernels"](), compiler["compiled"]()
        if problem is not None:
            lost = "some of its kernels for CPUs" if made else "its kernels for CPUs, PyTorch's are used"
            self.app.display_warning(f"whimbrel: built without {lost}: {problem}")
        if not made:
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
            folder = "src/whimbrel/model/native"
            build_data["artifacts"] += [f"{folder}/kernels.{name}.so" for name in made]
