# SPDX-License-Identifier: BSD-3-Clause
"""The check of machine code finds what is planted in it, and says what it cannot check."""

from __future__ import annotations

from pathlib import Path

import check_cubins
import pytest
from cubin.budget import Budget, Entry, dump

# What cuobjdump 12.8 prints, shortened, about a kernel that doubles float4s, launched with at most
# 256 threads and at least 4 blocks per multiprocessor.
RECORDED = {
    "-res-usage": """
Fatbin elf code:
arch = sm_90
Resource usage:
 Function scale:
  REG:14 STACK:0 SHARED:5120 LOCAL:0 CONSTANT[0]:544 TEXTURE:0 SURFACE:0 SAMPLER:0
""",
    "-elf": """
	Tool Version: Cuda compilation tools, release 13.0, V13.0.88
.nv.info
	Attribute:	EIATTR_REGCOUNT
	Value:	function: scale(0x6)	register count: 14
.nv.info.scale
	Attribute:	EIATTR_MAXREG_COUNT
	Value:	0x40
	Attribute:	EIATTR_MAX_THREADS
	Value:	0x80 0x2 0x1
	Attribute:	EIATTR_CBANK_PARAM_SIZE
	Value:	0x10
""",
    "-sass": """
	code for sm_90
		Function : scale
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0050*/                   IMAD.WIDE.U32 R2, R7, 0x10, R2 ;     /* 0x0000001007027825 */
                                                                        /* 0x001fca00078e0002 */
        /*0060*/              @!P0 LDG.E.EF.128 R8, desc[UR4][R2.64] ;  /* 0x0000000402087981 */
        /*00c0*/                   STG.E.EF.128 desc[UR4][R4.64], R8 ;  /* 0x0000000804007986 */
        /*00f0*/                   NOP;                                 /* 0x0000000000007918 */
                                                                        /* 0x000fc00000000000 */
		..........
""",
}  # fmt: skip
ACCESS = {"scale": ["load", "store", "stream"]}
BUDGET = Budget("13.0", [90], ACCESS, {"scale": Entry(1, 1, 1, [16], [64])})


class Recorded:
    """A library, its budget, and tools that repeat what they said about it once."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.library = folder / "libscale.so"
        self.budget = folder / "budget.json"
        self.library.touch()
        self.tools = folder / "bin"
        self.tools.mkdir()
        # Called with `-sass -arch sm_90 <library>`, for one.
        script = f'#!/bin/sh\ncd {self.tools}\n[ -f "./$1.$3" ] && exec cat "./$1.$3"\ncat "./$1"\n'
        tools = dict.fromkeys(("nvcc", "nvdisasm", "cuobjdump"), script)
        for name, text in {**tools, **RECORDED}.items():
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)
        self.budget.write_text(dump(BUDGET))

    def change(self, name: str, old: str, new: str) -> None:
        path = self.budget if name == "budget" else self.tools / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def check(self, *options: str) -> tuple[int, str]:
        status = check_cubins.main(["--library", str(self.library), *options])
        output = self.capsys.readouterr()
        return status, output.err if status else output.out


@pytest.fixture
def recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Recorded:
    recorded = Recorded(tmp_path, capsys)
    monkeypatch.setenv("PATH", str(recorded.tools), prepend=":")
    monkeypatch.setattr(check_cubins, "BUDGET", recorded.budget)
    return recorded


@pytest.mark.parametrize(
    ("status", "name", "old", "new", "message"),
    [
        (1, "-res-usage", "REG:14", "REG:17", "scale sm_90: expected at most 16 registers, got 17"),
        (1, "-res-usage", "STACK:0", "STACK:8", "sm_90: expected no stack, got 8 bytes."),
        (1, "-res-usage", "LOCAL:0", "LOCAL:8", "sm_90: expected no stack, got 8 bytes."),
        (1, "-res-usage", "5120", "50180", "49152 bytes of static shared memory, got 49156"),
        (1, "-res-usage", "5120", "60000", "4 blocks of 256 threads per multiprocessor, got 3, by"),
        (1, "-elf", "\t0x40", "\t0x18", "10 blocks of 256 threads per multiprocessor, got 8, by"),
        (1, "-elf", "\t0x10\n", "\t0x7ffd\n", "at most 32764 bytes of arguments, got 32765."),
        (1, "-sass", "NOP", "LDL.64", "expected no local memory, got 1 loads and 0 stores"),
        (1, "-sass", "NOP", "STL", "expected no local memory, got 0 loads and 1 stores"),
        (1, "-sass", "LDG.E.EF.128", "LDG.E.EF.64", "sm_90: expected loads of 128 bits, got none."),
        (1, "-sass", "STG.E.EF.128", "STG.E.EF", "expected 1 stores of 128 bits in all forms"),
        (1, "-sass", "LDG.E.EF", "LDG.E", "1 of 1 loads of 128 bits to evict first (EF), got 0."),
        (1, "budget", ', "stream"', "", "0 of 1 stores of 128 bits to evict first (EF), got 1."),
        (1, "budget", '"forms": 1', '"forms": 2', "2 forms of dtype and alignment, got 1."),
        (0, "budget", "[64]", "[52]", ""),
        (1, "budget", "[64]", "[51]", "some 51 bytes of code, got 64 (25 % more)."),
        (2, "-sass", "  /*", "  ", "of scale for sm_90, got less."),
        (2, "-elf", "MAXREG", "MOSTREG", "of scale for sm_90, got less."),
        (2, "-res-usage", "sm_90", "sm_80", "for [90], got it for [80]. Build"),
        (2, "cuobjdump", '"./$1"\n', "bad; exit 3", "exit status 3"),
    ],
)
def test_what_is_planted_is_found(
    status: int, name: str, old: str, new: str, message: str, recorded: Recorded
) -> None:
    recorded.change(name, old, new)
    got, output = recorded.check()
    assert got == status
    assert message in output
