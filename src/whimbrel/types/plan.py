"""Options (what the user said) + Card (what the checkpoint says) + Hardware -> Plan (what will happen).

Pure. Options may say "auto"; a Plan is complete: no "auto", no None. It is printed at start and served at /info.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, TypedDict

from whimbrel.errors import SetupError
from whimbrel.types.card import Card
from whimbrel.types.hardware import Cpu, Hardware

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
DTYPES: Final = ("float32", "bfloat16", "float16")

CPU_BATCH_TOKENS: Final = 512
GPU_BATCH_TOKENS: Final = 16_384
MAX_BATCH_TOKENS: Final = 2**20
_MAX_REASONS: Final = 3


@dataclass(frozen=True, slots=True)
class Options:
    """What the user said about running a model. None and "auto": as it suits the checkpoint and the machine."""

    device: str = "auto"
    dtype: str = "auto"
    max_length: int | None = None
    """Tokens per text, up to the model's positions."""
    max_batch_tokens: int | None = None
    max_queue_tokens: int | None = None
    """Tokens that may wait before requests are refused; None: any number."""
    max_queue_seconds: float | None = None
    """How long a request may have to wait, by the measured rate, before it is refused; None: any time."""
    max_queue_bytes: int | None = None
    """Bytes of token ids and vectors that all unanswered requests may hold; None: any number."""
    max_request_tokens: int | None = None
    """Tokens of one request; None: any number."""
    matryoshka: bool = False
    """Allow `dimensions` though the checkpoint does not say that its vectors may be cut."""
    document_cache_bytes: int = 0
    """For token vectors of documents that were compared, which are then not computed again; 0: none are kept."""
    served_name: str | None = None
    aliases: tuple[str, ...] = ()
    """More names that clients may call the model."""
    replica: int = 0
    num_replicas: int = 1
    """Engines that share the machine with this one, itself included: they take different GPUs, or share the cores."""


