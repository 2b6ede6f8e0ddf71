#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# All linters over the files that git knows; `tools/lint.sh --fix` formats in place first.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t cxx < <(git ls-files --cached --others --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh')
mapfile -t cmake < <(git ls-files --cached --others --exclude-standard '*CMakeLists.txt' '*.cmake')
mapfile -t shell < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)
mapfile -t python < <(git ls-files --cached --others --exclude-standard '*.py' '*.pyi')

if [ "${1:-}" = "--fix" ]; then
  clang-format -i "${cxx[@]}"
  gersemi --in-place --quiet "${cmake[@]}"
  ruff format --quiet "${python[@]}"
  ruff check --fix --exit-zero --quiet "${python[@]}"
fi

status=0
clang-format --dry-run --Werror "${cxx[@]}" || status=1
gersemi --check "${cmake[@]}" || status=1
ruff format --check --quiet "${python[@]}" || status=1
ruff check "${python[@]}" || status=1
shellcheck "${shell[@]}" || status=1
check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml || status=1
check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*_re*.yml || status=1
codespell "${cxx[@]}" "${cmake[@]}" "${python[@]}" ./*.md docs .github || status=1
python tools/check_layers.py || status=1
exit "$status"
