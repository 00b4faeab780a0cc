"""Step time with and without zeroguard: one engine, the arms in turn, round after round.

    python -m tests.benchmarks.steps --model 124M --stage 2 --rounds 5 [--offload] [--json FILE]
    torchrun --nproc_per_node=2 -m tests.benchmarks.steps ...

Arms: nothing; all guards as chosen by default; each guard alone; all guards with every step audited. A round gives each
arm a few steps, in an order that changes from round to round, so that a machine that slows down slows all of them. The
overhead is the median over the rounds of (arm / nothing - 1) within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RANK", "0")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29533")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.nn.functional as F
from torch import nn

import zeroguard
from zeroguard.config import GUARDS

#: layers, width, heads of GPT-2 shaped models
MODELS = {"tiny": (2, 64, 2), "124M": (12, 768, 12), "355M": (24, 1024, 16), "1.3B": (24, 2048, 16)}
VOCABULARY = 50257


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.one(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Gpt(nn.Module):
    """GPT-2 in shape: token and place embeddings, blocks, an output layer tied to the tokens."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def arms() -> dict[str, dict[str, Any] | None]:
    audited = {"name": "gradient_audit", "every_n_steps": 1}
    automatic = {"name": "automatic"}
    alone = {name: {"guards": [{"name": name}]} for name in GUARDS}
    return {"nothing": None, "all guards": {}, **alone, "every step audited": {"guards": [automatic, audited]}}


def engine_of(options: argparse.Namespace) -> Any:
    layers, width, heads = MODELS[options.model]
    zero: dict[str, Any] = {"stage": options.stage}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": torch.cuda.is_available()},
        "steps_per_print": 10**9,
    }
    torch.manual_seed(0)
    model = Gpt(layers, width, heads, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def measure(engine: Any, options: argparse.Namespace) -> dict[str, list[float]]:
    """Arm -> seconds a step, one number a round."""
    chosen = {name: config for name, config in arms().items() if not options.arms or name in options.arms}
    ids = torch.randint(VOCABULARY, (options.batch, options.length), device=engine.device)

    def block(config: dict[str, Any] | None) -> float:
        guard = contextlib.nullcontext() if config is None else zeroguard.guard(engine, config, sinks=[])
        with guard:
            for number in range(options.warmup + options.steps):
                if number == options.warmup:
                    synchronize(engine)
                    began = time.perf_counter()
                engine.backward(engine(ids))
                engine.step()
            synchronize(engine)
            return (time.perf_counter() - began) / options.steps

    names = []
    for name, config in chosen.items():  # leave out what cannot act here
        with contextlib.suppress(zeroguard.GuardUnavailableError):
            block(config)
            names.append(name)
    times: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(options.rounds):
        order.shuffle(names)
        for name in names:
            times[name].append(block(chosen[name]))
    return times


def synchronize(engine: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize(engine.device)


def report(times: dict[str, list[float]], options: argparse.Namespace, engine: Any) -> dict[str, Any]:
    base = times["nothing"]
    rows = {}
    for name, values in times.items():
        ratios = [value / other - 1 for value, other in zip(values, base, strict=True)]
        rows[name] = {
            "seconds_per_step": statistics.median(values),
            "overhead": statistics.median(ratios),
            "rounds": values,
        }
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "command": "python -m tests.benchmarks.steps " + " ".join(sys.argv[1:]),
        "model": options.model,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "stage": options.stage,
        "offload": options.offload,
        "environment": {
            "device": where,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "python": platform.python_version(),
            "ranks": int(os.environ["WORLD_SIZE"]),
        },
        "arms": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="124M")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps a round and arm")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them; the audit's own warm-up is 5")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--arms", nargs="*", help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # 45 seconds, unused here
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    engine = engine_of(options)
    data = report(measure(engine, options), options, engine)
    if int(os.environ["RANK"]) == 0:
        print(f"{data['model']} ({data['parameters'] / 1e6:.0f} M), ZeRO-{options.stage}, {data['environment']}")
        for name, row in data["arms"].items():
            print(f"{name:20} {1e3 * row['seconds_per_step']:9.2f} ms  {100 * row['overhead']:+6.2f} %")
        if options.json:
            options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
