"""A rank goes missing in the middle of a step: killed, stopped, left with an exception, or caught in a loop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroguard
from tests.lab import programs as lab
from zeroguard.integrations.base import Keeper
from zeroguard.integrations.loop import LoopCallback

H = 8
FAULT_STEP = 2


class Hooked(nn.Module):
    """Two layers; calls ``now`` in the middle of a forward, and of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)
        self.now: Callable[[str], None] = lambda where: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.a(x))
        self.now("forward")
        if z.requires_grad:
            z.register_hook(lambda grad: self.now("backward"))
        return self.b(z)


def hurry() -> None:
    """Give DeepSpeed's own process groups the timeout that the job's was made with: they have PyTorch's half hour."""
    c10d = dist.distributed_c10d
    seconds = timedelta(seconds=float(os.environ["LAB_TIMEOUT"]))
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(seconds, group)


def _fault(how: str) -> None:
    if how == "raise":
        raise ValueError("boom")
    if how in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "hang":
        time.sleep(8)


@contextlib.contextmanager
def _session(engine: Any, config: dict[str, Any], by: str) -> Iterator[Any]:
    """Ended by its own ``with`` block, by a LoopCallback's, or as a trainer's callback ends it."""
    if by == "callback":
        with LoopCallback(engine, config) as loop:
            yield loop.session
    elif by == "keeper":
        keeper = Keeper(config)
        try:
            yield keeper.open(engine)
        except Exception as error:
            keeper.close(failed=True, error=error)
            raise
    else:
        with zeroguard.guard(engine, config) as session:
            yield session


def lost(how: str, where: str, victim: int, stage: int, guarded: Any = True, by: str = "engine") -> dict[str, Any]:
    """Train; in step :data:`FAULT_STEP` the victim meets its end."""
    torch.manual_seed(0)
    engine = lab.build(Hooked(), lab.ds_config(stage, False))[0]
    hurry()
    module: Any = engine.module
    me, began, step = dist.get_rank() == victim, 0.0, 0
    config = {"sinks": [], **(guarded if isinstance(guarded, dict) else {})}
    answer: dict[str, Any] = {"error": "", "notes": [], "seconds": 0.0, "findings": []}
    session = None

    def now(place: str) -> None:
        if place == where and step == FAULT_STEP and me:
            time.sleep(1.2)  # so that its thread has said where it is
            _fault(how)

    module.now = now
    original = engine.optimizer.step

    def optimizer_step(*args: Any, **kwargs: Any) -> Any:
        now("step")
        return original(*args, **kwargs)

    engine.optimizer.step = optimizer_step
    try:
        with _session(engine, config, by) as session:
            for step in range(4):
                began = time.monotonic()
                loss = engine(lab.batches(step)[1]).pow(2).mean()
                loss.backward() if by == "loss" else engine.backward(loss)
                engine.step()
    except Exception as error:
        answer.update(error=f"{type(error).__name__}: {error}", notes=getattr(error, "__notes__", []))
        answer["seconds"] = time.monotonic() - began
    if session is not None:
        answer["findings"] = [finding.to_dict() for finding in session.findings]
        answer["texts"] = [finding.text() for finding in session.findings]
        answer["row"] = [row.verdict for row in session.rows if row.guard == "ranks"]
    answer["attached"] = engine.optimizer.step is optimizer_step
    return answer


def partly(guarded_on: list[int], stage: int = 2, wait: float = 1.0, others: Any = None) -> dict[str, Any]:
    """Only some ranks are guarded; the rest not at all, or with another configuration."""
    from zeroguard import heartbeat

    heartbeat.GUARDED = wait
    torch.manual_seed(0)
    engine, _, _ = lab.build(Hooked(), lab.ds_config(stage, False))
    mine = dist.get_rank() in guarded_on
    config = {"sinks": []} if mine else None if others is None else {"sinks": [], **others}
    answer: dict[str, Any] = {"error": "", "step": -1, "ranks": []}
    began = time.monotonic()
    try:
        with lab.guard_of(engine, config):
            for step in range(3):
                answer["step"] = step
                engine.backward(engine(lab.batches(step)[1]).pow(2).mean())
                engine.step()
    except Exception as error:
        answer.update(error=f"{type(error).__name__}: {error}", ranks=list(getattr(error, "ranks", [])))
    answer["seconds"] = time.monotonic() - began
    return answer