class EngineOptions(TypedDict, total=False):
    """The fields of Options, as keyword arguments."""

    device: str
    dtype: str
    max_length: int | None
    max_batch_tokens: int | None
    max_queue_tokens: int | None
    max_queue_seconds: float | None
    max_queue_bytes: int | None
    max_request_tokens: int | None
    matryoshka: bool
    document_cache_bytes: int
    served_name: str | None
    aliases: tuple[str, ...]
    replica: int
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is run."""

    served_name: str
    aliases: tuple[str, ...]
    device: str
    dtype: Dtype
    num_lanes: int
    """Execution threads: one per core on a CPU, one on a GPU."""
    max_batch_tokens: int
    """Tokens in one batch of one lane; a longer text runs alone."""
    max_length: int
    max_queue_tokens: int
    """Tokens that may run before a request is done; beyond, it is refused as overload."""
    max_queue_seconds: float
    """The same in seconds, by the measured rate."""
    max_queue_bytes: int
    """Bytes of token ids and vectors that unanswered requests may hold."""
    max_request_tokens: int
    matryoshka: bool
    document_cache_bytes: int
    """For token vectors of documents that were compared; 0: none are kept."""
    cpu: Cpu = field(default_factory=Cpu)
    """The processor, as far as this process may use it."""
    same_bits: bool | None = None
    """Whether a text has the same bits alone and in any batch. On a CPU the products are tried when the weights are loaded:
    None until then."""
    same_bits_reason: str = ""
    """Why it has not, if so."""

    def with_same_bits(self, unstable: Sequence[str]) -> Plan:
        """The plan once the weights are loaded; `unstable` are the parts of the model that give other bits in other batches."""
        if self.same_bits is not None:
            return self
        more = [f"and {len(unstable) - _MAX_REASONS} more"] if len(unstable) > _MAX_REASONS else []
        return replace(self, same_bits=not unstable, same_bits_reason="; ".join([*unstable[:_MAX_REASONS], *more]))


def make_plan(options: Options, card: Card, hardware: Hardware) -> Plan:
    """Resolve every "auto". Raises SetupError where an option does not fit the card or the machine."""
    device = _device(options.device, hardware, options.replica)
    on_cpu = device == "cpu"
    return Plan(
        served_name=options.served_name or card.name,
        aliases=options.aliases,
        device=device,
        dtype=_dtype(options.dtype, on_cpu=on_cpu, hardware=hardware),
        num_lanes=max(1, hardware.num_cores // options.num_replicas) if on_cpu else 1,
        max_batch_tokens=_max_batch_tokens(options.max_batch_tokens, on_cpu=on_cpu),
        max_length=_max_length(options.max_length, card),
        max_queue_tokens=_limit("max_queue_tokens", options.max_queue_tokens),
        max_queue_seconds=_seconds("max_queue_seconds", options.max_queue_seconds),
        max_queue_bytes=_limit("max_queue_bytes", options.max_queue_bytes),
        max_request_tokens=_limit("max_request_tokens", options.max_request_tokens),
        matryoshka=options.matryoshka or card.matryoshka,
        document_cache_bytes=_limit("document_cache_bytes", options.document_cache_bytes, least=0),
        cpu=hardware.cpu,
        same_bits=None if on_cpu else False,
        same_bits_reason="" if on_cpu else "a GPU's kernels are chosen by the size of a batch",
    )


def _device(wanted: str, hardware: Hardware, replica: int) -> str:
    known = ("cpu", *hardware.gpus)
    if wanted in ("auto", "cuda") and hardware.gpus:
        return hardware.gpus[replica % len(hardware.gpus)]
    if wanted == "auto":
        return "cpu"
    if wanted in known:
        return wanted
    raise SetupError(f"no device {wanted!r} here.", hint=f"--device takes auto or one of: {', '.join(known)}")


def _dtype(wanted: str, *, on_cpu: bool, hardware: Hardware) -> Dtype:
    cpu = hardware.cpu
    if wanted == "auto":
        native = cpu.bfloat16 == "native" if on_cpu else hardware.gpu_bfloat16
        return "bfloat16" if native else "float32"
    if wanted == "bfloat16" and on_cpu and cpu.bfloat16 == "none":
        raise SetupError(
            f"dtype 'bfloat16' is not supported on this CPU, {cpu}.",
            hint="--dtype takes auto or float32 here; bfloat16 needs AVX-512",
        )
    for dtype in DTYPES:
        if wanted == dtype and not (on_cpu and dtype == "float16"):
            return dtype
    on_this_cpu = ("auto", "float32", "bfloat16") if cpu.bfloat16 != "none" else ("auto", "float32")
    choices = on_this_cpu if on_cpu else ("auto", *DTYPES)
    raise SetupError(
        f"dtype {wanted!r} is not supported on {'the CPU' if on_cpu else 'a GPU'}.", hint=f"--dtype takes {', '.join(choices)}"
    )


def _max_batch_tokens(wanted: int | None, *, on_cpu: bool) -> int:
    if wanted is None:
        return CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS
    if not 1 <= wanted <= MAX_BATCH_TOKENS:
        raise SetupError(f"max_batch_tokens is {wanted:,}.", hint=f"--max-batch-tokens takes 1 to {MAX_BATCH_TOKENS:,}")
    return wanted


def _max_length(wanted: int | None, card: Card) -> int:
    limit = card.encoder.max_positions
    if wanted is None:
        return card.max_length
    if not 1 <= wanted <= limit:
        raise SetupError(f"max_length is {wanted:,}.", hint=f"--max-length takes 1 to {limit:,}, the model's positions")
    return wanted


def max_length_for(plan: Plan, card: Card, tower: Card) -> int:
    """Tokens per text in one of the card's towers: its own limit, unless the user has set one."""
    return tower.max_length if plan.max_length == card.max_length else min(plan.max_length, tower.encoder.max_positions)


def _limit(name: str, wanted: int | None, least: int = 1) -> int:
    if wanted is None:
        return sys.maxsize
    if wanted < least:
        raise SetupError(f"{name} is {wanted:,}.", hint=f"it takes {least} or more")
    return wanted


def _seconds(name: str, wanted: float | None) -> float:
    if wanted is None:
        return float(sys.maxsize)  # not infinity, which JSON cannot say
    if not wanted > 0:
        raise SetupError(f"{name} is {wanted:g}.", hint="it takes more than 0")
    return wanted
