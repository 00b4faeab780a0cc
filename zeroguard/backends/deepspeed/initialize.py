"""``deepspeed.initialize``, wrapped so that every engine it makes is seen. The only place that knows this function."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed as dist

__all__ = ["watch"]


def watch(module: ModuleType, on_engine: Callable[[Any, int, int], None]) -> Callable[[], None]:
    """LOCAL. Have ``on_engine(engine, rank, ranks)`` called for all that ``module.initialize`` makes from now on.

    What ``initialize`` returns reaches its caller as it is. ``rank`` and ``ranks`` are those of the whole job.

    Args:
        module: the module ``deepspeed``, imported.
        on_engine: must not raise: its caller is somebody else's training script.

    Returns:
        A function that puts the original back; it does nothing where something else has replaced ``initialize`` since.

    Raises:
        AttributeError: the module has no ``initialize``.
    """
    original = module.initialize

    @wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        known = dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
        on_engine(made[0] if isinstance(made, tuple) else made, rank, ranks)
        return made

    def undo() -> None:
        if vars(module).get("initialize") is initialize:
            module.initialize = original  # type: ignore[attr-defined]

    module.initialize = initialize  # type: ignore[attr-defined]
    return undo
