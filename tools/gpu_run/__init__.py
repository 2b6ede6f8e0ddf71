# SPDX-License-Identifier: BSD-3-Clause
"""Behind tools/gpu_run.sh. Without torch: a broken installation costs a stage its own time."""
