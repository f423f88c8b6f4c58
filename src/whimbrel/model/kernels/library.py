"""Libraries of our own kernels: packed products, ragged attention, norms, gates, tables, means.

There is one for each instruction set, compiled when Whimbrel is built, and called through ctypes, which lets other
threads run. The most capable library is used that the processor runs and the build has made. WHIMBREL_KERNELS may name a
lesser one. A row or a seq has the same bits in any batch. `kernels()` is None where there are none: another processor, no
compiler at the build, or WHIMBREL_KERNELS=off. Callers then use PyTorch's operators.
"""

import ctypes
import logging
import os
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from whimbrel.errors import SetupError
from whimbrel.model.cpu import cpu
from whimbrel.model.kernels import structs
from whimbrel.model.native.compile import INSTRUCTION_SETS, fingerprint, library, sources_of
from whimbrel.types.arrays import Int64Array
from whimbrel.types.hardware import Cpu
from whimbrel.types.heads import Activation

Kind: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]
"""Numbers that a product multiplies. Sums are float32, of int8 exact.

float16: rows and columns are multiplied with powers of 2, so that nothing overflows, and sums of 64 products are float16."""

FUSED: Final[Mapping[Activation, int]] = {"identity": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}
"""Activations that products and gates apply, with their numbers in C++."""

KIND_NUMBERS: Final[Mapping[Kind, int]] = {"float32": 0, "bfloat16": 1, "int8": 2, "float16": 3}
"""Numbers of the kinds in C++."""
_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "has": (_INT, (_INT,)),
    "panel": (_LONG, ()),
    "units": (_LONG, (_INT, _LONG)),
    "pack": (None, (_INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER)),
    "linear": (_INT, (_POINTER, _POINTER, _INT, _LONG, _LONG, _POINTER, _INT, _LONG)),
    "lead": (_INT, ()),
    **dict.fromkeys(("leave", "dismiss", "help"), (None, ())),
    "attend": (_INT, (_POINTER,)),
    "norm": (None, (_POINTER, _POINTER, _POINTER, _INT, _LONG, _LONG, _POINTER)),
    "norm_and_rotate": (_INT, (_POINTER, _INT, *[_LONG] * 4, _POINTER, ctypes.c_double, _POINTER, _POINTER)),
    "embed": (_INT, (_POINTER, _INT, _LONG, _POINTER, *[_POINTER, _LONG, _POINTER] * 2, _LONG, _LONG, _POINTER)),
    "means": (None, (_POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER)),
    "normalize": (None, (_POINTER, _LONG, _LONG, ctypes.c_float, _POINTER)),
    "gate": (None, (_INT, _POINTER, _INT, _LONG, _LONG, _POINTER)),
    "layers": (_INT, (_POINTER, _LONG, _POINTER, _POINTER, _POINTER)),
}
_NARROW: Final = torch.bfloat16
_ANEW: Final = "build Whimbrel anew: pip install -e ."


