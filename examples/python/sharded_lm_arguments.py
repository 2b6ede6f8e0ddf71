# SPDX-License-Identifier: BSD-3-Clause
"""The command line of sharded_lm.py."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = ("precision", "sequence", "width", "layers", "heads")


def parse_arguments(description: str, precisions: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; `description` is the docstring of the program."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/sharded"))
    parser.add_argument(
        "--parallel", choices=("fsdp", "zero"), default="fsdp", help="of two or more processes"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="processes that share a layer"
    )
    parser.add_argument("--precision", choices=precisions, default="bf16")
    parser.add_argument("--steps", type=int, default=300, help="of the whole schedule")
    parser.add_argument("--warm-up", type=int, default=20, help="steps")
    parser.add_argument("--stop-after", type=int, help="step after which this run ends")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--resume-or-begin",
        action="store_true",
        help="the same where --out has a checkpoint: for torchrun's --max-restarts",
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps; and at the end")
    parser.add_argument("--validate-every", type=int, default=20, help="steps; and at the end")
    parser.add_argument("--validation-samples", type=int, default=64, help="of all together")
    parser.add_argument("--batch", type=int, default=16, help="samples of all processes together")
    parser.add_argument("--accumulate", type=int, default=1, help="parts of each one's samples")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="the largest of the schedule")
    arguments = parser.parse_args()
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a sentence if the arguments do not fit each other or the processes."""
    for name, value in vars(arguments).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            parser.error(f"expected --{name.replace('_', '-')} to be at least 1, got {value}")
    ranks, tensor = int(os.environ.get("WORLD_SIZE", "1")), arguments.tensor_parallel
    if ranks % tensor:
        parser.error(f"expected --tensor-parallel to divide {ranks} processes, got {tensor}")
    if tensor > 1 and arguments.parallel != "fsdp":
        parser.error(f"expected --parallel fsdp with --tensor-parallel, got {arguments.parallel}")
    if arguments.heads % tensor or arguments.width % arguments.heads:
        parser.error(
            "expected --heads to be a multiple of --tensor-parallel and to divide --width, got "
            f"{arguments.heads}"
        )
    data = ranks // tensor
    if arguments.batch % (data * arguments.accumulate):
        parser.error(
            f"expected --batch to be a multiple of {data * arguments.accumulate}, the "
            f"data-parallel processes times --accumulate, got {arguments.batch}"
        )
    if arguments.validation_samples % data:
        parser.error(
            f"expected --validation-samples to be a multiple of {data}, the data-parallel "
            f"processes, got {arguments.validation_samples}"
        )
    check_store(parser)
    check_out(parser, arguments)


def check_store(parser: argparse.ArgumentParser) -> None:
    """Ends with a sentence if processes that torchrun restarts would look for those that died."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        parser.error(
            "expected TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d or --standalone "
            f"for torchrun with --max-restarts {restarts}: the store that it keeps otherwise has "
            "the addresses of processes that died"
        )


def check_out(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a sentence if --out has no checkpoint to go on from, or one to lose."""
    found = last_checkpoint(arguments.out)
    if found and not (arguments.resume or arguments.resume_or_begin):
        folder = checkpoint_of(arguments.out, found)
        parser.error(f"expected an --out without checkpoints, or --resume; {folder} is there")
    if arguments.resume and not found:
        parser.error(f"expected a checkpoint in {arguments.out} with --resume, found none")
    if not found:
        return
    made = json.loads(model_file(arguments.out).read_text(encoding="utf-8"))
    if made != model_of(arguments):
        parser.error(
            f"expected --resume with the model of the checkpoint, {made}, got {model_of(arguments)}"
        )


def model_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a run and those that go on from its checkpoints have in common."""
    return {name: getattr(arguments, name) for name in MODEL}


def model_file(out: Path) -> Path:
    """Where that is written."""
    return out / "model.json"


def checkpoint_of(out: Path, step: int) -> Path:
    """The folder of the checkpoint after a step."""
    return out / "checkpoints" / f"{step:08d}"


def last_checkpoint(out: Path) -> int:
    """The step of the last complete one, else 0: the metadata is written after all parts."""
    return max((int(path.parent.name) for path in out.glob("checkpoints/*/.metadata")), default=0)
