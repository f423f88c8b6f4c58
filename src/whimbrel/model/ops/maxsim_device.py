"""MaxSim on a GPU: beside the batches that run there, without a wait until the scores are asked for.

Launches go to a stream of their own, whose work the device takes first, so that scores do not wait behind batches in flight.
Triton's kernels run if they can be compiled, which takes a C compiler; a trial tells, once for each device. PyTorch's products
take their place.

Shapes: P pairs, X query tokens of all pairs.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from whimbrel.model.kernels.library import turned_off
from whimbrel.model.ops import maxsim_torch
from whimbrel.model.ops.maxsim_programs import Programs, plan_programs
from whimbrel.model.ops.memory import is_out_of_memory, memory_errors, raise_if_lost
from whimbrel.model.ops.staging import start_copy
from whimbrel.model.ops.token_vectors import NO_MATCH, TokenVectors
from whimbrel.types.arrays import Float32Array, IntArray

_log = logging.getLogger("whimbrel")

_MAX_STRETCH: Final = 1024
"""Document tokens of a program of `maxsim_torch`, which bounds its memory."""
_lock: Final = Lock()
_streams: Final[dict[torch.device, torch.cuda.Stream]] = {}


@contextmanager
def scoring_stream(rows_XD: Tensor) -> Generator[None]:
    """Launch the operations of the block, which read these rows, on their device's stream for scores. On a CPU, do nothing.

    All threads share the stream, so that vectors which one of them keeps may be read by another. The rows must exist: it waits
    for no other stream. Raises Unavailable if the device is lost.
    """
    device = rows_XD.device
    if device.type != "cuda":
        yield
        return
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device, priority=-1)
    try:
        with torch.cuda.stream(_streams[device]):
            rows_XD.record_stream(_streams[device])  # their memory is taken for nothing else before the block's work is done
            yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise_if_lost(error, device)
        raise


def prepare_kernels(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels for queries and documents of one dtype, whatever their lengths. Raises MemoryError."""
    rows_XD = torch.zeros(192, width, dtype=dtype, device=device)
    queries = TokenVectors(rows_XD, np.array([0, 32]), np.array([32, 96]))
    documents = TokenVectors(rows_XD, np.array([96]), np.array([192]))
    with memory_errors(), scoring_stream(rows_XD):
        start_sums(queries, documents, np.array([0, 1]), np.array([0, 0]))()
        matches(queries, documents, np.array([0, 1]), np.array([0, 0]))


def start_sums(
    queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray
) -> Callable[[], Float32Array]:
    """Launch all pairs on the current stream. Return a function that waits for the sums, (P,); 0 if one side has no tokens."""
    device = documents.rows_TD.device
    backend = _backend(device)
    sums_P = torch.zeros(query_P.size, dtype=torch.float32, device=device)
    for programs in _programs(backend, queries, documents, query_P, document_P):
        best_WQ, _ = backend.maxima(queries, documents, programs, where=False)
        backend.add_up(best_WQ, programs, sums_P)
    (on_host,), wait = _start_copies([sums_P])

    def result() -> Float32Array:
        wait()
        return on_host.numpy()

    return result


def matches(queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray) -> Float32Array:
    """Return the greatest similarity of each query token of each pair and its document token, (X, 2). Waits for them."""
    lengths_P = queries.lengths[query_P]
    matches_X2 = np.tile(np.array(NO_MATCH, np.float32), (int(lengths_P.sum()), 1))
    ends_P = np.cumsum(lengths_P)
    backend = _backend(documents.rows_TD.device)
    planned = list(_programs(backend, queries, documents, query_P, document_P))
    found, wait = _start_copies([x for each in planned for x in backend.maxima(queries, documents, each, where=True)])
    wait()
    for programs, best, where in zip(planned, found[::2], found[1::2], strict=True):
        first_token_P = documents.starts_N[document_P[programs.pairs_P]]
        _write_matches(
            matches_X2, programs, best.numpy(), where.numpy(), ends_P=ends_P[programs.pairs_P], first_token_P=first_token_P
        )
    return matches_X2


def _write_matches(
    matches_X2: Float32Array,
    programs: Programs,
    best_WQ: Float32Array,
    where_WQ: IntArray,
    *,
    ends_P: IntArray,
    first_token_P: IntArray,
) -> None:
    """Write each pair's matches before row ends_P[i]; its document begins at first_token_P[i]."""
    groups = zip(programs.groups_P4.tolist(), ends_P.tolist(), first_token_P.tolist(), strict=True)
    for (first, num_q, blocks, stretches), end, first_token in groups:
        of_pair = slice(first, first + blocks * stretches)
        before_NS = (programs.items_W4[of_pair, 2] - first_token).reshape(blocks, stretches)
        best_NSQ, where_NSQ = (each[of_pair].reshape(blocks, stretches, -1) for each in (best_WQ, where_WQ))
        chosen_N1Q = best_NSQ.argmax(axis=1, keepdims=True)
        token_NSQ = where_NSQ + before_NS[:, :, None]
        for column, each in enumerate((best_NSQ, token_NSQ)):
            matches_X2[end - num_q : end, column] = np.take_along_axis(each, chosen_N1Q, axis=1).reshape(-1)[:num_q]


def _programs(
    backend: ModuleType, queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray
) -> Generator[Programs]:
    most = _MAX_STRETCH if backend is maxsim_torch else None
    yield from plan_programs(queries, documents, query_P, document_P, max_stretch=most)


def _start_copies(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], object]]:
    """Start copies to the host. Return them, and the function that waits for them."""
    copies = [start_copy(x) for x in tensors]
    if not tensors or not tensors[0].is_cuda:
        return copies, lambda: None
    done = torch.cuda.Event()
    done.record()
    return copies, done.synchronize


@cache
def _backend(device: torch.device) -> ModuleType:
    """Return the module whose kernels run on a device, after a trial. Raises MemoryError if there is none for the trial."""
    if device.type == "cpu" or turned_off():
        return maxsim_torch
    try:
        from whimbrel.model.ops import maxsim_triton as kernels

        if (problem := _try(kernels, device)) is None:
            return kernels
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    hint = "It needs a C compiler, such as gcc, and the headers of Python; CC names another."
    _log.warning("MaxSim runs without Triton's kernels, by slower products: %s. %s", problem, hint)
    return maxsim_torch


def _try(kernels: ModuleType, device: torch.device) -> str | None:
    """Return the fault of the kernels on two small documents in float16, or None."""
    numbers = torch.arange(128 * 32, device=device).reshape(128, 32) % 23
    vectors = TokenVectors((numbers.half() - 11) / 16, np.array([0, 40]), np.array([40, 128]))
    pairs = np.array([0, 0, 1]), np.array([0, 1, 1])
    found: list[Tensor] = []
    for backend in (kernels, maxsim_torch):
        sums_P = torch.zeros(3, device=device)
        for programs in plan_programs(vectors, vectors, *pairs):
            best_WQ, _ = backend.maxima(vectors, vectors, programs, where=False)
            backend.add_up(best_WQ, programs, sums_P)
        found.append(sums_P.cpu())
    of_kernels, expected = (sums_P.numpy() for sums_P in found)
    return None if np.allclose(of_kernels, expected, rtol=1e-4) else f"they give {of_kernels} for {expected}"
