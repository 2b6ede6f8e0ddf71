# SPDX-License-Identifier: BSD-3-Clause
"""Tables and charts of bytes, which benchmarks/traffic.py counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import charts
import figures

FILE = "benchmarks/results/amd-epyc-cpu/2027-01-02-traffic-0123456.json"
PAGE = "docs/benchmarks.md"
TEXT = f"""# Benchmarks

## Traffic

Old Machine with AVX2, one thread ([result file](../{FILE})).

| step | case | contender | bytes per element |
|---|---|---|---:|
| with clipping | `fp32/s3` | torchfuse | |
| with clipping | `fp32/s3` | torch fused | 1 + 1 |

<!-- chart: bytes of traffic -->
<!-- chart: end -->
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one result file."""
    counted = {"torchfuse": {"read": 20.04, "written": 11.9}}
    counted["torch fused"] = {"read": 28.0, "written": 20.0}
    case = {"name": "fp32/s3", "model_bytes": 32, "traffic": counted}
    environment = {"cpu": "AMD EPYC Processor", "cpu_isa": "avx2", "threads": 1}
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(json.dumps({"environment": environment, "cases": [case]}))
    return tmp_path


def test_bytes_are_written_to_the_table(root: Path) -> None:
    text = figures.refreshed(root, PAGE, TEXT)
    assert "| with clipping | `fp32/s3` | torchfuse | 20.0 + 11.9 |" in text
    assert "| with clipping | `fp32/s3` | torch fused | 28.0 + 20.0 |" in text
    assert "AMD EPYC with AVX2, one thread (" in text
    unknown = TEXT.replace("torchfuse |", "apex |")
    with pytest.raises(ValueError, match=r"md:9: .*\.json has no traffic of apex in fp32/s3\."):
        figures.refreshed(root, PAGE, unknown)


def test_the_chart_shows_model_bytes_and_all(root: Path) -> None:
    text, (chart,) = charts.placed(root, PAGE, figures.refreshed(root, PAGE, TEXT))
    assert chart.bars[0] == charts.Bar("with clipping", "torchfuse", "31.9", 31.94, 31.94, None)
    assert chart.bars[1] == charts.Bar("with clipping", "torch fused", "48.0", 32.0, 48.0, None)
    assert "In 2 rows of the table above 32 to 48 bytes per element are read and written." in text
    assert chart.name == "traffic-bytes"
    pytest.importorskip("matplotlib")
    from drawing import draw

    assert ">bytes per element, read and written</text>" in draw(chart, "light")


@pytest.mark.parametrize("kind", ["ratios", ""])
def test_a_table_of_bytes_has_a_chart_of_bytes(kind: str, root: Path) -> None:
    mark = "<!-- chart: bytes of traffic -->\n<!-- chart: end -->"
    other = "<!-- chart: bandwidth of traffic -->\n<!-- chart: end -->"
    new = mark.replace("bytes", kind) if kind else other
    with pytest.raises(ValueError, match=r"expected no chart of \w+ for 'step', got one"):
        charts.placed(root, PAGE, TEXT.replace(mark, new))
