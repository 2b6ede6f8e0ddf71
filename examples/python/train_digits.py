# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small convolutional network on handwritten digits in fp32 and in mixed precision.

Example:
    python examples/python/train_digits.py --out build/demo

The optimizer, the gradient clipping and the loss scaling are torchfuse's. Prints the test accuracy
and a table of fp32 against mixed precision; writes two bar charts and the loss scale's history.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path

import torch

import digits
import digits_report

MIN_ACCURACY = 0.97
# Most processors emulate fp16, ten times slower: a third of the training is enough to compare.
FP16_ON_CPU_SHARE = 1 / 3
MIN_ACCURACY_OF_A_SHARE = 0.93


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for charts")
    parser.add_argument("--export", type=Path, help="write the data for the C++ example here")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"expected --epochs to be at least 1, got {arguments.epochs}")
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for, but torch sees no CUDA device")
    return arguments


def epochs_of(mode: str, arguments: argparse.Namespace) -> int:
    """Number of epochs that the mode trains."""
    epochs: int = arguments.epochs
    if mode == "fp16" and arguments.device == "cpu":
        epochs = max(1, round(FP16_ON_CPU_SHARE * epochs))
    return epochs


def run_mode(mode: str, data: digits.Digits, arguments: argparse.Namespace) -> digits.Result:
    """Trains in a fresh process, so that one mode's peak memory does not hide another's."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(
        target=digits.run_in_worker,
        args=(
            *(sender, mode, data, arguments.device),
            *(epochs_of(mode, arguments), arguments.threads),
        ),
    )
    worker.start()
    sender.close()
    try:
        result: digits.Result = receiver.recv()
    except EOFError:
        worker.join()
        raise SystemExit(f"training in {mode} failed with exit status {worker.exitcode}") from None
    worker.join()
    return result


def main() -> int:
    """Runs all modes; returns the exit status."""
    arguments = parse_arguments()
    data = digits.load_digits()
    if arguments.export is not None:
        digits.export(data, arguments.export)
        print(f"data for the C++ example: {arguments.export}")

    if arguments.device == "cuda":
        modes = ["fp32", "fp16"]
        print(f"device: {torch.cuda.get_device_name()}")
    else:
        modes = ["fp32", "bf16", "fp16"]
        print(f"device: CPU, {arguments.threads} threads")
        for mode in modes[1:]:
            print(f"  {mode}: {digits.cpu_support(mode)}; {epochs_of(mode, arguments)} epochs")

    results = [run_mode(mode, data, arguments) for mode in modes]
    print()
    print(digits_report.table(results))
    for path in digits_report.write(results, arguments.out):
        print(f"wrote {path}")

    failed = False
    for result in results:
        whole = epochs_of(result.mode, arguments) == arguments.epochs
        expected = MIN_ACCURACY if whole else MIN_ACCURACY_OF_A_SHARE
        if result.accuracy < expected:
            failed = True
            print(
                f"{result.mode}: expected a test accuracy of at least {expected:.0%}, "
                f"got {result.accuracy:.2%}",
                file=sys.stderr,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
