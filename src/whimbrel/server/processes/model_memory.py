"""Memory of models: the bytes that engine processes take, as the kernel counts them, and the models that make room for another.

Only `process_bytes` and `measure` read files.
"""

from collections.abc import Iterable
from pathlib import Path

from whimbrel.server.processes.children import EngineChild
from whimbrel.server.processes.running_model import NoRoom, RunningModel


def process_bytes(pid: int) -> int:
    """Return the memory of a process, its part of what it shares (PSS). 0 if the system does not say."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def measure(engine: EngineChild) -> int:
    """Return the bytes that an engine takes on its device: PyTorch's count on a GPU, the process' memory on a CPU."""
    assert engine.planned is not None
    if engine.planned.plan.device != "cpu" or engine.process is None:
        return engine.device_bytes
    return process_bytes(engine.process.pid) or engine.planned.weight_bytes


def used_bytes(models: Iterable[RunningModel], device: str) -> int:
    """Return the bytes on a device that loaded models take, or are about to take."""
    return sum(engine.memory for model in models for engine in _on_device(model, device))


def next_to_unload(
    models: Iterable[RunningModel], needed: int, limit: int, device: str, *, keep: RunningModel
) -> RunningModel | None:
    """Return the model to unload next so that `needed` bytes fit beside the others, or None if they fit now.

    It is the one that was used least recently, of those that are not always kept. `keep` stays. Raises NoRoom, before any is
    unloaded, if the models that have to stay leave too little.
    """
    models = list(models)
    if used_bytes(models, device) + needed <= limit:
        return None
    others = [model for model in models if model is not keep and _on_device(model, device)]
    may_go = [
        model
        for model in others
        if model.options.keep_seconds is not None and model.state in ("ready", "unloading") and model.names[0] != keep.names[0]
    ]
    fixed = used_bytes([model for model in models if model not in may_go], device)
    if fixed + needed > limit:
        own = keep.memory + needed
        stays = f" of which {fixed - keep.memory:,} are taken by models that stay" if fixed > keep.memory else ""
        raise NoRoom(f"{keep.names[0]} takes {own:,} bytes or more; memory is {limit:,} bytes{',' if stays else ''}{stays}.")
    return min(may_go, key=lambda model: (model.state != "unloading", max(model.last_used, model.ready_since)))


def _on_device(model: RunningModel, device: str) -> list[EngineChild]:
    return [each for each in model.engines if each.memory and each.planned is not None and each.planned.plan.device == device]
