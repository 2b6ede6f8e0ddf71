# SPDX-License-Identifier: BSD-3-Clause
"""The verbs of cmake/TorchfuseOps.cmake refuse what does not fit, and name it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or not (ROOT / "cmake").is_dir(),
    reason="needs CMake and the source tree",
)


def run(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    script = folder / "manifest.cmake"
    script.write_text(
        f'set(PROJECT_SOURCE_DIR "{ROOT}")\n'
        f'include("{ROOT}/cmake/TorchfuseFunctions.cmake")\n'
        f"{line}\n"
        'message("classes: ${TORCHFUSE_OPTIMIZER_CLASSES}; all: ${TORCHFUSE_OPTIMIZERS}")\n',
        encoding="utf-8",
    )
    return subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, check=False)


def test_the_function_of_an_op_is_made_from_its_declaration(tmp_path: Path) -> None:
    source = tmp_path / "fused_lamb.cpp"
    result = run(tmp_path, f'torchfuse_generate_fused_op(lamb Lamb "{source}")')
    assert result.returncode == 0, result.stderr
    text = re.sub(r"\s+", " ", source.read_text(encoding="utf-8"))
    assert "void fused_lamb_(at::TensorList params, at::TensorList grads, " in text
    assert "double eps, double min_trust_ratio, std::optional<double> max_trust_ratio, " in text
    assert 'ops::call_op<fused_lamb_>("torchfuse::fused_lamb_", params, grads, exp_avgs, ' in text
    assert "maximize, lr_tensor, grad_scale, found_inf); }" in text
    assert "TORCHFUSE_REGISTER_FUSED_OPTIMIZER(lamb, Lamb);" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "torchfuse_add_fused_optimizer(adam Adam CLASS)",
            "expected LAYERWISE, CPP_CLASS, PASSES or nothing more, got CLASS",
        ),
        (
            "torchfuse_add_fused_optimizer(none None)",
            "expected the file csrc/kernels/functors/none.h to exist",
        ),
        (
            "torchfuse_generate_fused_op(none None none.cpp)",
            "expected csrc/include/torchfuse/ops.h to declare void fused_none_(...), got no such",
        ),
        ("torchfuse_add_op(none)", "expected the file csrc/kernels/none.h to exist"),
    ],
    ids=["keyword", "optimizer-file", "declaration", "op-file"],
)
def test_a_line_that_does_not_fit_is_refused(tmp_path: Path, line: str, message: str) -> None:
    result = run(tmp_path, line)
    assert result.returncode != 0
    assert message in re.sub(r"\s+", " ", result.stderr)
