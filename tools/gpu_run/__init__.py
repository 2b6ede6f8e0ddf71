# SPDX-License-Identifier: BSD-3-Clause
"""The runner behind tools/gpu_run.sh: `stages` says what is run, `__main__` runs and judges it.

Neither imports torch: a broken installation is a sentence and costs a stage its own seconds only.
"""
