"""A long training run with everything on: memory, handles and hooks stay where they are, and the bits are those of the
equivalent loop that needs no guard."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroguard
from tests.lab import programs as lab

H = 16
LAYERS = 4
#: everything that acts on these engines, and the audit often enough to be part of what is measured
GUARDS = [
    {"name": "automatic"},
    {"name": "accumulation", "action": "repair"},
    {"name": "gradient_audit", "action": "raise", "every_n_steps": 5},
]


class Stack(nn.Module):
    """Layers that both losses reach: without a guard, DeepSpeed loses what only the first one reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train_step(engine: Any, x: torch.Tensor, guarded: bool) -> None:
    """Two losses, a micro-step each. Guarded, both backwards run over one graph; unguarded, where that is wrong or
    crashes, over the graphs of two forwards of the same batch: the same numbers in the same order."""
    y = engine(x)
    engine.backward(y.pow(2).mean(), retain_graph=guarded)
    engine.step()
    if not guarded:
        y = engine(x)
    engine.backward(y.abs().mean())
    engine.step()


def between(engine: Any, step: int, folder: Path, x: torch.Tensor) -> None:
    """An evaluation every ten steps, a checkpoint every fifty."""
    if step % 10 == 0:
        engine.eval()
        with torch.no_grad():
            engine(x)
        engine.train()
    if step % 50 == 0:
        engine.save_checkpoint(str(folder), tag="last")


def hooks_of(engine: Any) -> int:
    """Every hook on a module or a parameter of the engine."""
    count = 0
    for module in engine.module.modules():
        count += sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks") and value)
    for param in engine.module.parameters():
        count += len(param._backward_hooks or ()) + len(getattr(param, "_post_accumulate_grad_hooks", None) or ())
    return count


def sample(engine: Any) -> dict[str, int]:
    """What must stay where it is, after a collection."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed; a fragmented heap is no leak
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "objects": len(gc.get_objects()),
        "handles": len(os.listdir("/proc/self/fd")),
        "hooks": hooks_of(engine),
    }


def digest(engine: Any) -> str:
    """Of all parameters, bit by bit. COLLECTIVE."""
    out = hashlib.sha256()
    for value in lab.weights(engine):
        out.update(value.contiguous().numpy().tobytes())
    return out.hexdigest()


def _loop(engine: Any, steps: int, guarded: bool, folder: Path, look: Callable[[int], None], session: Any) -> None:
    for step in range(1, steps + 1):
        _, x = lab.batches(step, H)
        train_step(engine, x, guarded)
        between(engine, step, folder, x)
        if session is not None and step % 25 == 0:
            session.summary()
            session.counters()
        look(step)


def soak(stage: int, offload: bool, steps: int, warmup: int, every: int, guarded: bool = True) -> dict[str, Any]:
    """Train; a sample at the end of the warm-up and every so many steps after it. COLLECTIVE."""
    torch.manual_seed(0)
    config = lab.ds_config(stage, offload, gas=2)
    engine, _, _ = lab.build(Stack(), config, lambda params: torch.optim.AdamW(params, lr=1e-3))
    shared = [tempfile.mkdtemp(prefix="soak-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    samples: list[dict[str, int]] = []

    def look(step: int) -> None:
        if step >= warmup and (step - warmup) % every == 0:
            samples.append({"step": step, **sample(engine)})

    answer: dict[str, Any] = {"samples": samples}
    try:
        if not guarded:
            _loop(engine, steps, False, folder, look, None)
        else:
            sinks = [{"name": "logging"}, {"name": "jsonl", "directory": str(folder / "records")}]
            kept = {"guards": GUARDS, "sinks": sinks, "max_findings": max(warmup // 2, 1)}
            seen: dict[str, int] = {}

            def count(record: Any) -> None:
                seen[record.kind] = seen.get(record.kind, 0) + 1

            with zeroguard.guard(engine, kept, sinks=[count]) as session:
                _loop(engine, steps, True, folder, look, session)
            answer.update(lab.record(session), repairs=seen)
        answer["digest"] = digest(engine)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    lab.release(engine)
    return answer
