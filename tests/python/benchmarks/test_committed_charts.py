# SPDX-License-Identifier: BSD-3-Clause
"""The charts of the site can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import charts


def test_labels_of_the_committed_charts_fit() -> None:
    """In DejaVu Sans, the widest of the fonts that the charts name."""
    pytest.importorskip("matplotlib")
    from matplotlib.textpath import TextPath

    import drawing
    import drawing_curves

    def width(text: str, size: int) -> float:
        return TextPath((0, 0), text, size=size).get_extents().width if text else 0.0

    folder = Path(__file__).resolve().parents[3] / charts.FOLDER
    for path in sorted(folder.glob("*-light.svg")):
        chart = json.loads(charts.drawn(path) or "")
        for label, note, *_ in chart.get("bars", []):
            both = width(label, drawing.TEXT) + width(note, drawing.QUIET)
            assert both + 10 < drawing.WIDTH - 2 * drawing.MARGIN, (path.name, label, note)
        for label, *_ in chart.get("series", []):
            both = drawing_curves.SWATCH + width(label + "slope 0.00", drawing.TEXT)
            assert both + 20 < drawing.WIDTH - 2 * drawing.MARGIN, (path.name, label)
        assert width(chart["subtitle"], drawing.QUIET) < drawing.WIDTH - 2 * drawing.MARGIN
