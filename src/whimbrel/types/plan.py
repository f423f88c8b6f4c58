"""Plan of how a model runs: the user's options, the card and the hardware, resolved.

Pure. Options may say "auto"; a Plan is complete, with no "auto" and no None. The CLI prints it at start and /info serves it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar, Final, Literal, TypedDict, cast

from whimbrel.errors import SetupError
from whimbrel.types.batch_memory import BatchDevice, batch_bytes
from whimbrel.types.card import FALLBACK, Card
from whimbrel.types.choices import DTYPES, MAX_BATCH_TOKENS, Dtype, TokenizerReading
from whimbrel.types.hardware import Cpu, Gpu, Hardware

CPU_BATCH_TOKENS: Final = 512
GPU_BATCH_TOKENS: Final = 16_384
PREFIX_CACHE_BYTES: Final = 2**28
_LEAST_MEMORY_PER_CACHE: Final = 8
"""The default cache of prefixes takes at most an eighth of the memory."""
_MAX_REASONS: Final = 3


class Options(TypedDict, total=False):
    """Options of an engine. Missing, None and "auto" mean the default, for limits that there is none."""

    device: str
    """"auto", "cpu", "cuda" or one of the GPUs, e.g. "cuda:1". Default: a GPU if there is one."""
    dtype: str
    """"auto", "float32", "bfloat16", "float16" (GPUs) or "int8" (CPUs with VNNI). Default: bfloat16 where the hardware is fast
    at it, else float32."""
    max_length: int | None
    """Limit in tokens per text, up to the model's positions. Default: the checkpoint's limit."""
    max_batch_tokens: int | None
    """Limit in tokens per batch."""
    max_queue_tokens: int | None
    """Limit in queued tokens, above which requests are rejected."""
    max_queue_seconds: float | None
    """Limit in seconds of the estimated wait, above which a request is rejected."""
    max_queue_bytes: int | None
    """Limit in bytes of token ids and vectors of all unanswered requests."""
    max_request_tokens: int | None
    """Limit in tokens per request."""
    matryoshka: bool
    """Allow `dimensions` although the checkpoint does not declare Matryoshka dimensions."""
    split_long: bool
    """Run texts above the limit in parts, where a request does not ask to cut them. For dense vectors. Default: False."""
    document_cache_bytes: int
    """Size in bytes of the cache of scored documents' token vectors. Default: 0, no cache."""
    prefix_cache_bytes: int | None
    """Size in bytes of the cache of texts' shared prefixes; 0: no cache. Default: 256 MiB for causal models."""
    chunked_prefill: bool | None
    """Run texts above `max_batch_tokens` in pieces, between which others run. Default: for causal models."""
    served_name: str | None
    """Name of the model for clients. Default: the checkpoint's name."""
    aliases: tuple[str, ...]
    """Further names of the model for clients."""
    adapters: Mapping[str, str]
    """Folders of LoRA adapters, as PEFT saves them, by the names by which requests choose them."""
    prompts: Mapping[str, str]
    """Texts to put before inputs, by name. They replace or join the prompts of the checkpoint's files."""
    accept_config: tuple[str, ...]
    """Keys of the checkpoint's JSON files that Whimbrel does not know, and that are known to change no vector."""
    tokenizer: str
    """Reading of the tokenizer's files: "auto", "transformers" (version 5), "transformers-4", "file" (the file as it is).
    Default: as transformers 5, but as transformers 4 where the special tokens differ and the model was made with that."""
    replica: int
    """Index of this engine among those that share the machine. Default: 0."""
    num_replicas: int
    """Number of engines that share the machine, on different GPUs or on shares of the cores. Default: 1."""


