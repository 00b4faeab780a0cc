"""What the Lightning examples need besides Lightning: its strategies on a CPU, the model, plain PyTorch, a table.

Importing it sets up the process: one rank, a CPU, and quiet packages.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The checkout comes first, so that the examples run without an installation and show the code beside them.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Read when torch and DeepSpeed are loaded.
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy  # noqa: E402
from torch import nn  # noqa: E402

for _name in ("DeepSpeed", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(_name).setLevel(logging.ERROR)
# DeepSpeed compiles this operator when it first meets a process group on a CPU: 45 seconds for something that only
# inference uses.
vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None

LR, STEPS = 0.1, 4
CONFIGURATIONS = [(stage, offload) for stage in (1, 2, 3) for offload in (False, True)]


class OnCPU:
    """The shipped strategies refuse a CPU; without their three looks at the device they are the same."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(self.shipped, self).setup_environment()  # type: ignore[attr-defined]

    def setup_distributed(self) -> None:
        self.set_world_ranks()  # type: ignore[attr-defined]
        self._init_deepspeed_distributed()  # type: ignore[attr-defined]

    def _setup_distributed(self) -> None:  # Fabric's name of it
        self._set_world_ranks()  # type: ignore[attr-defined]
        self._init_deepspeed_distributed()  # type: ignore[attr-defined]


class TrainerOnCPU(OnCPU, DeepSpeedStrategy):
    shipped = DeepSpeedStrategy


class FabricOnCPU(OnCPU, FabricStrategy):
    shipped = FabricStrategy


def config(stage: int, offload: bool) -> dict[str, Any]:
    """A DeepSpeed configuration for plain SGD, so that rounding is PyTorch's own."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


class TwoHeads(nn.Module):
    """One trunk, two heads: each loss reaches its own head only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).relu()
        return self.one(hidden).pow(2).mean(), self.two(hidden).pow(2).mean()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, generator=generator) for _ in range(STEPS)]


def plain() -> list[torch.Tensor]:
    """The parameters after the same training in plain PyTorch."""
    net = TwoHeads()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for x in batches():
        optimizer.zero_grad()
        sum(net(x)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def compare(train: Callable[[int, bool, bool], nn.Module]) -> int:
    """Run ``train(stage, offload, guarded)`` everywhere and print a table; 1 if a guarded run is not exact."""
    expected = plain()
    moved = max((a - b).abs().max().item() for a, b in zip(expected, TwoHeads().parameters(), strict=True))
    print(f"{STEPS} steps, DeepSpeed {deepspeed.__version__}, one CPU rank; compared with plain PyTorch\n")
    print(f"{'configuration':<16}{'without zeroguard':<28}with zeroguard")
    wrong = 0
    for stage, offload in CONFIGURATIONS:
        cells = []
        for guarded in (False, True):
            try:
                model = train(stage, offload, guarded)
                params = list(model.parameters())
                with deepspeed.zero.GatheredParameters([p for p in params if hasattr(p, "ds_id")]):
                    far = max((a - b).abs().max().item() for a, b in zip(params, expected, strict=True))
                # A millionth of the update, or the rounding of a weight.
                cells.append("exact" if far <= max(1e-6 * moved, 3e-8) else f"wrong by {far:.1e}")
            except RuntimeError as error:
                cells.append(f"crashed: {type(error).__name__}")
        wrong += cells[1] != "exact"
        print(f"ZeRO-{stage}{' offload' if offload else '':<10}{cells[0]:<28}{cells[1]}", flush=True)
    return int(wrong > 0)