class Kernels:
    """The kernels of one instruction set."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        functions = {key: getattr(lib, f"whimbrel_{key}") for key in _SIGNATURES}
        for key, (result, arguments) in _SIGNATURES.items():
            functions[key].restype, functions[key].argtypes = result, arguments
        self.call = SimpleNamespace(**functions)
        """The functions of the library, by their names in `_SIGNATURES`."""
        self.kinds: frozenset[Kind] = frozenset(kind for kind, number in KIND_NUMBERS.items() if self.call.has(number))
        self.name = path.suffixes[0].removeprefix(".")
        self.panel: int = self.call.panel()
        self.has_tiles = self.call.units(KIND_NUMBERS["bfloat16"], 2) > 1

    def attend(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        out_RNH: Tensor,
        seqs_B5: Int64Array,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        tables: int | None = None,
        band_ND: Tensor | None = None,
    ) -> None:
        """Write softmax(q k^T scale) v of each seq to `out_RNH`. All have one dtype, float32 or bfloat16, and contiguous heads.

        `seqs_B5` has of each seq: first query row, number of queries, first key row, number of keys, position of the first
        query among the keys. `tables` is the address of those of relative positions. `band_ND` holds the numbers that are
        added to a head's scores by the distance of the key, from -M to M (`Bias.band`). Raises MemoryError.
        """
        seqs = len(seqs_B5), seqs_B5.ctypes.data
        sizes = q_RNH.shape[1], k_RKH.shape[1], q_RNH.shape[2]
        attention = structs.Attention(
            KIND_NUMBERS[self.attention_kind(v_RKH.dtype)], v_RKH.dtype == _NARROW, *map(structs.heads, (q_RNH, k_RKH, v_RKH)),
            out_RNH.data_ptr(), out_RNH.stride(0), *seqs, *sizes, scale, causal, -1 if window is None else window,
            *structs.band_fields(band_ND), tables,
        )  # fmt: skip
        if self.call.attend(ctypes.byref(attention)):
            raise MemoryError("attention needs more memory than there is")

    def attention_kind(self, dtype: torch.dtype) -> Kind:
        """Return the numbers in which queries, keys and values of this dtype are multiplied."""
        if dtype != _NARROW:
            return "float32"
        return self.narrow_kind() or ("float16" if "float16" in self.kinds else "float32")

    def narrow_kind(self) -> Kind | None:
        """Return the numbers in which weights in bfloat16 are multiplied; None: oneDNN is better.

        AMX is by far the fastest, ours or oneDNN's. Where bfloat16 is slower than float32, its weights are multiplied as
        float16, which holds them exactly, or else as float32.
        """
        found = cpu()
        if self.has_tiles:
            return "bfloat16"
        if found.level == "amx" and found.bfloat16 == "native":
            return None  # our own for it are missing (an old assembler), or WHIMBREL_KERNELS names others
        if fast_bfloat16(found) and "bfloat16" in self.kinds:
            return "bfloat16"
        return "float16" if "float16" in self.kinds else "float32"

    def norm(self, x_RD: Tensor, added_RD: Tensor | None, norm: structs.Norm) -> Tensor:
        """Return the norm of x + added; x and the result are float32."""
        rows, width = x_RD.shape
        x_RD, added_RD = x_RD.contiguous(), None if added_RD is None else added_RD.contiguous()
        out_RD = torch.empty_like(x_RD)
        narrow = added_RD is not None and added_RD.dtype == _NARROW
        self.call.norm(ctypes.byref(norm), x_RD.data_ptr(), structs.address(added_RD), narrow, rows, width, out_RD.data_ptr())
        return out_RD

    def embed(self, words_VD: Tensor, ids_R: Tensor, *others: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the sums of the rows that ids choose from tables, (R, D) in float32. All ids are int32, on the host.

        `others` are up to two more tables in float32, with their ids; None: no table. Raises IndexError.
        """
        assert words_VD.dtype in (torch.float32, _NARROW)
        assert words_VD.is_contiguous()
        assert ids_R.dtype == torch.int32
        rows, width = ids_R.shape[0], words_VD.shape[1]
        out_RD = torch.empty(rows, width)
        positions, types = (
            (None, 0, None) if each is None else (each[0].data_ptr(), each[0].shape[0], each[1].data_ptr())
            for each in (*others, None, None)[:2]
        )
        if self.call.embed(
            words_VD.data_ptr(), words_VD.dtype == _NARROW, words_VD.shape[0], ids_R.data_ptr(),
            *positions, *types, rows, width, out_RD.data_ptr(),
        ):  # fmt: skip
            raise IndexError("an id is not in its embedding table")
        return out_RD

    def means(self, x_RD: Tensor, starts_P: Tensor, ends_P: Tensor) -> Tensor:
        """Return the mean of rows starts_P[i] to ends_P[i] for each i, (P, D); x is float32, the bounds int32."""
        assert x_RD.dtype == torch.float32
        assert starts_P.dtype == ends_P.dtype == torch.int32
        rows, width = starts_P.shape[0], x_RD.shape[1]
        out_PD = torch.empty(rows, width)
        self.call.means(x_RD.data_ptr(), width, starts_P.data_ptr(), ends_P.data_ptr(), rows, out_PD.data_ptr())
        return out_PD

    def normalize(self, x_PD: Tensor, least: float) -> Tensor:
        """Divide rows in float32 by their norm, or by `least` if that is more. A row whose norm overflows becomes NaN."""
        x_PD = x_PD.contiguous()
        out_PD = torch.empty_like(x_PD)
        self.call.normalize(x_PD.data_ptr(), *x_PD.shape, least, out_PD.data_ptr())
        return out_PD

    def norm_and_rotate(
        self, x_RNH: Tensor, weight_NH: Tensor | None, eps: float, angles: tuple[Tensor, Tensor, bool] | None
    ) -> Tensor:
        """Return the RMS norm of each head, unless there is no weight, turned by its row's angles; the dtype is that of x.

        Raises MemoryError.
        """
        rows, heads, width = x_RNH.shape
        out_RNH = x_RNH.new_empty(rows, heads, width)
        if self.call.norm_and_rotate(
            x_RNH.data_ptr(), x_RNH.dtype == _NARROW, x_RNH.stride(0), rows, heads, width, structs.address(weight_NH), eps,
            ctypes.byref(structs.rotation(angles)), out_RNH.data_ptr(),
        ):  # fmt: skip
            raise MemoryError("the norm of heads needs more memory than there is")
        return out_RNH

    def gate(self, x_RO: Tensor, activation: Activation) -> Tensor:
        """Return activation(first half) * second half of each row."""
        rows, width = x_RO.shape[0], x_RO.shape[1] // 2
        out_RO = x_RO.new_empty(rows, width)
        self.call.gate(FUSED[activation], x_RO.data_ptr(), x_RO.dtype == _NARROW, rows, width, out_RO.data_ptr())
        return out_RO


