"""CPU features: those that the libraries may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cpus import LEVELS, reachable
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.banner import _summary
from whimbrel.model.cpu import _permit_amx, cpu, find_cpu
from whimbrel.types.hardware import CPU_LEVELS, Cpu, Hardware
from whimbrel.types.plan import Options, make_plan

LAPTOP = {"cpu_name": "Laptop", "avx2": True, "fma3": True}
ICE_LAKE = LAPTOP | dict.fromkeys(("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni"), True)
ZEN_4 = ICE_LAKE | {"avx512_bf16": True}
SAPPHIRE_RAPIDS = ZEN_4 | {"amx_tile": True, "amx_bf16": True, "amx_int8": True}


def find(capabilities: dict[str, Any], *, bfloat16: bool = True, amx: bool = True, **environ: str) -> Cpu:
    return find_cpu(capabilities, environ, onednn_bfloat16=lambda: bfloat16, permit_amx=lambda: amx)


@pytest.mark.parametrize(
    ("capabilities", "level"),
    [
        ({}, "other"), ({"architecture": "aarch64", "neon": True}, "other"), (LAPTOP, "avx2"), (ICE_LAKE, "avx512"),
        (ZEN_4, "avx512_bf16"), (SAPPHIRE_RAPIDS, "amx"), (SAPPHIRE_RAPIDS | {"avx512_bw": False}, "avx2"),
        (SAPPHIRE_RAPIDS | {"avx2": False}, "other"), (SAPPHIRE_RAPIDS | {"amx_bf16": False}, "avx512_bf16"),
        (SAPPHIRE_RAPIDS | {"amx_int8": False}, "avx512_bf16"),
    ],
    ids=str,
)  # fmt: skip
def test_levels_of_what_the_processor_says(capabilities: dict[str, Any], level: str) -> None:
    assert find(capabilities).level == level


def test_a_pytorch_that_cannot_ask_for_tiles_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs an instruction of AMX without the kernel's permission is killed."""
    monkeypatch.delattr(torch.cpu, "_init_amx")
    assert not _permit_amx()


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("SSE41", "other"), ("AVX2", "avx2"), ("avx2_vnni_2", "avx2"), ("AVX512_CORE", "avx512"), ("AVX512_CORE_VNNI", "avx512"),
        ("AVX512_CORE_BF16", "avx512_bf16"), ("AVX512_CORE_FP16", "avx512_bf16"), ("AVX10_1_512", "avx512_bf16"),
        ("AVX512_CORE_AMX", "amx"), ("AVX512_CORE_AMX_FP16", "amx"), ("DEFAULT", "amx"), ("what is this", "amx"), ("", "amx"),
    ],
)  # fmt: skip
def test_a_switch_holds_onednn_back(name: str, value: str, level: str) -> None:
    found = find(SAPPHIRE_RAPIDS, **{name: value})
    assert found.level == level
    assert found.switches == ((f"{name}={value}",) if value else ())
    assert find(LAPTOP, **{name: value}).level == ("other" if level == "other" else "avx2")


def test_the_new_name_of_the_switch_counts_where_both_are_set() -> None:
    assert find(SAPPHIRE_RAPIDS, ONEDNN_MAX_CPU_ISA="AVX512_CORE", DNNL_MAX_CPU_ISA="AVX2").level == "avx512"
    assert find(SAPPHIRE_RAPIDS, ONEDNN_MAX_CPU_ISA="", DNNL_MAX_CPU_ISA="AVX2").level == "avx2"


def test_amx_takes_the_kernel_s_permission() -> None:
    assert find(SAPPHIRE_RAPIDS, amx=False).level == "avx512_bf16"


@pytest.mark.parametrize(
    ("capabilities", "onednn", "expected"),
    [(LAPTOP, False, "none"), (ICE_LAKE, True, "slow"), (ZEN_4, True, "native"), (SAPPHIRE_RAPIDS, True, "native"),
     (SAPPHIRE_RAPIDS, False, "none"), ({"architecture": "aarch64"}, True, "slow")],
    ids=str,
)  # fmt: skip
def test_bfloat16(capabilities: dict[str, Any], onednn: bool, expected: str) -> None:
    assert find(capabilities, bfloat16=onednn).bfloat16 == expected


def test_float16_needs_its_instructions_and_no_switch_against_them() -> None:
    granite = SAPPHIRE_RAPIDS | {"avx512_fp16": True}
    assert find(granite).float16
    assert find(granite, amx=False).float16
    assert find(granite, ONEDNN_MAX_CPU_ISA="AVX512_CORE_FP16").float16
    assert not find(granite, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16").float16
    assert not find(granite, ONEDNN_MAX_CPU_ISA="AVX2").float16
    assert not find(ZEN_4).float16


def test_a_line_for_people_names_what_holds_back() -> None:
    assert str(find(ZEN_4)) == "Laptop (AVX-512 with bfloat16)"
    assert str(find(ZEN_4, ATEN_CPU_CAPABILITY="avx2")) == "Laptop (AVX-512 with bfloat16; ATEN_CPU_CAPABILITY=avx2)"
    assert str(find({})) == "unknown (neither AVX2 nor AVX-512)"


@pytest.mark.parametrize(("unstable", "line"), [([], None), (["one product"], "no: one product")])
def test_the_banner_shows_the_processor_and_what_is_not_promised(unstable: list[str], line: str | None, minilm: Path) -> None:
    card = read_card(minilm, "m")
    plan = make_plan(Options(), card, Hardware(2, find(LAPTOP, ONEDNN_MAX_CPU_ISA="AVX2"))).with_same_bits(unstable)
    described = _summary(card, plan)
    assert described["CPU"] == "Laptop (AVX2; ONEDNN_MAX_CPU_ISA=AVX2)"
    assert described.get("same bits") == line


ASK = """
import msgspec, torch
from whimbrel.model.cpu import cpu
print(msgspec.json.encode([cpu(), torch.ops.mkldnn._is_mkldnn_bf16_supported()]).decode())
"""


@pytest.mark.parametrize("level", [level for level in LEVELS if level in reachable()])
@pytest.mark.sample(1)
def test_a_child_process_with_the_switches_of_a_lesser_processor(level: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | LEVELS[level], capture_output=True, text=True, check=True
    )
    found, onednn = msgspec.json.decode(ran.stdout, type=tuple[Cpu, bool])
    assert found.level == level
    assert (found.bfloat16 != "none") == onednn
    assert found.vectors == ("AVX2" if level == "avx2" else "AVX512")


@pytest.mark.parametrize(("option", "code"), [("auto", 0), ("float32", 0), ("bfloat16", 1)])
@pytest.mark.sample(1)
def test_a_plan_follows_the_switches(option: str, code: int) -> None:
    command = [sys.executable, "-m", "whimbrel", "show", "--json", "--device", "cpu", "--dtype", option]
    ran = subprocess.run(command, env=os.environ | LEVELS["avx2"], capture_output=True, text=True, check=False)
    assert (ran.returncode != 0) == code
    if code:
        assert "ONEDNN_MAX_CPU_ISA=AVX2" in ran.stderr
        assert len(ran.stderr.splitlines()) == 2  # the error and its hint
    else:
        plan = msgspec.json.decode(ran.stdout)["plan"]
        assert (plan["dtype"], plan["same_bits"]) == ("float32", None)
        assert plan["cpu"]["level"] == min("avx2", cpu().level, key=CPU_LEVELS.index)
