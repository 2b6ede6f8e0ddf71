# SPDX-License-Identifier: BSD-3-Clause
"""Builds the documentation site and tests it: `make docs`.

Doxygen reads the public headers, Sphinx makes build/docs/html, doctests run, the tutorials run in
their quick mode, the C++ examples are built against build/prefix and run, and tests/docs looks at
the result. Every warning is an error. What the page of the tutorials shows is committed below
docs/tutorials; `python docs/build_site.py --record-tutorials` makes it anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "docs"
PROGRAMS = ("quickstart", "tour", "muon")
# Of each tutorial, what docs/tutorials.md shows; of the one that measures, nothing.
TUTORIALS = {
    "mixed_precision_loop": ("printed.txt", "resume.png"),
    "why_loss_scaling": ("printed.txt", "why_loss_scaling.png"),
    "why_master_weights": ("printed.txt", "why_master_weights.png"),
    "precision_and_size": (),
    "loss_scale_history": ("printed.txt", "loss_scale.png"),
}


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Runs a command; prints its output, and ends the program if it fails."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    print(result.stdout, end="", flush=True)
    if result.returncode != 0:
        sys.exit(f"docs: {Path(command[0]).name} failed with exit status {result.returncode}.")
    return result.stdout


def sphinx(builder: str) -> str:
    """Runs one of Sphinx's builders on docs/."""
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    return run(
        *(sys.executable, "-m", "sphinx", "--builder", builder, *options),
        *("--doctree-dir", str(OUT / "doctrees"), str(ROOT / "docs"), str(OUT / builder)),
    )


def run_programs() -> None:
    """Builds docs/examples as a user would, and runs every program."""
    build = OUT / "examples"
    run(
        *("cmake", "-S", ROOT / "docs" / "examples", "-B", build, "-G", "Ninja"),
        f"-DCMAKE_PREFIX_PATH={ROOT / 'build' / 'prefix'}",
    )
    run("cmake", "--build", build)
    for program in PROGRAMS:
        run(build / program, folder=build)
    for program in ("quickstart.py", "shortest_loop.py"):
        run(sys.executable, ROOT / "docs" / "examples" / program)


def run_tutorials(*options: str) -> None:
    """Runs the tutorials, each in its own folder."""
    for name in TUTORIALS:
        folder = OUT / "tutorials" / name
        folder.mkdir(parents=True, exist_ok=True)
        program = ROOT / "examples" / "python" / f"{name}.py"
        result = subprocess.run(
            [sys.executable, str(program), "--out", str(folder), "--device", "cpu", *options],
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
        if result.returncode != 0:
            print(result.stdout, result.stderr, sep="")
            sys.exit(f"docs: {program.name} failed with exit status {result.returncode}.")
        printed = [line for line in result.stdout.splitlines() if not line.startswith("wrote ")]
        (folder / "printed.txt").write_text("\n".join(printed) + "\n", encoding="utf-8")
        print(f"docs: {program.name} ran", flush=True)


def record_tutorials() -> None:
    """Replaces what docs/tutorials.md shows by this machine's; the page has to name the machine."""
    run_tutorials()
    for name, shown in TUTORIALS.items():
        folder = ROOT / "docs" / "tutorials" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in shown:
            shutil.copy(OUT / "tutorials" / name / file, folder / file)


def count(pattern: str, text: str) -> int:
    """The one number that `pattern` finds in a tool's report."""
    found = re.findall(pattern, text, re.MULTILINE)
    if len(found) != 1 or int(found[0]) == 0:
        sys.exit(f"docs: expected one count by {pattern!r}, got {found}.")
    return int(found[0])


def main() -> None:
    """Builds and tests, and prints one line with the figures."""
    for stale in ("html", "doctest", "doctrees", "doxygen", "tutorials"):
        shutil.rmtree(OUT / stale, ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)
    run("doxygen", "docs/Doxyfile")
    run_tutorials("--quick")
    sphinx("html")
    sphinx("doctest")
    summary = (OUT / "doctest" / "output.txt").read_text(encoding="utf-8")
    doctests = count(r"^ +(\d+) tests$", summary)
    run_programs()
    checks = count(
        r"^=* ?(\d+) passed",
        run(sys.executable, "-m", "pytest", "--quiet", ROOT / "tests" / "docs"),
    )
    pages = sum(
        1 for page in (ROOT / "docs").rglob("*.md") if (OUT / "html" / page_of(page)).exists()
    )
    programs = len(PROGRAMS) + 1 + len(TUTORIALS)
    print(
        f"docs: {pages} pages, {doctests} doctests passed, {programs} example programs ran, "
        f"{checks} checks passed; open build/docs/html/index.html"
    )


def page_of(source: Path) -> Path:
    """Where the site has a page."""
    return source.relative_to(ROOT / "docs").with_suffix(".html")


if __name__ == "__main__":
    if sys.argv[1:] == ["--record-tutorials"]:
        record_tutorials()
    else:
        main()
