# SPDX-License-Identifier: BSD-3-Clause
"""Data, network and training loop of the handwritten-digits example."""

from __future__ import annotations

import dataclasses
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from tqdm import tqdm

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

NUM_TEST = 360
BATCH_SIZE = 64
LEARNING_RATE = 1.5e-3
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
# Far below the default of 2,000 so that the scale also grows within the few hundred steps here.
GROWTH_INTERVAL = 60
WARM_UP_STEPS = 5

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Digits:
    """The data set: images are [N, 1, 8, 8] in [0, 1], labels are [N] in 0..9."""

    train_images: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one training run measured."""

    mode: str
    accuracy: float
    step_ms: float
    peak_mib: float
    skipped_steps: int
    loss_scales: list[float]


def load_digits() -> Digits:
    """Loads scikit-learn's digits with a split that is the same on every machine."""
    from sklearn.datasets import load_digits as load

    data = load()
    images = (data.images / 16.0).astype(np.float32)[:, None, :, :]
    labels = data.target.astype(np.int64)
    order = np.random.RandomState(0).permutation(len(labels))
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return Digits(images[train], labels[train], images[test], labels[test])


def export(data: Digits, folder: Path) -> None:
    """Writes the arrays as raw little-endian files, which the C++ example reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        getattr(data, f"{part}_images").astype("<f4").tofile(folder / f"{part}_images.f32")
        getattr(data, f"{part}_labels").astype("<i8").tofile(folder / f"{part}_labels.i64")


def make_model() -> nn.Sequential:
    """The network of the example; the C++ program builds the same one."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def cpu_flags() -> set[str]:
    """The processor's feature flags, or an empty set where the system does not list them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def cpu_support(mode: str) -> str:
    """One sentence on how this processor computes in the mode's type."""
    if mode == "fp32":
        return "native"
    flags = cpu_flags()
    if not flags:
        return f"unknown, no feature flags on {platform.system()}"
    native = {
        "bf16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
        "fp16": {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"},
    }[mode]
    found = sorted(native & flags)
    if found:
        return f"native ({', '.join(found)})"
    return "emulated: stored in 16 bits, computed in fp32; slower, the same training"


class PeakMemory:
    """Peak memory of the code between construction and `mib()`.

    On a CPU this is the growth of the process's peak resident size, so each mode needs a process of
    its own. Linux can reset that peak, to exclude what imports needed.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts to measure."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device) / 1024
            return
        clear_refs = Path("/proc/self/clear_refs")
        if clear_refs.exists():
            clear_refs.write_text("5")
        self._start = self._peak_kib()

    @staticmethod
    def _peak_kib() -> float:
        status = Path("/proc/self/status")
        if status.exists():
            for line in status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return float(line.split()[1])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1024 if sys.platform == "darwin" else float(peak)

    def mib(self) -> float:
        """MiB at the peak since the start, beyond what was in use then."""
        if self._device.type == "cuda":
            peak_kib = torch.cuda.max_memory_allocated(self._device) / 1024
            return (peak_kib - self._start) / 1024
        return (self._peak_kib() - self._start) / 1024


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of images that the model labels correctly, computed in fp32."""
    with torch.no_grad():
        predicted = model(images).argmax(dim=1)
    return float((predicted == labels).float().mean())


class Trainer:
    """A model with its optimizer and loss scaler."""

    def __init__(self, mode: str, device: torch.device) -> None:
        """Builds everything from a fixed seed."""
        torch.manual_seed(0)
        self._device_type = device.type
        self._dtype = DTYPES[mode]
        self.model = make_model().to(device)
        self.optimizer = FusedAdam(
            self.model.parameters(),
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
        )
        self.scaler = GradScaler(
            device.type, growth_interval=GROWTH_INTERVAL, enabled=self._dtype is torch.float16
        )

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """One training step on a batch."""
        self.optimizer.zero_grad()
        with torch.autocast(self._device_type, self._dtype, enabled=self._dtype is not None):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        # Checks, unscales, clips and updates in two reads of the gradients, and skips the update
        # on the device if the scale was too large: nothing here waits for a value.
        self.scaler.step(self.optimizer)
        self.scaler.update()


def train(mode: str, data: Digits, device_name: str, epochs: int, threads: int) -> Result:
    """Trains the network and tests it; needs a process of its own (see PeakMemory)."""
    torch.set_num_threads(threads)
    device = torch.device(device_name)
    images, labels, test_images, test_labels = (
        torch.from_numpy(array).to(device)
        for array in (data.train_images, data.train_labels, data.test_images, data.test_labels)
    )
    # One throw-away step on two images: libraries loaded on first use are not training memory.
    Trainer(mode, device).step(images[:2], labels[:2])
    memory = PeakMemory(device)

    trainer = Trainer(mode, device)
    generator = torch.Generator().manual_seed(0)
    times: list[float] = []
    scales: list[float] = []
    skipped = 0
    total = epochs * (len(labels) // BATCH_SIZE)
    # Without a terminal the bar is silent, and each tenth gets a line.
    with tqdm(total=total, desc=mode, unit="step", disable=None) as progress:
        for _ in range(epochs):
            order = torch.randperm(len(labels), generator=generator).to(device)
            for first in range(0, len(labels) - BATCH_SIZE + 1, BATCH_SIZE):
                batch = order[first : first + BATCH_SIZE]
                before = trainer.scaler.get_scale()
                start = time.perf_counter()
                trainer.step(images[batch], labels[batch])
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - start)
                scales.append(trainer.scaler.get_scale())
                skipped += scales[-1] < before
                progress.update()
                if progress.disable and 10 * len(times) // total > 10 * (len(times) - 1) // total:
                    print(f"{mode}: {len(times)} of {total} steps", file=sys.stderr, flush=True)
    return Result(
        mode=mode,
        peak_mib=memory.mib(),
        accuracy=accuracy(trainer.model, test_images, test_labels),
        step_ms=1e3 * statistics.median(times[WARM_UP_STEPS:] or times),
        skipped_steps=skipped,
        loss_scales=scales if trainer.scaler.is_enabled() else [],
    )


def run_in_worker(connection: Any, *arguments: Any) -> None:
    """Entry point of the worker process: sends the Result back."""
    connection.send(train(*arguments))
    connection.close()
