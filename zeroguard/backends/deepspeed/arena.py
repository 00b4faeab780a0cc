"""Engines for ``zeroguard stress``: made on this machine's accelerator, and looked at past every guard.

What a program of a user's would do by itself, kept here because nothing else of zeroguard may import DeepSpeed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["Arena"]


class Arena:
    """One process, one rank, DeepSpeed's own accelerator or, where that cannot race, a scripted one. LOCAL.

    Attributes:
        accelerator: what DeepSpeed uses.
        scripted: whether it is the scripted one.
        races: whether the accelerator of this machine copies behind Python's back.
    """

    def __init__(self) -> None:
        import deepspeed  # type: ignore[import-untyped]
        from deepspeed.accelerator import get_accelerator  # type: ignore[import-untyped]

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        self.accelerator: Any = get_accelerator()
        self.races = not self.accelerator.resolves_data_dependency()
        self.scripted = False
        # As a launcher would: one process of one.
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ[name] = value
        os.environ.setdefault("MASTER_PORT", "29531")  # asked for, never opened: the store is a file
        comm: Any = importlib.import_module("deepspeed.comm.torch")
        if hasattr(comm, "build_shm_op"):
            comm.build_shm_op = lambda: None  # for inference on a CPU; to compile it takes most of a minute
        store = Path(tempfile.mkdtemp(prefix="zeroguard-stress-")) / "store"
        deepspeed.init_distributed(
            self.accelerator.communication_backend_name() if self.races else "gloo",
            init_method=f"file://{store}",
            rank=0,
            world_size=1,
            auto_mpi_discovery=False,
        )

    @property
    def device(self) -> str:
        """Where modules and data go."""
        return str(self.accelerator.current_device_name())

    @contextlib.contextmanager
    def raced(self, script: Any) -> Iterator[None]:
        """DeepSpeed on ``script(accelerator)``, the scripted accelerator, where the real one cannot race."""
        if self.races:
            yield
            return
        from deepspeed.accelerator import set_accelerator

        inner = self.accelerator
        with script(inner) as scripted:
            set_accelerator(scripted)
            self.accelerator, self.scripted = scripted, True
            try:
                yield
            finally:
                set_accelerator(inner)
                self.accelerator, self.scripted = inner, False

    def engine(self, model: Any, config: dict[str, Any], optimizer: Any) -> Any:
        """An engine for ``model``, stages 1 to 3."""
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine

    def release(self, engine: Any) -> None:
        """Let go of an engine's memory."""
        with contextlib.suppress(Exception):
            engine.destroy()
        gc.collect()

    @staticmethod
    def host_gradients(engine: Any) -> list[torch.Tensor]:
        """The gradients in host memory, newest copy first, as a user's program reads them: through the guard, if there
        is one. Stage 2 gives the accumulators, stage 1 the parameters' parts of what the boundary backward wrote
        (padding left out), stage 3 the partitions. Offloaded, not bf16 with fp32 accumulation; on one rank."""
        optimizer = engine.optimizer
        params = list(engine.module.parameters())
        if engine.zero_optimization_stage() == 3:
            groups = optimizer.get_fp32_grad_partitions()
            return [grad for group in groups.values() for grad in group.values()]
        if engine.zero_optimization_stage() == 2 and optimizer.accumulated_grads_in_cpu:
            return list(reversed(list(optimizer.accumulated_grads_in_cpu.values())))
        sizes = [param.numel() for param in params]
        (master,) = optimizer.single_partition_of_fp32_groups
        return list(master.grad.view(-1)[: sum(sizes)].split(sizes))

    @staticmethod
    def weights(engine: Any) -> list[torch.Tensor]:
        """Every parameter's fp32 value, whole. COLLECTIVE, stages 1 to 3."""
        from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-untyped]

        return [safe_get_full_fp32_param(param).detach().float().clone() for param in engine.module.parameters()]

    @staticmethod
    def in_flight(engine: Any) -> list[str]:
        """Names of the parameters whose gather was launched and not waited for. Stage 3."""
        return [n for n, param in engine.module.named_parameters() if param.ds_status.name == "INFLIGHT"]
