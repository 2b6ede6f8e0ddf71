# SPDX-License-Identifier: BSD-3-Clause
"""What the check of compiled kernels reads, names and compares, without a compiler."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import check_cubins  # noqa: E402
from cubin import budget as budgets  # noqa: E402
from cubin import elf, rules, sass  # noqa: E402
from cubin.errors import CannotCheckError  # noqa: E402
from cubin.names import short_name  # noqa: E402

GOOD = elf.Kernel(
    symbol="scale",
    arch=90,
    registers=60,
    register_cap=64,
    threads=256,
    stack_bytes=0,
    argument_bytes=32764,
    shared_bytes=288,
    text_bytes=1000,
    accesses=Counter({("LDG", 128): 4, ("STG", 128): 3, ("LDG", 32): 9}),
)
FIGURES = {"scale<fp32>": {90: GOOD}}
BUDGET = budgets.record(FIGURES, "13.0", {"scale": ("load", "store")})


# --- Names, machine code, ELF ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declaration", "name"),
    [
        (
            "void torchfuse::kernels::cuda::fused_update_kernel<torchfuse::kernels::cuda::"
            "UpdateTypes<torchfuse::kernels::Adam, torchfuse::kernels::BFloat16, float, "
            "float, true>, false>(torchfuse::kernels::cuda::UpdateLaunch<torchfuse::kernels::cuda::"
            "UpdateTypes<torchfuse::kernels::Adam, torchfuse::kernels::BFloat16, float, float, "
            "true> >)",
            "fused_update<Adam, bf16, fp32, fp32, master, misaligned>",
        ),
        (
            "void torchfuse::kernels::cuda::fused_update_kernel<torchfuse::kernels::cuda::"
            "UpdateTypes<torchfuse::kernels::Lamb, double, double, double, false>, "
            "true>(...)",
            "fused_update<Lamb, fp64, fp64, fp64, aligned>",
        ),
        (
            "void torchfuse::kernels::cuda::fused_update_mixed_kernel<torchfuse::kernels::Adam, "
            "false>(torchfuse::kernels::cuda::UpdateLaunch<torchfuse::kernels::cuda::MixedTypes"
            "<torchfuse::kernels::Adam> >)",
            "fused_update_mixed<Adam, misaligned>",
        ),
        (
            "void torchfuse::kernels::cuda::(anonymous namespace)::multi_tensor_unscale_kernel"
            "<torchfuse::kernels::Half>(torchfuse::kernels::cuda::(anonymous namespace)::Launch)",
            "multi_tensor_unscale<fp16>",
        ),
        ("torchfuse::kernels::cuda::(anonymous namespace)::prologue_kernel(Launch)", "prologue"),
    ],
)
def test_short_name_keeps_what_tells_kernels_apart(declaration: str, name: str) -> None:
    assert short_name(declaration) == name


def test_accesses_are_counted_by_operation_and_width() -> None:
    def word(opcode: int, width: int) -> bytes:
        # Operands and flags around the two fields must not matter.
        low = opcode | 0xABCD_0000_1234_7000
        return low.to_bytes(8, "little") + (width << 9 | 0xFFFF_0000_0000_F1FF).to_bytes(
            8, "little"
        )

    text = word(0x981, 6) + word(0x986, 5) + word(0x383, 4) + word(0x387, 2) + word(0x984, 6)
    expected = {("LDG", 128): 1, ("STG", 64): 1, ("LDL", 32): 1, ("STL", 16): 1}
    assert sass.count_accesses(text) == expected


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x02\x01" + bytes(200), b"#!/bin/sh\n" * 20])
def test_what_is_no_cubin_is_refused(image: bytes) -> None:
    with pytest.raises(CannotCheckError, match="expected a "):
        elf.read_kernels(image)


def test_two_kernels_of_one_short_name_are_refused() -> None:
    other = replace(GOOD, symbol="_ZN9torchfuse7kernels5scaleEv")
    with pytest.raises(CannotCheckError, match="expected one kernel scale for sm_90, got two"):
        check_cubins.name_kernels([GOOD, other])
    assert check_cubins.name_kernels([GOOD, replace(other, arch=80)])["scale"].keys() == {80, 90}


# --- Limits and budget ----------------------------------------------------------------------------


def test_good_kernel_has_no_violation() -> None:
    assert rules.check_kernel("scale", GOOD) == []
    assert budgets.compare(FIGURES, BUDGET) == []


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (replace(GOOD, stack_bytes=8), "sm_90: expected no stack, got 8 bytes"),
        (
            replace(GOOD, accesses=GOOD.accesses + Counter({("LDL", 64): 2})),
            "sm_90: expected no local memory, got 2 loads and 0 stores",
        ),
        (
            replace(GOOD, accesses=GOOD.accesses + Counter({("STL", 8): 1})),
            "sm_90: expected no local memory, got 0 loads and 1 stores",
        ),
        (replace(GOOD, registers=65), "expected 4 blocks of 256 threads per multiprocessor, got 3"),
        (replace(GOOD, arch=120, shared_bytes=30000), "expected 4 blocks of 256 .*, got 3"),
        (replace(GOOD, arch=120, threads=1024, register_cap=32, registers=32), "2 blocks.* got 1"),
        (replace(GOOD, register_cap=255, threads=1024, registers=72), "1 blocks of 1024 .* got 0"),
        (replace(GOOD, argument_bytes=32768), "at most 32764 bytes of arguments, got 32768"),
        (replace(GOOD, shared_bytes=49156), "at most 49152 bytes of static shared.*, got 49156"),
    ],
)
def test_limit_that_is_broken_is_a_violation(kernel: elf.Kernel, message: str) -> None:
    violations = rules.check_kernel("scale", kernel)
    assert len(violations) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(violations[0])


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (
            {"scale<fp32>": {90: replace(GOOD, registers=65)}},
            "scale<fp32> sm_90: expected at most 64 registers, got 65.",
        ),
        (
            {"scale<fp32>": {90: replace(GOOD, text_bytes=1251)}},
            "scale<fp32> sm_90: expected some 1000 bytes of code, got 1251 (25 % more).",
        ),
        (
            {
                "scale<fp32>": {
                    90: replace(GOOD, accesses=GOOD.accesses - Counter({("LDG", 128): 1}))
                }
            },
            "scale<fp32> sm_90: expected 4 loads of 128 bits, got 3.",
        ),
        (FIGURES | {"scale<fp64>": {90: GOOD}}, "scale<fp64>: expected in the budget, got no such"),
    ],
)
def test_what_departs_from_the_budget_is_a_violation(
    figures: budgets.Figures, message: str
) -> None:
    violations = budgets.compare(figures, BUDGET)
    assert len(violations) == 1
    assert violations[0].startswith(message)


def test_growth_of_a_quarter_passes() -> None:
    assert budgets.compare({"scale<fp32>": {90: replace(GOOD, text_bytes=1250)}}, BUDGET) == []


def test_budget_entry_without_kernel_is_a_violation() -> None:
    entries = {**BUDGET.kernels, "scale<fp64>": BUDGET.kernels["scale<fp32>"]}
    violations = budgets.compare(FIGURES, replace(BUDGET, kernels=entries))
    assert violations == ["scale<fp64>: expected in the build, got no such kernel."]


def test_vector_path_must_have_vectors_even_where_none_were_recorded() -> None:
    scalar = {
        "scale<fp32>": {90: replace(GOOD, accesses=Counter({("LDG", 32): 4, ("STG", 128): 1}))}
    }
    budget = budgets.record(scalar, "13.0", BUDGET.vector_access)
    violations = budgets.compare(scalar, budget)
    assert violations == ["scale<fp32> sm_90: expected loads of 128 bits, got none."]


def test_every_family_states_its_vector_accesses_and_no_other_does() -> None:
    missing, stale = sorted(
        budgets.compare(FIGURES, replace(BUDGET, vector_access={"scales": ("load",)}))
    )
    assert missing.startswith("scale: expected an entry in vector_access")
    assert stale.startswith("vector_access of scales: expected a kernel of that name")


def test_architecture_outside_the_budget_is_not_compared() -> None:
    other = replace(GOOD, arch=86, registers=64, text_bytes=9999)
    assert budgets.compare({"scale<fp32>": {90: GOOD, 86: other}}, BUDGET) == []


def test_our_budget_is_as_update_would_write_it() -> None:
    path = ROOT / "tools/cubin/budget.json"
    budget = budgets.load(path)
    assert budgets.dump(budget) == path.read_text(encoding="utf-8")
    assert budget.architectures == (80, 90, 100, 120)
    assert budget.kernels.keys() >= {"fused_update<Adam, fp32, fp32, fp32, aligned>", "prologue"}


def test_budget_with_a_missing_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    path.write_text(budgets.dump(BUDGET).replace("[90]", "[80, 90]"))
    with pytest.raises(CannotCheckError, match=r"scale<fp32> needs 2 numbers in each list"):
        budgets.load(path)
