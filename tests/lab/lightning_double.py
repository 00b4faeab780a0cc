"""Lightning's DeepSpeed strategies on a CPU: the shipped classes without the three places where they ask for CUDA.

The engine, ZeRO, the Trainer and Fabric are the real ones. What is missing beside a GPU are streams.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

__all__ = ["FABRICS", "TRAINERS", "fabric_strategy", "trainer_strategy", "use_the_lab"]

#: then the shipped strategies run as they are
ON_GPU = os.environ.get("LAB_DEVICE") == "cuda"
TRAINERS = ("lightning.pytorch", "pytorch_lightning")
#: a Trainer's package -> the package of its Fabric
FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def use_the_lab() -> None:
    """Make Lightning take the lab's process group, instead of launching processes of its own."""
    # What torchrun sets besides the variables that the lab has set.
    os.environ.update(TORCHELASTIC_RUN_ID="lab", GROUP_RANK="0")


class _Double:
    """Mixed into a strategy."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed compares the index, and torch.device("cpu") has none

    def setup_environment(self) -> None:
        super(self.shipped, self).setup_environment()  # type: ignore[attr-defined]  # without "is it a GPU?"

    def _join(self, ranks: Any) -> None:
        ranks()
        self._init_deepspeed_distributed()  # type: ignore[attr-defined]


def _of(package: str) -> Any:
    return importlib.import_module(f"{package}.strategies").DeepSpeedStrategy


def trainer_strategy(package: str, config: dict[str, Any], **kwargs: Any) -> Any:
    """The DeepSpeedStrategy of ``lightning.pytorch`` or ``pytorch_lightning``."""
    shipped = _of(package)
    if ON_GPU:
        return shipped(config=config, **kwargs)

    class CPUDeepSpeedStrategy(_Double, shipped):  # type: ignore[misc, valid-type]
        def setup_distributed(self) -> None:  # without "has each device an index of its own?"
            self._join(self.set_world_ranks)

    CPUDeepSpeedStrategy.shipped = shipped
    return CPUDeepSpeedStrategy(config=config, **kwargs)


def fabric_strategy(package: str, config: dict[str, Any], **kwargs: Any) -> Any:
    """The DeepSpeedStrategy of ``lightning.fabric`` or ``lightning_fabric``."""
    shipped = _of(package)
    if ON_GPU:
        return shipped(config=config, **kwargs)

    class CPUDeepSpeedStrategy(_Double, shipped):  # type: ignore[misc, valid-type]
        def _setup_distributed(self) -> None:
            self._join(self._set_world_ranks)

    CPUDeepSpeedStrategy.shipped = shipped
    return CPUDeepSpeedStrategy(config=config, **kwargs)
