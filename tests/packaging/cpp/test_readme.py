# SPDX-License-Identifier: BSD-3-Clause
"""The README's C++ section, taken word for word."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

from cmake_project import ROOT, WORK, environment, run

AROUND = """
#include <cstdio>
#include <vector>

int main() {{
  const torch::Device device(torch::kCPU);
  torch::nn::Sequential model(torch::nn::Linear(8, 4), torch::nn::LogSoftmax(1));
  std::vector<torch::data::Example<>> batches{{
      {{torch::randn({{16, 8}}), torch::arange(16).remainder(4)}}}};
  auto* loader = &batches;
  const torch::Tensor before = model->parameters().front().detach().clone();
{body}
  const bool trained = !torch::equal(before, model->parameters().front().detach());
  std::puts(trained ? "trained" : "the parameters are what they were");
  return trained ? 0 : 1;
}}
"""


def block(language: str, word: str) -> str:
    """The one code block of the README in this language that holds the word."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (found,) = [content for content in blocks if word in content]
    return str(found)


def test_the_cpp_section_builds_and_trains() -> None:
    project = WORK / "readme"
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    (project / "CMakeLists.txt").write_text(
        block("cmake", "find_package(torchfuse"),
        encoding="utf-8",
    )
    code = block("cpp", "torchfuse::optim::FusedAdam")
    includes = "".join(re.findall(r"^#include.*\n", code, re.MULTILINE))
    body = re.sub(r"^#include.*\n", "", code, flags=re.MULTILINE)
    (project / "train.cpp").write_text(includes + AROUND.format(body=body), encoding="utf-8")

    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    configure_line = block("sh", "--cmake-dir")
    run("bash", "-ec", configure_line, cwd=project, env=environment(PATH=path))
    run("cmake", *shlex.split("--build build"), cwd=project)
    assert run(project / "build/train").endswith("trained\n")
