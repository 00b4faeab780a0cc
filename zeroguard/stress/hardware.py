"""What only one kind of accelerator has: its name, its driver, and a kernel that does nothing for a while.

The one place of this package that asks PyTorch for CUDA by name; everything else goes through DeepSpeed's accelerator.
"""

from __future__ import annotations

import subprocess
from typing import Any

import torch

__all__ = ["DELAY_CYCLES", "delay", "describe"]

#: Length of the delay kernel, in clock cycles of the device: about 10 ms at 2 GHz.
DELAY_CYCLES = 20_000_000


def describe() -> dict[str, Any]:
    """LOCAL. GPU model and count, driver, CUDA and NCCL; model "none" and count 0 where there is no GPU."""
    if not torch.cuda.is_available():
        return {"gpu": "none", "gpus": 0, "driver": "none", "cuda": torch.version.cuda or "none", "nccl": "none"}
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        nccl = "none"
    return {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "driver": _driver(),
        "cuda": torch.version.cuda or torch.version.hip or "unknown",
        "nccl": nccl,
    }


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0] if lines else "unknown"


def delay(cycles: int = DELAY_CYCLES) -> None:
    """LOCAL. Queue a kernel of ``cycles`` clock cycles on the current stream. Nothing where there is no GPU."""
    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)