def turned_off() -> bool:
    """Return whether the user wants none of our own kernels, on any device."""
    return _wanted() == "off"


def _wanted() -> str:
    return os.environ.get("WHIMBREL_KERNELS", "").strip().lower()


@cache
def kernels() -> Kernels | None:
    """Return the kernels for this processor, or None if there are none. Raises SetupError."""
    wanted, names = _wanted(), instruction_sets(cpu())
    if turned_off():
        return None
    if wanted and wanted not in names:
        raise SetupError(
            f"WHIMBREL_KERNELS is {wanted!r}, which this processor does not have",
            hint=f"Unset it, or say {', '.join(names)} or off." if names else "Unset it: there are none for this processor.",
        )
    names = names[names.index(wanted) :] if wanted else names
    name = next((each for each in names if library(each).exists()), None)
    if name is None and (names or not any(library(each).exists() for each in INSTRUCTION_SETS)):
        return None  # they were not built
    problem = "need AVX2 and FMA, which this processor does not have" if name is None else _problem(name)
    if name is None or problem is not None:
        logging.getLogger("whimbrel").warning("The kernels %s, and PyTorch's are used.", problem)
        return None
    return Kernels(library(name))


def kernels_for(tensor: Tensor) -> Kernels | None:
    """Return the kernels if the tensor is where they run, else None."""
    return None if tensor.is_cuda else kernels()


def _problem(name: str) -> str | None:
    try:
        lib = ctypes.CDLL(str(library(name)))
    except OSError as error:
        return f"cannot be loaded ({error})"
    if sources_of(library(name)) != fingerprint():
        return f"were compiled from other sources ({_ANEW})"
    text = ctypes.create_string_buffer(2**14)
    lib.whimbrel_layout(text, ctypes.c_int64(len(text)))
    theirs, ours = text.value.decode().splitlines(), structs.layout().splitlines()
    differing = next((f"{a}; not {b}" for a, b in zip_longest(theirs, ours) if a != b), None)
    return None if differing is None else f"have other structures than Python: {differing} ({_ANEW})"


def instruction_sets(found: Cpu) -> tuple[str, ...]:
    """Return the names of a processor's instruction sets that have kernels, the most capable first.

    An old assembler does not know the most capable ones, and the build then lacks their libraries.
    """
    has_bf16 = found.level in ("avx512_bf16", "amx")
    has_avx512 = has_bf16 or found.level == "avx512"
    names = {
        "amx": found.level == "amx",
        "avx512_fp16": has_bf16 and found.float16,
        "avx512_bf16": has_bf16,
        "avx512_vnni": has_avx512 and found.vnni,
        "avx512": has_avx512,
        "avx2_vnni": found.level == "avx2" and found.vnni,
        "avx2": found.level != "other",
    }
    return tuple(name for name, is_there in names.items() if is_there)


def fast_bfloat16(found: Cpu) -> bool:
    """Return whether products in bfloat16 are faster than in float32 without AMX."""
    return found.bfloat16 == "native" and found.level == "avx512_bf16"
