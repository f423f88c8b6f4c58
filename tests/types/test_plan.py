from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.console import memory_of_batches
from whimbrel.errors import SetupError
from whimbrel.types.card import Card
from whimbrel.types.hardware import Cpu, Gpu, Hardware
from whimbrel.types.plan import Options, make_plan

CPU = Hardware(num_cores=3, cpu=Cpu("EPYC", "avx512_bf16", "native"))
OLD_CPU = replace(CPU, cpu=Cpu("Xeon", "avx512", "slow"))
WITH_FLOAT16 = replace(CPU, cpu=Cpu("Xeon", "avx512_bf16", "slow", float16=True), kernels="avx512_fp16")
LAPTOP = replace(CPU, cpu=Cpu("Core", "avx2", "none"))
GPU = replace(CPU, gpus=(Gpu("cuda:0", bfloat16=True), Gpu("cuda:1", bfloat16=True)))


@pytest.fixture(scope="module")
def card(minilm: Path) -> Card:
    return read_card(minilm, "all-MiniLM-L6-v2")


@pytest.mark.parametrize(
    ("hardware", "options", "device", "dtype", "lanes", "tokens"),
    [
        (CPU, Options(), "cpu", "bfloat16", 3, 512),
        (OLD_CPU, Options(), "cpu", "float32", 3, 512),
        (OLD_CPU, Options(dtype="bfloat16"), "cpu", "bfloat16", 3, 512),
        (WITH_FLOAT16, Options(), "cpu", "bfloat16", 3, 512),
        (replace(WITH_FLOAT16, kernels=""), Options(), "cpu", "float32", 3, 512),
        (LAPTOP, Options(), "cpu", "float32", 3, 512),
        (GPU, Options(), "cuda:0", "bfloat16", 1, 16_384),
        (GPU, Options(device="cuda"), "cuda:0", "bfloat16", 1, 16_384),
        (GPU, Options(device="cuda:1", dtype="float16", max_batch_tokens=7), "cuda:1", "float16", 1, 7),
        (GPU, Options(device="cpu"), "cpu", "bfloat16", 3, 512),
    ],
)
def test_auto_is_resolved(
    card: Card, hardware: Hardware, options: Options, device: str, dtype: str, lanes: int, tokens: int
) -> None:
    plan = make_plan(options, card, hardware)
    assert (plan.device, plan.dtype, plan.num_lanes, plan.max_batch_tokens) == (device, dtype, lanes, tokens)
    assert (plan.served_name, plan.max_length, plan.matryoshka) == ("all-MiniLM-L6-v2", 256, False)


OLD_GPU = Gpu("cuda:1", memory=2**34)
MIXED = replace(CPU, gpus=(Gpu("cuda:0", memory=2**37, bfloat16=True), OLD_GPU))


@pytest.mark.parametrize(
    ("options", "device", "dtype", "memory", "note"),
    [
        (Options(), "cuda:0", "bfloat16", 2**37, ""),
        (Options(device="cuda:1"), "cuda:1", "float32", 2**34, ""),
        (Options(num_replicas=2), "cuda:0", "float32", 2**37, "cuda:1 cannot multiply bfloat16"),
        (Options(num_replicas=2, replica=1), "cuda:1", "float32", 2**34, "cuda:1 cannot multiply bfloat16"),
        (Options(num_replicas=2, replica=1, dtype="float16"), "cuda:1", "float16", 2**34, ""),
        (Options(num_replicas=4, device="cuda:0"), "cuda:0", "bfloat16", 2**37, ""),
    ],
)
def test_gpus_of_two_kinds(card: Card, options: Options, device: str, dtype: str, memory: int, note: str) -> None:
    """Each has its own memory, and replicas of a model compute in one dtype."""
    plan = make_plan(options, card, MIXED)
    assert (plan.device, plan.dtype, plan.memory) == (device, dtype, memory)
    assert note in plan.device_note
    assert bool(note) == bool(plan.device_note)


def test_replicas_share_one_gpu(card: Card) -> None:
    one = replace(CPU, gpus=(Gpu("cuda:0", bfloat16=True),))
    assert {make_plan(Options(num_replicas=4, replica=i), card, one).device for i in range(4)} == {"cuda:0"}


