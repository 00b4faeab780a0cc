"""A home-made trainer that keeps a list of callbacks: zeroguard is one of them.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node=2 examples/loop_callback.py

With ``wrap=False`` nothing of DeepSpeed is replaced; the trainer's calls alone drive the guards. The last run leaves
one call out, and hears of it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout that is not installed

import deepspeed
import torch
from torch import nn

from zeroguard.integrations.loop import LoopCallback

if os.environ.get("DS_ACCELERATOR") == "cpu":
    # Else DeepSpeed compiles an operator that only inference uses; that takes 45 seconds.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}


class Trainer:
    """Two losses of one forward a step; every callback is told where the loop is."""

    def __init__(self, engine: Any, callbacks: list[Any], forgets: str = "") -> None:
        self.engine, self.callbacks, self.forgets = engine, callbacks, forgets

    def call(self, name: str) -> None:
        for callback in self.callbacks if name != self.forgets else ():
            getattr(callback, name)()

    def fit(self, batches: list[torch.Tensor]) -> None:
        for x in batches:
            self.call("on_step_begin")
            one, two = self.engine(x).chunk(2, dim=1)
            for loss, retain in ((one.pow(2).mean(), True), ((two - 1).pow(2).mean(), False)):
                self.call("on_before_backward")
                self.engine.backward(loss, retain_graph=retain)
                self.call("on_after_backward")
            self.call("on_before_optimizer_step")
            self.engine.step()
            self.call("on_step_end")


def main() -> None:
    deepspeed.init_distributed()
    for wrap, forgets in ((True, ""), (False, ""), (False, "on_after_backward")):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), config=CONFIG)
        batches = [torch.randn(4, 8, device=engine.device) for _ in range(3)]
        # on_violation="raise" is the default: training stops at the end of the step with the finding.
        with LoopCallback(engine, wrap=wrap, on_violation="record") as guard:
            Trainer(engine, [guard], forgets).fit(batches)
        if torch.distributed.get_rank() == 0:
            print(f"\nwrap={wrap}{f', without {forgets}' if forgets else ''}: ", end="")
            print(guard.session.summary(), *guard.session.findings[:1], sep="\n")
        engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
