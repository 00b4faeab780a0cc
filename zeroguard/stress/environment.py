"""Where a count was made."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["environment"]


def environment() -> dict[str, Any]:
    """LOCAL. GPU model and count, driver, versions of CUDA, NCCL, torch, DeepSpeed, zeroguard, Python and the OS.

    DeepSpeed's is that of the package on the path, which need not be the installed distribution.
    """
    import torch

    from zeroguard.stress import hardware

    return {
        **hardware.describe(),
        "torch": torch.__version__,
        "deepspeed": _installed("deepspeed"),
        "zeroguard": _installed("zeroguard"),
        "python": platform.python_version(),
        "os": platform.platform(),
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