@dataclass(frozen=True, slots=True)
class Int8Quality:
    """Cosines of a model's results in int8 to those in float32, over sample texts that are measured at each load."""

    mean: float
    least: float
    num_texts: int

    GOOD: ClassVar[float] = 0.98
    """Mean cosine below which a warning is due."""

    def __str__(self) -> str:
        warning = "" if self.mean >= self.GOOD else "; low: check your own texts, or take another dtype"
        return f"cosine to float32 {self.mean:.4f}, least {self.least:.4f}, of {self.num_texts} sample texts{warning}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Complete settings of a running model. `Options` and `Hardware` explain those that they state too."""

    served_name: str
    aliases: tuple[str, ...]
    device: str
    dtype: Dtype
    num_lanes: int
    """Execution threads: one per core on a CPU, without the express lane; one on a GPU."""
    max_batch_tokens: int
    max_length: int
    max_queue_tokens: int
    """Limit in tokens that may run before a new request is done; above it the request is rejected as overload."""
    max_queue_seconds: float
    """Limit in seconds of a new request's wait, estimated from the measured rate."""
    max_queue_bytes: int
    max_request_tokens: int
    matryoshka: bool
    document_cache_bytes: int
    prefix_cache_bytes: int = 0
    batch_bytes: int = 0
    """Upper bound of the memory that a batch takes in each lane beside weights and caches; 0: unknown."""
    memory: int = 0
    """Memory of the device in bytes; 0: unknown."""
    chunked_prefill: bool = False
    """Run a text of more than `max_batch_tokens` tokens in pieces of that size. On a GPU others run between them."""
    split_long: bool = False
    tokenizer: TokenizerReading = "transformers"
    tokenizer_note: str = ""
    """Example of a text of which tokenizer.json, run as it is, makes other ids; empty if none is known."""
    accept_config: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    commit: str = ""
    """Commit of the hub's repository that the checkpoint is, or empty."""
    revision: str = ""
    """Name of the state of the files: the commit, or a fingerprint of a folder's files; empty until they are loaded."""
    int8: Int8Quality | None = None
    """Quality in int8; None for other dtypes, and until the model is loaded."""
    cpu: Cpu = field(default_factory=Cpu)
    kernels: str = ""
    torch: str = "unknown"
    torch_note: str = ""
    device_note: str = ""
    """Reason why a GPU that seems to be there is not used, or not as it could be; empty: none."""
    same_bits: bool | None = None
    """A text has the same bits alone and in any batch. None on a CPU until the loaded weights have been tried."""
    same_bits_reason: str = ""

    def with_same_bits(self, unstable: Sequence[str]) -> Plan:
        """Return the plan after loading. `unstable` lists the products whose bits depend on the batch."""
        if self.same_bits is not None:
            return self
        more = [f"and {len(unstable) - _MAX_REASONS} more"] if len(unstable) > _MAX_REASONS else []
        return replace(self, same_bits=not unstable, same_bits_reason="; ".join([*unstable[:_MAX_REASONS], *more]))


