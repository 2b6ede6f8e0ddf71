# SPDX-License-Identifier: BSD-3-Clause
"""Ratios and times that pages and pictures state are those of the committed result files."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "docs" / "_static"
SVG = "{http://www.w3.org/2000/svg}"

sys.path.insert(0, str(ROOT / "benchmarks"))
import charts  # noqa: E402
import figures  # noqa: E402
import report  # noqa: E402
from suites import packages  # noqa: E402

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in figures.PAGES}
PERFORMANCE = "docs/performance.md"
TABLES = [table for page, text in TEXTS.items() for table in figures.tables(page, text)]
ROWS = [(table, row) for table in TABLES for row in table.rows]


def test_tables_are_read_at_all() -> None:
    assert len([table for table, _ in ROWS if table.page == "README.md"]) == 5
    assert len(ROWS) >= 50
    results = {path for path in (ROOT / "benchmarks" / "results").glob("*-cpu/*.json")}
    shown = {ROOT / file for text in TEXTS.values() for file in figures.LINK.findall(text)}
    assert {path.name for path in results - shown} == {"2026-11-22-build-b800c8e.json"}


@pytest.mark.parametrize(
    ("table", "row"), ROWS, ids=[f"{table.page}-{row.case}-{row.peer}" for table, row in ROWS]
)
def test_a_ratio_is_what_was_measured(table: figures.Table, row: figures.Row) -> None:
    assert row.ratio == figures.expected(figures.load(ROOT, table.file), table, row)


def test_the_first_table_is_what_the_samples_say() -> None:
    """By another way than the program that writes the tables."""
    readme = TEXTS["README.md"]
    speed = readme[readme.index("## Speed") :]
    (file,) = re.findall(r"benchmarks/results/\S+\.json", speed)
    cases = {case["name"]: case for case in json.loads((ROOT / file).read_text())["cases"]}
    rows = re.findall(r"`(\w+/\w+)` \| (torch fused) \| ([\d.]+) \|", readme)
    assert len(rows) == 5
    for name, peer, ratio in rows:
        samples = cases[name]["samples"]
        rounds = zip(samples[peer], samples["torchfuse"], strict=True)
        measured = statistics.median(theirs / ours for theirs, ours in rounds)
        assert float(ratio) == pytest.approx(measured, abs=0.0051 if measured < 9.995 else 0.051), (
            name
        )


def test_pages_and_charts_are_those_of_the_result_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = report.main(["--check"])
    assert status == 0, capsys.readouterr().err
    assert len(list((ROOT / charts.FOLDER).iterdir())) >= 24


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "| 1.80 |", "| 1.81 |"),
        ("README.md", "came to 1.00 and", "came to 0.99 and"),
        ("README.md", "about 160 s", "about 150 s"),
        ("README.md", "AMD EPYC with AVX-512, two threads", "AMD EPYC with AVX2, two threads"),
        ("docs/benchmarks.md", "| 5.24 to 11.3 |", "| 5.24 to 12.3 |"),
    ],
)
def test_a_figure_that_was_changed_by_hand_is_noticed(page: str, old: str, new: str) -> None:
    text = TEXTS[page]
    assert old in text
    changed = text.replace(old, new, 1)
    assert figures.refreshed(ROOT, page, changed) == text
    (place,) = report.stale_lines(page, changed, text)
    assert place.startswith(f"{page}:{text[: text.index(old)].count(chr(10)) + 1}: expected\n")


def test_the_readme_states_device_threads_and_noise() -> None:
    text = TEXTS["README.md"]
    file = TABLES[0].file
    result = json.loads((ROOT / file).read_text(encoding="utf-8"))
    environment = result["environment"]
    threads = {1: "one thread", 2: "two threads"}[environment["threads"]]
    assert f"on an {environment['cpu']} with AVX-512, {threads} ([result file]({file}))" in text
    noise = [
        case["ratios"]["torch fused"]["per_round"]["median"]
        for case in result["cases"]
        if case["name"].startswith("noise/")
    ]
    assert f"came to {min(noise):.2f} and {max(noise):.2f}:" in text


def test_the_readme_states_how_long_building_took() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("*/*-build-*.json")
    seconds = json.loads(path.read_text(encoding="utf-8"))["figures"]
    (found,) = re.findall(r"about (\d+) s on two cores, or (\d+) s with CUDA", TEXTS["README.md"])
    for text, kind in zip(found, ("cpu", "cuda"), strict=True):
        assert int(text) == pytest.approx(seconds[f"{kind}: build from nothing, s"], abs=5)


def test_the_page_says_which_results_are_older_than_the_pause() -> None:
    """The commit that brought the pause made results say the policy of waiting threads too."""
    page = TEXTS["docs/benchmarks.md"]
    results = {file: figures.load(ROOT, file) for file in figures.LINK.findall(page)}
    older = {
        file
        for file, result in results.items()
        if "openmp_wait_policy" not in result["environment"]
        for case in result.get("cases", ())
        if any(name.startswith(packages.OTHER_POOLS) for name in case.get("ratios", ()))
    }
    said = "The two results of the shapes of models are older than this pause"
    assert (said in page) == bool(older)
    assert all(re.search(r"-scenarios_(fp32|masters)-", file) for file in older)


def test_the_page_says_how_far_torch_is_where_memory_decides() -> None:
    text = TEXTS["docs/scale.md"]
    (said,) = re.findall(r"takes between (\d+) % less and (\d+) % more time there", text)
    (file,) = set(figures.LINK.findall(text))
    ratios = [
        case["ratios"]["torch fused"]["per_round"]["median"]
        for case in figures.load(ROOT, file)["cases"]
        if case["name"].startswith("elements/adam_float32/") and case["size"] >= 2**22
    ]
    assert said == (f"{100 * (1 - min(ratios)):.0f}", f"{100 * (max(ratios) - 1):.0f}")


def test_the_page_says_whose_norm_gains_from_the_faster_memory() -> None:
    assert "takes as long at both speeds of the memory, within a tenth" in TEXTS[PERFORMANCE]
    files = figures.LINK.findall(TEXTS[PERFORMANCE])[1:]
    cases = [case for file in files for case in figures.load(ROOT, file)["cases"]]
    seconds = [case["seconds"] for case in cases if case["name"] == "norm_and_check/large"]
    ours, torchs = (
        [entry[name]["median"] for entry in seconds] for name in ("torchfuse", "get_total_norm")
    )
    assert max(torchs) < 1.1 * min(torchs)
    assert max(ours) > 1.25 * min(ours)


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
    assert file == TABLES[0].file  # of the table that refers to the picture
    ratios = row["ratios"]["torch fused"]
    for words in (text, root.get("aria-label", "")):
        assert f"{ratios['per_round']['median']:.2f} times as fast" in words
    assert widths["torch"] / widths["torchfuse"] == pytest.approx(ratios["of_medians"], rel=0.005)


PICTURES = sorted(
    path.relative_to(STATIC).as_posix().removesuffix("-light.svg")
    for path in STATIC.rglob("*-light.svg")
)


@pytest.mark.parametrize("name", PICTURES)
def test_light_and_dark_differ_in_colors_alone(name: str) -> None:
    texts = [(STATIC / f"{name}-{scheme}.svg").read_text("utf-8") for scheme in charts.SCHEMES]
    light, dark = (re.sub(r"#[0-9a-f]{6}", "#", text) for text in texts)
    assert light == dark
    assert len(light) < 60_000
