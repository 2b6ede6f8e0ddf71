# SPDX-License-Identifier: BSD-3-Clause
"""The runner behind tools/gpu_suite.sh: builds for one GPU, checks everything there, and reports.

`stages` says what is run, `judges` what passes, `parsers` reads what tools print, `runner` keeps
to the time, `report` writes. None of them imports torch: `probe` does, in a process of its own, so
that a broken installation is a message and not a traceback.
"""
