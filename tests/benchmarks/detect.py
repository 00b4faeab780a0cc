"""What ``detect: true`` costs: time of a small operation, and of a training step, with the detector and without.

    python -m tests.benchmarks.detect

Operations are timed on the CPU, steps with plain PyTorch (three layers of 1024 x 1024, batch 64, one thread).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroguard.backends.deepspeed.detect import ReadDetector


class Quiet:
    """An accelerator on which nothing is pinned, so that nothing is ever pending."""

    def on_accelerator(self, tensor: Any) -> bool:
        return True

    def is_pinned(self, tensor: Any) -> bool:
        return False


def median(do: Callable[[], None], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        do()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    small = torch.ones(8)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 1024)

    def operations() -> None:
        for _ in range(1000):
            small.add(1)

    def step() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for name, do, unit, scale in (("an addition of 8 elements", operations, "us", 1e3), ("a step", step, "ms", 1e3)):
        bare = median(do) * scale
        detector = ReadDetector(Quiet, lambda *told: None)
        watched = median(do) * scale
        detector.stop()
        print(f"{name}: {bare:.2f} {unit} without, {watched:.2f} {unit} with detect ({watched / bare:.2f} times)")


if __name__ == "__main__":
    main()