def test_no_gpu_that_can_be_used(card: Card) -> None:
    """One who asks for a GPU is told why there is none; one who has a driver too. Others are told nothing."""
    reason = "the driver takes CUDA up to 12.4, PyTorch 2.11 wants 13.0"
    old_driver = replace(CPU, gpu_note=reason, gpu_driver=True)
    with pytest.raises(SetupError, match=rf"^no device 'cuda' here: {reason}\.$") as error:
        make_plan(Options(device="cuda"), card, old_driver)
    assert error.value.hint == "--device takes auto or one of: cpu, which serves every model, slower"
    assert make_plan(Options(), card, old_driver).device_note == f"no GPU is used: {reason}"
    assert not make_plan(Options(device="cpu"), card, old_driver).device_note
    assert not make_plan(Options(), card, replace(CPU, gpu_note="there is no NVIDIA driver")).device_note


def test_max_length_may_go_up_to_the_positions(card: Card) -> None:
    assert make_plan(Options(max_length=512), card, CPU).max_length == 512


@pytest.mark.parametrize(
    "options",
    [
        Options(device="cuda"), Options(device="tpu"), Options(dtype="float16"), Options(dtype="int8"), Options(max_length=513),
        Options(max_length=0), Options(max_batch_tokens=0), Options(max_request_tokens=0), Options(max_queue_tokens=-1),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_hint(card: Card, options: Options) -> None:
    with pytest.raises(SetupError) as caught:
        make_plan(options, card, CPU)
    assert "take" in (caught.value.hint or "")


@pytest.mark.parametrize("switches", [(), ("ONEDNN_MAX_CPU_ISA=AVX2",)])
def test_bfloat16_is_refused_where_no_library_multiplies_it(card: Card, switches: tuple[str, ...]) -> None:
    hardware = replace(LAPTOP, cpu=replace(LAPTOP.cpu, switches=switches))
    with pytest.raises(SetupError, match=r"on this CPU, Core \(AVX2") as caught:
        make_plan(Options(dtype="bfloat16"), card, hardware)
    assert all(switch in str(caught.value) for switch in switches)
    assert "float32" in (caught.value.hint or "")


def test_int8_needs_a_cpu_with_vnni_and_linear_layers(card: Card) -> None:
    vnni = replace(LAPTOP, cpu=replace(LAPTOP.cpu, vnni=True))
    assert make_plan(Options(dtype="int8"), card, vnni).dtype == "int8"
    with pytest.raises(SetupError, match="has no VNNI") as caught:
        make_plan(Options(dtype="int8"), card, LAPTOP)
    assert "float32" in (caught.value.hint or "")
    with pytest.raises(SetupError, match="not supported on a GPU"):
        make_plan(Options(dtype="int8"), card, replace(GPU, cpu=vnni.cpu))
    for family in ("hf", "static"):
        other = replace(card, encoder=replace(card.encoder, family=family))
        with pytest.raises(SetupError, match="not supported for a model"):
            make_plan(Options(dtype="int8"), other, vnni)


def test_same_bits_are_known_once_the_weights_are_loaded(card: Card) -> None:
    plan = make_plan(Options(), card, CPU)
    assert plan.same_bits is None
    assert plan.with_same_bits([]).same_bits is True
    unstable = plan.with_same_bits(["one product", "another"])
    assert unstable.same_bits is False
    assert unstable.same_bits_reason == "one product; another"
    assert plan.with_same_bits(list("abcde")).same_bits_reason == "a; b; c; and 2 more"


def test_no_same_bits_are_promised_on_a_gpu(card: Card) -> None:
    plan = make_plan(Options(), card, GPU)
    assert plan.same_bits is False
    assert "GPU" in plan.same_bits_reason
    assert plan.with_same_bits([]) == plan


def test_memory_of_batches_is_said_and_warned_of(card: Card) -> None:
    """The plan knows what a batch may take, and its text warns if all lanes may take more than the device has."""
    plan = make_plan(Options(), card, replace(CPU, memory=2**40))
    assert 2**25 < plan.batch_bytes < 2**28
    assert memory_of_batches(plan) == f"up to {plan.batch_bytes / 1e6:,.0f} MB in each of 3 lanes"
    assert memory_of_batches(replace(plan, memory=3 * plan.batch_bytes)) == memory_of_batches(plan)
    assert "more than the" in memory_of_batches(replace(plan, memory=3 * plan.batch_bytes - 1))
    assert memory_of_batches(replace(plan, num_lanes=1, memory=0)) == f"up to {plan.batch_bytes / 1e6:,.0f} MB"
    longer = make_plan(Options(max_length=512, max_batch_tokens=4096), card, CPU)
    assert longer.batch_bytes > plan.batch_bytes
