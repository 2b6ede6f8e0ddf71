# SPDX-License-Identifier: BSD-3-Clause
"""Writes the figures and charts of pages from committed result files.

Example:
    python benchmarks/report.py --write    rewrites the pages and draws docs/_static/charts
    python benchmarks/report.py --check    exits with 1 and names what the files do not say
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import charts
import curves
import figures
import gpu_predictions
import gpu_result
import page_tables
import scale_page
import sharding_paper
import targets
import thread_gain

ROOT = Path(__file__).resolve().parent.parent
TABLES = {
    **scale_page.TABLES,
    **sharding_paper.TABLES,
    **gpu_predictions.TABLES,
    **targets.TABLES,
    **thread_gain.TABLES,
}


def stale_lines(page: str, text: str, wanted: str) -> Iterator[str]:
    """A sentence for each place where a page differs from what it has to be."""
    old, new = text.splitlines(), wanted.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, begin, end, new_begin, new_end in matcher.get_opcodes():
        if tag != "equal":
            found = "\n".join(old[begin:end]) or "nothing"
            expected = "\n".join(new[new_begin:new_end]) or "nothing"
            yield f"{page}:{begin + 1}: expected\n{expected}\ngot\n{found}"


def stale_charts(root: Path, wanted: dict[str, charts.Chart | curves.Curves]) -> Iterator[str]:
    """A sentence for each chart that was drawn from other data, is missing or has no page."""
    for name, chart in wanted.items():
        found = charts.drawn(root / name)
        if found is None:
            yield f"{name}: expected a chart of {chart.file}, got none."
        elif found != charts.as_data(chart):
            yield f"{name}: expected a chart of what {chart.file} says, got other data."
    for path in sorted((root / charts.FOLDER).glob("*")):
        name = path.relative_to(root).as_posix()
        if name not in wanted:
            yield f"{name}: expected a page that shows it, got none."


def warnings(root: Path, texts: dict[str, str]) -> Iterator[str]:
    """A sentence for each result file that no commit has the code of."""
    files = {file for text in texts.values() for file in figures.LINK.findall(text)}
    for file in sorted(files):
        result = figures.load(root, file)
        git = result.get("environment", {}).get("git", {})
        if result.get("kind") == gpu_result.KIND:  # says itself what was not as expected
            continue
        if git.get("dirty") is not False:
            yield f"warning: {file} was not measured in a clean git tree."


def write(
    root: Path, texts: dict[str, str], wanted: dict[str, charts.Chart | curves.Curves]
) -> None:
    """Writes pages and charts, and removes charts that no page shows: nothing if a chart fails."""
    from drawing_curves import draw  # --check needs no matplotlib

    schemes = {name: Path(name).stem.rpartition("-")[2] for name in wanted}
    drawn = {name: draw(chart, schemes[name]) for name, chart in wanted.items()}
    for page, text in texts.items():
        (root / page).write_text(text, encoding="utf-8")
    (root / charts.FOLDER).mkdir(parents=True, exist_ok=True)
    for name, drawing in drawn.items():
        (root / name).write_text(drawing, encoding="utf-8")
    for path in (root / charts.FOLDER).glob("*"):
        if path.relative_to(root).as_posix() not in wanted:
            path.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks pages and charts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="rewrite the pages, draw the charts")
    action.add_argument("--check", action="store_true", help="exit with 1 if one of them is stale")
    options = parser.parse_args(arguments)
    wanted: dict[str, str] = {}
    drawings: dict[str, charts.Chart | curves.Curves] = {}
    try:
        texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in figures.PAGES}
        for page, text in texts.items():
            refreshed = figures.refreshed(ROOT, page, text)
            refreshed = page_tables.placed(ROOT, page, refreshed, TABLES)
            refreshed = gpu_result.placed(ROOT, page, refreshed)
            wanted[page], shown = charts.placed(ROOT, page, refreshed)
            for chart in shown:
                for scheme in charts.SCHEMES:
                    drawings[f"{charts.FOLDER}/{chart.name}-{scheme}.svg"] = chart
        for warning in warnings(ROOT, texts):
            print(f"report: {warning}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        reason = f"expected {error} in a result file that it links, got none."
        print(f"report: {page}: {reason}", file=sys.stderr)
        return 1
    except (AttributeError, LookupError, TypeError, ZeroDivisionError) as error:
        reason = f"expected results in the files that it links, got others: {type(error).__name__}"
        print(f"report: {page}: {reason}: {error}.", file=sys.stderr)
        return 1
    if options.write:
        write(ROOT, wanted, drawings)
        return 0
    stale = [line for page in texts for line in stale_lines(page, texts[page], wanted[page])]
    stale += stale_charts(ROOT, drawings)
    for line in stale:
        print(f"report: {line}", file=sys.stderr)
    if stale:
        print("report: run `python benchmarks/report.py --write`.", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
