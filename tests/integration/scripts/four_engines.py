"""Four engines in one process: one that the script guards itself, one of ZeRO-3, one that it drops, one whose DeepSpeed
configuration has a mistake in it. At the end the process group is gone."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import gc
import importlib
import weakref

import deepspeed
import torch

import zeroguard

importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # saves compiling it


def make(stage, **config):
    model = torch.nn.Linear(4, 4)
    config |= {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]


def train(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


def main():
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    own, third, dropped, wrong = make(2), make(3), make(1), make(1, zeroguard={"on_violaton": "warn"})
    with zeroguard.guard(own, on_violation="record") as session:
        train(own)
    print("own:", session.config.on_violation, session.rows[1].verdict, "forward" in vars(own))
    for engine in (third, dropped, wrong):
        train(engine)
    there = weakref.ref(dropped)
    dropped.destroy()
    del dropped, engine
    gc.collect()
    print("dropped:", there())
    print("wrong:", "forward" in vars(wrong))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
