"""An Accelerate loop with zeroguard: two losses summed, and two losses with a backward each, which step twice a batch.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node=1 examples/accelerate_loop.py

On GPUs leave DS_ACCELERATOR away and give torchrun as many processes as there are GPUs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout that is not installed

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import nn

import zeroguard

if os.environ.get("DS_ACCELERATOR") == "cpu":
    # Else DeepSpeed compiles an operator that only inference uses; that takes 45 seconds.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
}


def summed(accelerator: Accelerator, loss_a: torch.Tensor, loss_b: torch.Tensor) -> None:
    """One backward, one step."""
    accelerator.backward(loss_a + loss_b)


def twice(accelerator: Accelerator, loss_a: torch.Tensor, loss_b: torch.Tensor) -> None:
    """Each accelerator.backward steps."""
    accelerator.backward(loss_a, retain_graph=True)
    accelerator.backward(loss_b)


def train(accelerator: Accelerator, model: Any, batches: Any, backward: Callable[..., None]) -> None:
    for x in batches:
        one, two = model(x).chunk(2, dim=1)
        backward(accelerator, one.pow(2).mean(), (two - 1).pow(2).mean())


def main() -> None:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=DEEPSPEED))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(torch.randn(16 * accelerator.num_processes, 8), batch_size=4)
    model, optimizer, batches = accelerator.prepare(net, optimizer, batches)
    for backward in (summed, twice):
        before = model.global_steps
        # on_violation="raise" is the default: training stops at the end of the step with the finding.
        with zeroguard.guard(accelerator, on_violation="record") as session:
            train(accelerator, model, batches, backward)
        accelerator.print(f"\n{backward.__name__}: {len(batches)} batches, {model.global_steps - before} engine steps")
        accelerator.print(session.summary(), *session.findings, sep="\n")
    accelerator.free_memory()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
