# SPDX-License-Identifier: BSD-3-Clause
"""The runner behind tools/gpu_suite.sh.

`stages` says what is run in which call, `judges` what passes, `result` keeps the file, `machine`
says what is there. None imports torch: a broken installation is a message and not a traceback.
"""
