# SPDX-License-Identifier: BSD-3-Clause
"""Tables and charts of the page on scale are written from a result file, and computed from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import charts
import curves
import report
import scale
import scale_page
import scale_paper

RESULT = "benchmarks/results/amd-epyc-cpu/2027-01-02-scale-0123456.json"
PAGE = f"""# Scale

Times of an Old Machine with AVX2 ([result file](../{RESULT})).

<!-- chart: curves of tensors -->
<!-- chart: end -->

<!-- chart: curves of adam-elements -->
<!-- chart: end -->

<!-- table: slopes -->
<!-- table: end -->

<!-- table: language-model -->
<!-- table: end -->
"""
OURS, PEER = "torchfuse", "torch fused"


def case(curve: str, size: int, threads: int, ours: float, peer: float) -> dict[str, Any]:
    seconds = {
        name: {"median": time, "low": 0.9 * time, "high": 1.1 * time}
        for name, time in ((OURS, ours), (PEER, peer))
    }
    point = {"name": f"{curve}/{size}", "curve": curve, "size": size, "threads": threads}
    return {**point, "seconds": seconds, "ratios": {}}


def made() -> dict[str, Any]:
    """Our tensors cost 1 µs each, torch's 4 µs; elements 1 ns, and half of it with two threads."""
    cases = [
        case("tensors/adam_float32", size, 1, 1e-6 * size, 4e-6 * size) for size in (1, 100, 10_000)
    ]
    cases += [
        case(f"elements/adam_float32/threads_{n}", size, n, 1e-9 * size / n, 2e-9 * size / n)
        for n in (1, 2)
        for size in (2**10, 2**20, 2**30)
    ]
    environment = {"cpu": "AMD EPYC Processor", "cpu_isa": "avx512", "threads": 2}
    environment["git"] = {"dirty": False}
    skipped = {"elements/adam_float32/threads_1/2^31": "needs 2 MiB of memory, 1 MiB are available"}
    return {
        "environment": environment,
        "cases": cases,
        "fits": scale.fits(cases),
        "skipped": skipped,
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with this page alone."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report.figures, "PAGES", ("docs/scale.md",))
    (tmp_path / RESULT).parent.mkdir(parents=True)
    (tmp_path / RESULT).write_text(json.dumps(made()))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/scale.md").write_text(PAGE)
    return tmp_path


def test_a_page_is_written_and_what_is_stale_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert report.main(["--check"]) == 1
    assert report.main(["--write"]) == 0
    assert report.main(["--check"]) == 0
    assert len(list((root / charts.FOLDER).iterdir())) == 4
    page = root / "docs/scale.md"
    text = page.read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert f"Times of an AMD EPYC with AVX-512 ([result file](../{RESULT}))." in text
    row = "| `tensors/adam_float32` | torch fused | 1.00 | 1.00 | 0 | 4.00 µs | 0 % | 4.00 µs |"
    assert row in text
    # 580 tensors.
    assert re.search(r"\| host of the optimizer, torchfuse \| tensors (\| 580 µs ){3}\| meas", text)
    page.write_text(page.read_text().replace("| 0 | 4.00", "| 0 | 4.01"))
    chart = root / charts.FOLDER / "tensors-curves-dark.svg"
    chart.write_text(chart.read_text().replace("4e-06", "5e-06"))
    capsys.readouterr()
    assert report.main(["--check"]) == 1
    errors = capsys.readouterr().err
    assert "| 0 | 4.01" in errors
    assert "tensors-curves-dark.svg: expected a chart of what" in errors
    assert "tensors-curves-light.svg" not in errors


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f" ([result file](../{RESULT}))", "", "11: expected a result file to be linked above th"),
        (
            "curves of tensors -->",
            "curves of tensors -->\n<!-- chart: end -->\n<!-- chart: curves of tensors -->",
            "7: expected one chart of the name tensors-curves, got two.",
        ),
        ("table: slopes", "table: colors", "11: expected a table of slopes, skipped, language-mod"),
        (
            "curves of tensors",
            "curves of tensor",
            f"5: {RESULT}: expected curves of tensors, adam-elements, ",
        ),
        (
            "curves of tensors",
            "curves of data-parallel",
            f"5: {RESULT}: expected two points of data_parallel/mlp or more, got 0.",
        ),
        ("<!-- table: end -->\n\n", "", " expected 2 tables with an end, got 1."),
    ],
)
def test_a_page_that_cannot_be_written_is_refused(
    old: str, new: str, message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = root / "docs/scale.md"
    assert old in PAGE
    page.write_text(PAGE.replace(old, new, 1))
    assert report.main(["--write"]) == 1
    assert f"report: docs/scale.md:{message}" in capsys.readouterr().err
    assert page.read_text() == PAGE.replace(old, new, 1)


def test_lines_have_their_times_and_slopes() -> None:
    chart = curves.chart_of("adam-elements", RESULT, made(), "here")
    assert chart.title == "fp32 Adam, one tensor: time against elements"
    assert [series.label for series in chart.series] == [
        f"{name}, {threads} thread{'s' if threads == 'two' else ''}"
        for threads in ("one", "two")
        for name in (OURS, PEER)
    ]
    assert [series.dashed for series in chart.series] == [False, False, True, True]
    assert chart.series[2].slope == 1.0
    assert chart.series[2].points[0] == curves.Point(1024, 5.12e-7, 4.608e-7, 5.632e-7)
    assert "takes 1.02 µs at 1,024 and 1.07 s at 1,073,741,824." in charts.alternative(chart)


def test_drawings_are_equal_but_for_colors() -> None:
    pytest.importorskip("matplotlib")
    from drawing_curves import draw

    for name in ("tensors", "adam-elements"):
        chart = curves.chart_of(name, RESULT, made(), "here")
        light, dark = (draw(chart, scheme) for scheme in charts.SCHEMES)
        assert light == draw(chart, "light")
        assert light != dark
        assert re.sub("#[0-9a-f]{6}", "#", light) == re.sub("#[0-9a-f]{6}", "#", dark)
        words = [chart.title, chart.subtitle, *(series.label for series in chart.series)]
        for word in (*words, "slope 1.00", "1 ms"):
            assert f">{word}</text>" in light
    assert ">2³⁰</text>" in light


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"),
        (2.5e-11, "0.0250 ns"),
        (9.996e-7, "1.00 µs"),
        (1.234e-4, "123 µs"),
        (0.0123, "12.3 ms"),
        (2.0, "2.00 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert curves.duration(seconds) == text


def test_skipped_points_are_a_table() -> None:
    result = made()
    row = "| `elements/adam_float32/threads_1/2^31` | needs 2 MiB of memory, 1 MiB are available |"
    assert row in scale_page.skipped(result)
    assert scale_page.skipped({**result, "skipped": {}}) == "No point was skipped."


def test_the_models_are_those_of_their_shapes() -> None:
    gpt, resnet = scale_paper.model("gpt2_xl"), scale_paper.model("resnet50")
    assert (gpt.tensors, gpt.numel) == (580, 1_557_611_200)
    assert (resnet.tensors, resnet.numel) == (161, 25_557_032)
    assert (len(resnet.norms), sum(resnet.norms)) == (53, 26_560)


def test_parts_grow_as_their_rows_say() -> None:
    parts = {part.name: part.seconds for part in scale_paper.language_model(made())}
    alone, node, many = parts["Adam, sharded"]
    assert (alone / node, alone / many) == (pytest.approx(8), pytest.approx(1000))
    assert parts["Adam on every GPU"] == [alone] * 3
    # 1,557,611,200 elements of 28 bytes at 4.8 TB/s, and of 4 bytes in 238 buckets.
    assert alone == pytest.approx(1_557_611_200 * 28 / 4.8e12)
    assert parts["gradients, bytes"][0] == 0
    gradients = 1_557_611_200 * 4
    assert parts["gradients, bytes"][1] == pytest.approx(2 * 7 / 8 * gradients / 450e9)
    assert parts["gradients, bytes"][2] == pytest.approx(2 * 999 / 1000 * gradients / 50e9)
    assert parts["gradients, messages in rings"] == pytest.approx([0, 238 * 7e-5, 238 * 999e-5])
    assert parts["gradients, messages in trees"] == pytest.approx([0, 238 * 3e-5, 238 * 1e-4])
    assert parts["host of the optimizer, torch fused"] == pytest.approx([580 * 4e-6] * 3)


def test_what_batch_norms_exchange() -> None:
    """53 layers with 26,560 channels: 6 C + 1 doubles of ours; 2 C + 1 and 2 C floats of torch."""
    parts = {part.name: part.seconds for part in scale_paper.batch_norms()}
    ours, torch_gathers, torch_sums = 8 * (6 * 26_560 + 53), 4 * (2 * 26_560 + 53), 8 * 26_560
    assert parts["bytes, torchfuse"][2] == pytest.approx(1.998 * ours / 50e9)
    received = 999 * torch_gathers + 1.998 * torch_sums
    assert parts["bytes, torch"][2] == pytest.approx(received / 50e9)
    assert parts["messages, torchfuse"] == pytest.approx([0, 53 * 2 * 3e-5, 53 * 2 * 1e-4])
    assert parts["messages, torch"] == pytest.approx([0, 53 * 4.5e-5, 53 * 1.5e-4])


def test_sizes_between_measured_ones() -> None:
    points = [(1, 1.0), (100, 100.0), (1000, 100.0)]
    assert scale_paper.interpolated(points, 10) == pytest.approx(10.0)
    assert scale_paper.interpolated(points, 500) == pytest.approx(100.0)
    with pytest.raises(ValueError, match=r"expected points around 1001, got \[1, 100, 1000\]"):
        scale_paper.interpolated(points, 1001)
