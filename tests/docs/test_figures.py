# SPDX-License-Identifier: BSD-3-Clause
"""Ratios and times that pages and pictures state are those of the committed result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "docs" / "_static"
HEAD = re.compile(r"^\| .* \| case \| peer \| ratio \|$")
RESULT = re.compile(r"\((?:\.\./)?(benchmarks/results/[\w./-]+\.json)\)")
SVG = "{http://www.w3.org/2000/svg}"


class Figure(NamedTuple):
    """A row of a table whose head ends in case, peer and ratio."""

    page: str
    file: str
    case: str
    peer: str
    ratio: str


def figures(page: str) -> list[Figure]:
    """The rows of a page; the result file is the last one that is linked above them."""
    found: list[Figure] = []
    file, inside = "", False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        file = (RESULT.findall(line) or [file])[-1]
        inside = (inside or HEAD.match(line) is not None) and line.startswith("|")
        if inside and not HEAD.match(line) and not line.startswith("|---"):
            _, case, peer, ratio = (cell.strip() for cell in line.strip("|").split("|"))
            found.append(Figure(page, file, case.strip("`"), peer, ratio))
    return found


FIGURES = [*figures("README.md"), *figures("docs/benchmarks.md")]


def measured(file: str, case: str, peer: str) -> list[float]:
    """The peer's time over ours, in the case or in all whose names begin with it."""
    result: dict[str, Any] = json.loads((ROOT / file).read_text(encoding="utf-8"))
    if "models" in result:  # benchmarks/data_parallel.py, where it is our time over the peer's
        rows = [row for row in result["models"] if row["name"] == case]
        return [1 / row["ratios"][peer]["of_medians"] for row in rows]
    rows = [row for row in result["cases"] if f"{row['name']}/".startswith(f"{case}/")]
    return [row["ratios"][peer]["of_medians"] for row in rows]


def as_text(ratio: float) -> str:
    """Three digits."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"


def test_tables_are_read_at_all() -> None:
    assert len([figure for figure in FIGURES if figure.page == "README.md"]) == 5
    assert len(FIGURES) >= 50
    results = {path for path in (ROOT / "benchmarks" / "results").glob("*-cpu/*.json")}
    shown = {ROOT / figure.file for figure in FIGURES}
    assert {path.name for path in results - shown} == {"2026-11-22-build-b800c8e.json"}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.case}-{figure.peer}")
def test_a_ratio_is_what_was_measured(figure: Figure) -> None:
    ratios = measured(figure.file, figure.case, figure.peer)
    assert ratios, f"{figure.file} has no case {figure.case}"
    ends = dict.fromkeys([as_text(min(ratios)), as_text(max(ratios))])
    assert figure.ratio == " to ".join(ends)


def test_the_readme_states_device_threads_and_noise() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    file = figures("README.md")[0].file
    environment = json.loads((ROOT / file).read_text(encoding="utf-8"))["environment"]
    threads = {1: "one thread", 2: "two threads"}[environment["threads"]]
    assert f"on an {environment['cpu']} with AVX-512, {threads} ([result file]({file}))" in text
    noise = measured(file, "noise", "torch fused")
    assert f"came to {min(noise):.2f} and {max(noise):.2f}:" in text


def test_the_readme_states_how_long_building_took() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("*/*-build-*.json")
    seconds = json.loads(path.read_text(encoding="utf-8"))["figures"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"about (\d+) s on two cores, or (\d+) s with CUDA", readme)
    for text, kind in zip(found, ("cpu", "cuda"), strict=True):
        assert int(text) == pytest.approx(seconds[f"{kind}: build from nothing, s"], abs=5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_of_the_step_is_to_scale(scheme: str) -> None:
    root = ElementTree.parse(STATIC / f"step-{scheme}.svg").getroot()
    text = "\n".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))
    file, case = re.findall(r"From (\S+\.json), (\w+/\w+)\.", text)[0]
    (row,) = [r for r in json.loads((ROOT / file).read_text())["cases"] if r["name"] == case]
    widths = {}
    for name, contender in (("torch", "torch fused"), ("torchfuse", "torchfuse")):
        milliseconds = 1e3 * row["seconds"][contender]["median"]
        for words in (text, root.get("aria-label", "")):
            assert f"{milliseconds:.1f} ms" in words
        bars = root.findall(f"{SVG}g[@id='{name}']/{SVG}rect")
        widths[name] = sum(float(bar.get("width", "nan")) for bar in bars)
    ratio = row["ratios"]["torch fused"]["of_medians"]
    assert f"{ratio:.2f} times as fast" in text
    assert widths["torch"] / widths["torchfuse"] == pytest.approx(ratio, rel=0.005)


@pytest.mark.parametrize("name", ["step", "buckets"])
def test_light_and_dark_differ_in_colors_alone(name: str) -> None:
    light, dark = (
        re.sub(r"#[0-9a-f]{6}", "#", (STATIC / f"{name}-{scheme}.svg").read_text(encoding="utf-8"))
        for scheme in ("light", "dark")
    )
    assert light == dark
