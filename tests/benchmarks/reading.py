"""How long reads of gradients take: session.grad_norms and session.gradients beside a loop of safe_get_full_grad.

::

    DS_ACCELERATOR=cpu PYTHONPATH=. torchrun --nproc_per_node 2 tests/benchmarks/reading.py
    PYTHONPATH=. torchrun --nproc_per_node 1 tests/benchmarks/reading.py --hidden 2048 --dtype bf16

Prints one JSON object: for each ZeRO stage the median milliseconds of each of the four, taken in turn in the same
process after the same backward, the smallest and largest of each, and the speedups. A round in which the two do not
read the same numbers is an error.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn

import zeroguard

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(nn.Module):
    """The parameters of a transformer layer: 12, matrices of 12 h^2 elements in all."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.wide, self.back = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.one(x)).chunk(3, -1)
        x = x + self.out(torch.tanh(q * k) + v)
        return x + self.back(torch.tanh(self.wide(self.two(x))))


def engine_of(stage: int, offload: bool, args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.hidden) for _ in range(args.layers)))
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": args.pin}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "bf16": {"enabled": args.dtype == "bf16"},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def milliseconds(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """The time of one call, from a moment at which every rank is idle to the last rank's end."""
    if device.type != "cpu":
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    out = call()
    if device.type != "cpu":
        torch.cuda.synchronize()
    dist.barrier()
    return 1e3 * (time.perf_counter() - began), out


def measure(stage: int, offload: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One engine: ``args.rounds`` rounds after ``args.warm`` ones that are not counted."""
    engine = engine_of(stage, offload, args)
    named = list(engine.module.named_parameters())
    times: dict[str, list[float]] = {}
    with zeroguard.guard(engine, {"sinks": []}) as session:
        calls: dict[str, Callable[[], Any]] = {
            "norms_loop": lambda: {n: safe_get_full_grad(p).norm().item() for n, p in named},
            "norms": lambda: session.grad_norms(per="parameter"),
            "gradients_loop": lambda: {n: safe_get_full_grad(p) for n, p in named},
            "gradients": lambda: session.gradients(),
        }
        x = torch.randn(1, 8, args.hidden, dtype=KINDS[args.dtype], device=engine.device)
        for number in range(args.warm + args.rounds):
            engine.backward(engine(x).float().pow(2).mean())
            read = {}
            for name, call in calls.items():
                took, read[name] = milliseconds(call, engine.device)
                if number >= args.warm:
                    times.setdefault(name, []).append(took)
            for name, norm in read["norms_loop"].items():
                torch.testing.assert_close(read["norms"][name], norm, rtol=1e-3, atol=1e-7)
            for name, grad in read["gradients_loop"].items():
                torch.testing.assert_close(read["gradients"][name], grad.float(), rtol=1e-5, atol=1e-8)
            del read
            engine.step()
    count = sum(getattr(p, "ds_numel", p.numel()) for _, p in named)
    engine.destroy()
    gc.collect()
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "stage": stage,
        "offload": offload,
        "parameters": len(named),
        "elements": count,
        "milliseconds": {n: [round(v, 3) for v in (m, min(times[n]), max(times[n]))] for n, m in median.items()},
        "norms_speedup": round(median["norms_loop"] / median["norms"], 1),
        "gradients_speedup": round(median["gradients_loop"] / median["gradients"], 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--offload", action="store_true", help="with an offloaded optimizer too")
    parser.add_argument("--pin", action="store_true", help="page-locked buffers")
    parser.add_argument("--dtype", choices=list(KINDS), default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    comm = importlib.import_module("deepspeed.comm.torch")
    if hasattr(comm, "build_shm_op"):
        comm.build_shm_op = lambda: None  # compiled for inference only; 45 seconds saved
    deepspeed.init_distributed()
    results = [measure(s, o, args) for s in args.stages for o in ((False, True) if args.offload else (False,))]
    if dist.get_rank() == 0:
        facts = {"ranks": dist.get_world_size(), "dtype": args.dtype, "torch": torch.__version__}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        print(json.dumps({**facts, "device": device, "deepspeed": deepspeed.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