def make_plan(options: Options, card: Card, hardware: Hardware) -> Plan:
    """Resolve the options. Raises SetupError for one that does not fit card or machine, TypeError for an unknown one."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unexpected option: {', '.join(sorted(unknown))}")
    device = _device(options.get("device", "auto"), hardware, options.get("replica", 0))
    on_cpu = device == "cpu"
    memory = hardware.memory if on_cpu else next(gpu.memory for gpu in hardware.gpus if gpu.name == device)
    gpus = [] if on_cpu else _gpus_of_replicas(options, hardware)
    dtype = _dtype(options.get("dtype", "auto"), card, gpus=gpus, hardware=hardware)
    usual = CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS
    max_batch_tokens = _limit(options, "max_batch_tokens", default=usual, most=MAX_BATCH_TOKENS)
    positions = card.encoder.max_positions
    hint = f"--max-length takes 1 to {positions:,}, the model's positions"
    max_length = _limit(options, "max_length", default=card.max_length, most=positions, hint=hint)
    chunked_prefill = _chunked_prefill(options.get("chunked_prefill"), card)
    return Plan(
        served_name=options.get("served_name") or card.name,
        aliases=options.get("aliases", ()),
        device=device,
        dtype=dtype,
        num_lanes=max(1, hardware.num_cores // options.get("num_replicas", 1)) if on_cpu else 1,
        max_batch_tokens=max_batch_tokens,
        max_length=max_length,
        max_queue_tokens=_limit(options, "max_queue_tokens"),
        max_queue_seconds=_seconds("max_queue_seconds", options.get("max_queue_seconds")),
        max_queue_bytes=_limit(options, "max_queue_bytes"),
        max_request_tokens=_limit(options, "max_request_tokens"),
        matryoshka=options.get("matryoshka", False) or card.matryoshka,
        document_cache_bytes=_limit(options, "document_cache_bytes", default=0, least=0),
        prefix_cache_bytes=_prefix_cache_bytes(options, card, memory),
        batch_bytes=batch_bytes(
            card,
            BatchDevice(4 if dtype in ("float32", "int8") else 2, on_cpu, bool(hardware.kernels)),
            max_batch_tokens=max_batch_tokens,
            max_length=max_length,
            in_pieces=chunked_prefill,
        ),
        memory=memory,
        chunked_prefill=chunked_prefill,
        split_long=options.get("split_long", False),
        tokenizer=card.tokenizer.reading,
        accept_config=options.get("accept_config", ()),
        adapters=options.get("adapters", {}),
        cpu=hardware.cpu,
        kernels=hardware.kernels if on_cpu else "",
        torch=hardware.torch,
        torch_note=hardware.torch_note,
        device_note=_device_note(options, gpus, hardware),
        same_bits=None if on_cpu else False,
        same_bits_reason="" if on_cpu else "a GPU's kernels are chosen by the size of a batch",
    )


def _device(value: str, hardware: Hardware, replica: int) -> str:
    devices = ("cpu", *(gpu.name for gpu in hardware.gpus))
    if value in ("auto", "cuda") and hardware.gpus:
        return hardware.gpus[replica % len(hardware.gpus)].name
    if value == "auto":
        return "cpu"
    if value in devices:
        return value
    reason = f": {hardware.gpu_note}" if value.startswith("cuda") and hardware.gpu_note else ""
    hint = f"--device takes auto or one of: {', '.join(devices)}{'' if hardware.gpus else ', which serves every model, slower'}"
    raise SetupError(f"no device {value!r} here{reason}.", hint=hint)


def _gpus_of_replicas(options: Options, hardware: Hardware) -> list[Gpu]:
    """Return the GPUs that run the model, in this or another process."""
    device = options.get("device", "auto")
    if device not in ("auto", "cuda"):
        return [gpu for gpu in hardware.gpus if gpu.name == device]
    replicas = {options.get("replica", 0), *range(options.get("num_replicas", 1))}
    return [hardware.gpus[number] for number in sorted({replica % len(hardware.gpus) for replica in replicas})]


def _device_note(options: Options, gpus: Sequence[Gpu], hardware: Hardware) -> str:
    if not gpus:
        is_expected = hardware.gpu_driver and options.get("device", "auto") == "auto"
        return f"no GPU is used: {hardware.gpu_note}" if is_expected and hardware.gpu_note else ""
    without = [gpu.name for gpu in gpus if not gpu.bfloat16]
    if 0 < len(without) < len(gpus) and options.get("dtype", "auto") == "auto":
        return f"float32 on all GPUs, so that they give the same numbers: {', '.join(without)} cannot multiply bfloat16"
    return hardware.gpu_note


def _dtype(value: str, card: Card, *, gpus: Sequence[Gpu], hardware: Hardware) -> Dtype:
    cpu, on_cpu = hardware.cpu, not gpus
    if value == "auto":
        fast = hardware.fast_bfloat16 if on_cpu else all(gpu.bfloat16 for gpu in gpus)
        return "bfloat16" if fast else "float32"
    if value == "bfloat16" and on_cpu and cpu.bfloat16 == "none":
        hint = "--dtype takes auto or float32 here; bfloat16 needs AVX-512"
        raise SetupError(f"dtype 'bfloat16' is not supported on this CPU, {cpu}.", hint=hint)
    if value == "int8" and on_cpu:
        return _int8(card, hardware)
    if value == "float16" and card.encoder.family.startswith("t5"):
        reason = "whose hidden numbers grow beyond 65,504, float16's largest"
        hint = "--dtype takes auto, float32 or bfloat16, in which T5 was trained"
        raise SetupError(f"dtype 'float16' is not supported for T5, {reason}.", hint=hint)
    for dtype in DTYPES:
        if value == dtype and dtype != ("float16" if on_cpu else "int8"):
            return dtype
    on_this_cpu = ["auto", "float32", *(["bfloat16"] if cpu.bfloat16 != "none" else []), *(["int8"] if cpu.vnni else [])]
    place, choices = ("the CPU", on_this_cpu) if on_cpu else ("a GPU", ["auto", "float32", "bfloat16", "float16"])
    raise SetupError(f"dtype {value!r} is not supported on {place}.", hint=f"--dtype takes {', '.join(choices)}")


def _int8(card: Card, hardware: Hardware) -> Literal["int8"]:
    fast = "bfloat16" if hardware.fast_bfloat16 else "float32"
    if not hardware.cpu.vnni:
        hint = f"--dtype takes auto, which is {fast} here"
        raise SetupError(f"dtype 'int8' is not supported on this CPU, {hardware.cpu}, which has no VNNI.", hint=hint)
    reasons = {
        "a model that transformers runs": card.encoder.family == FALLBACK,
        "a model without linear layers": card.encoder.family == "static",
        "GLiNER: it is compared by sample texts, which have no labels": card.span_prompt is not None,
    }
    if kind := next((kind for kind, is_refused in reasons.items() if is_refused), None):
        raise SetupError(f"dtype 'int8' is not supported for {kind}.", hint=f"--dtype takes {fast}")
    return "int8"


def _prefix_cache_bytes(options: Options, card: Card, memory: int) -> int:
    value, size = options.get("prefix_cache_bytes"), _limit(options, "prefix_cache_bytes", default=PREFIX_CACHE_BYTES, least=0)
    if value is not None and memory and size > memory:
        hint = "it takes 0, which turns the cache off, up to a part of the memory that the model leaves free"
        raise SetupError(f"prefix_cache_bytes is {size:,}; the device has {memory:,} bytes of memory.", hint=hint)
    towers = card.towers or (card,)
    if not any(tower.encoder.keeps_keys for tower in towers):
        if value:
            hint = "leave out prefix_cache_bytes: every text is computed whole"
            raise SetupError(f"{card.name} shares no prefixes: {_why_whole(towers[0])}.", hint=hint)
        return 0
    return min(size, memory // _LEAST_MEMORY_PER_CACHE) if value is None and memory else size


def _chunked_prefill(value: bool | None, card: Card) -> bool:
    reasons = [_why_whole(tower) for tower in card.towers or (card,) if not tower.encoder.keeps_keys]
    if value and reasons:
        hint = "leave out chunked_prefill: a text above max_batch_tokens is then a batch of its own"
        raise SetupError(f"{card.name} cannot run a text in pieces: {reasons[0]}.", hint=hint)
    return not reasons if value is None else value


def _why_whole(card: Card) -> str:
    encoder = card.encoder
    if not encoder.layers:
        return "its architecture has no layers of Whimbrel's own"
    if encoder.causal:
        return "its short convolutions look at the tokens before each piece"
    return "its tokens attend to those after them"


def max_length_for(plan: Plan, card: Card, tower: Card) -> int:
    """Return the limit in tokens per text of one of the card's towers: its own, unless the user has set one."""
    return tower.max_length if plan.max_length == card.max_length else min(plan.max_length, tower.encoder.max_positions)


def _limit(
    options: Options, name: str, *, default: int = sys.maxsize, least: int = 1, most: float = inf, hint: str | None = None
) -> int:
    value: int | None = cast(Mapping[str, Any], options).get(name)
    if value is None:
        return default
    if not least <= value <= most:
        takes = f"it takes {least} or more" if most == inf else f"it takes {least} to {most:,}"
        raise SetupError(f"{name} is {value:,}.", hint=hint or takes)
    return value


def _seconds(name: str, value: float | None) -> float:
    if value is None:
        return float(sys.maxsize)  # not infinity, which JSON cannot say
    if not value > 0:
        raise SetupError(f"{name} is {value:g}.", hint="it takes more than 0")
    return value
