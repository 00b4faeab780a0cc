"""A training script: two losses from one forward, with DeepSpeed. It knows nothing of any guard."""
# ruff: noqa: E402

import os
import sys

EARLY = [name for name in ("torch", "deepspeed") if name in sys.modules]
os.environ["DS_ACCELERATOR"] = "cpu"  # has to stand in front of the import

import argparse
import atexit
import importlib
import inspect
import json
import signal

import torch
from torch import nn

LR = 0.1
STEPS = 3


class TwoHeads(nn.Module):
    """One trunk; each loss reaches its own head only."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.trunk(x).relu()
        return self.left(x).pow(2).mean(), self.right(x).pow(2).mean()


def fresh_model():
    """The same weights everywhere."""
    torch.manual_seed(0)
    return TwoHeads()


def batch(step, rank):
    """Other data on every rank."""
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank)) + 1


def plain(ranks):
    """What the parameters are after the same training in plain PyTorch."""
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for rank in range(ranks):
            left, right = model(batch(step, rank))
            ((left + right) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for param in model.parameters() for value in param.flatten().tolist()]


def train(engine, rank):
    for step in range(STEPS):
        left, right = engine(batch(step, rank))
        engine.backward(left, retain_graph=True)
        engine.backward(right)
        engine.step()


def state(engine):
    """Whether somebody has put something in front of the engine's own methods."""
    return "wrapped" if "forward" in vars(engine) else "bare"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", required=True)
    parser.add_argument("--end", choices=("return", "destroy", "os._exit", "kill"), default="return")
    parser.add_argument("--cd", default=".", help="go there before the engine is made, as Hydra does")
    parser.add_argument("--config", default="", help="only to have the same name as an option of others")
    parser.add_argument("--on-violation", default="", help="this one too")
    options = parser.parse_args()

    import deepspeed
    from deepspeed import initialize

    # Compiled for inference only; without a cache it takes most of a minute.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine = None
    atexit.register(lambda: print("at exit, first in:", state(engine), file=sys.stderr))
    rank = torch.distributed.get_rank()
    os.chdir(options.cd)
    model = fresh_model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    made = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)
    engine = made[0]
    atexit.register(lambda: print("at exit, last in:", state(engine), file=sys.stderr))
    train(engine, rank)

    answer = {
        "early": EARLY,
        "argv": sys.argv,
        "local_rank": options.local_rank,
        "values": [value for param in engine.module.parameters() for value in param.flatten().tolist()],
        "made": [type(part).__name__ for part in made],
        "tuple": type(made) is tuple and made[1] is engine.optimizer,
        "signature": list(inspect.signature(deepspeed.initialize).parameters)[:2],
    }
    with open(f"{options.out}.{rank}", "w") as file:
        json.dump(answer, file)
    if options.end == "os._exit":
        os._exit(3)
    elif options.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif options.end == "destroy":
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
