# SPDX-License-Identifier: BSD-3-Clause
"""The stages of the GPU suite name what exists, so that no typo waits for a GPU."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from gpu_suite import judges, report, stages
from gpu_suite_machine import machine, setups

ROOT = Path(__file__).resolve().parents[3]


def test_every_file_that_the_stages_name_exists() -> None:
    named = {
        word.removeprefix("--ignore=")
        for setup in setups()
        for stage in stages.all_stages(setup)
        for command in (*stage.commands, *stage.announced)
        for word in command.argv
        if re.match(r"(--ignore=)?(tests|tools|benchmarks)\b", word)
    }
    assert {"tests/python", "benchmarks/run.py", str(stages.WORKLOAD)} <= named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_file_of_cuda_tests_has_a_stage() -> None:
    there = {path.name for path in (ROOT / stages.CUDA_TESTS).glob("test_*.py")}
    assert there == set(stages.CUDA_FILES.values())


def test_every_target_and_label_is_in_the_build_description() -> None:
    files = [f for folder in ("csrc", "tests/cpp") for f in (ROOT / folder).rglob("CMakeLists.txt")]
    text = {file.parent.relative_to(ROOT): file.read_text() for file in files}
    for target in stages.PYTHON_TARGETS:
        assert any(re.search(rf"add_library\(\s*{target}\b", t) for t in text.values()), target
    for built in (stages.DEVICE_TESTS, stages.EMULATED_TESTS):
        assert re.search(rf"add_\w+\(\s*{built.name}\b", text[built.parent]), built
    labels = {label for t in text.values() for label in re.findall(r"\bLABELS\s+(\w+)", t)}
    excluded = {label for label in labels if re.search(stages.OWN_STAGE_LABELS, label)}
    assert excluded == {"cuda", "cuda_on_cpu"}


def test_every_kernel_of_the_byte_model_exists() -> None:
    kernels = "\n".join(f.read_text() for f in (ROOT / "csrc/kernels/cuda").iterdir())
    for kernel in judges.BYTE_MODEL:
        assert re.search(rf"^ *{kernel}\(\s*const .+ __grid_constant__", kernels, re.MULTILINE), (
            kernel
        )


def test_only_this_gpu_is_compiled_for_and_its_settings_are_left_alone() -> None:
    setup = setups()[0]
    words = [
        command.argv
        for stage in stages.all_stages(setup)
        for command in (*stage.commands, *stage.announced)
    ]
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in words[0]
    (ncu,) = [argv for argv in words if argv[0].endswith("/ncu")]
    assert ncu[ncu.index("--clock-control") + 1] == "none"
    assert not any("nvidia-smi" in word for argv in words for word in argv)


def test_a_tool_that_is_absent_is_named_and_only_ncu_and_nccl_are_excused() -> None:
    bare = dataclasses.replace(
        machine(nccl=False), tools={**machine().tools, "compute-sanitizer": None, "ncu": None}
    )
    decided = {
        stage.name: stage.verdict
        for stage in stages.all_stages(stages.Setup(bare, with_cuda=True))
        if stage.verdict is not None
    }
    assert len(decided) == len(stages.SANITIZERS) + 2
    for name, verdict in decided.items():
        assert verdict.acceptable == (not name.startswith("compute-sanitizer")), name
        assert "not found" in verdict.reason or "without NCCL" in verdict.reason


def test_a_test_that_lacks_its_package_is_left_out_by_name() -> None:
    bare = stages.Setup(machine(packages=["pytest"]), with_cuda=True)
    assert stages.left_out(stages.Setup(machine(), with_cuda=True)) == []
    (line,) = stages.left_out(bare)
    assert str(stages.OPCHECK) in line
    command = stages.python_stage(bare, on_cuda=True).commands[0]
    assert f"--ignore={stages.OPCHECK}" in command.argv
    assert "-n" not in command.argv


def test_without_cuda_every_gpu_command_is_shown_or_tried() -> None:
    on_gpu, without = (
        {stage.name: stage for stage in stages.all_stages(setup)} for setup in setups()
    )
    assert list(on_gpu) == list(without)
    for name, stage in without.items():
        assert stage.commands, name
        for command in stage.announced:
            assert any(command.argv[0] == other.argv[0] for other in on_gpu[name].commands), name
    shown = [name for name, stage in without.items() if stage.announced]
    assert len(shown) == 2 + len(stages.SANITIZERS)


def test_the_pretended_device_is_no_gpu() -> None:
    setup = stages.Setup(machine(pretended=True), with_cuda=True)
    assert not setup.on_gpu
    pretended = {stage.name: stage for stage in stages.all_stages(setup)}
    on_gpu = {stage.name: stage for stage in stages.all_stages(setups()[0])}
    assert list(pretended) == list(on_gpu)
    words = [c.argv[0] for stage in pretended.values() for c in stage.commands]
    tools = [machine().tools[name] for name in ("compute-sanitizer", "ncu")]
    assert not {*tools, setup.program(stages.DEVICE_TESTS)} & set(words)
    for name in (*stages.CUDA_FILES, "Python tests on CUDA"):
        # All but the last argument, the time limit.
        ours, theirs = ([c.argv[:-1] for c in s[name].commands] for s in (pretended, on_gpu))
        assert ours == theirs
    skipped = pretended[stages.BENCHMARK].verdict
    assert skipped is not None
    assert skipped.acceptable


def test_a_run_on_the_pretended_device_is_no_result_of_a_gpu(tmp_path: Path) -> None:
    setup = stages.Setup(machine(pretended=True), with_cuda=True)
    result = report.new_result(setup, "0" * 40, False, [], [])
    assert result["gpu"] is None
    path = report.default_path(result, tmp_path / "work", tmp_path / "results", partial=False)
    assert path == tmp_path / "work" / "pretended.json"
