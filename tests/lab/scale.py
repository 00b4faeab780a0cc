"""What guards cost as a model and a job grow: memory, collectives and bytes, host time."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import zeroguard
from tests.lab import programs as lab
from zeroguard import collective
from zeroguard.backends.deepspeed import facts_of
from zeroguard.backends.deepspeed.audit import GradientSamples
from zeroguard.config import GUARDS, load_config
from zeroguard.session import Session
from zeroguard.testing import Script, ScriptedEngine, facts

H = 64
PACKAGE = str(Path(zeroguard.__file__).parent / "*")
#: the first step alone, which is not timed
UNAUDITED = {
    "sinks": [],
    "guards": [{"name": "automatic"}, {"name": "gradient_audit", "warmup_steps": 0, "every_n_steps": 1000}],
}
AUDITED_ONCE = [{"name": "automatic"}, {"name": "gradient_audit", "warmup_steps": 1}]


class Scales(nn.Module):
    """As many parameters as one likes, of ``H`` elements, each in a module of its own."""

    class Scale(nn.Module):
        """One parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(H))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.Scale() for _ in range(parameters)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y, 2 * y


def _step(engine: Any, number: int) -> None:
    """Two losses over one graph, so that there is something to repair."""
    one, two = lab.losses(engine, lab.batches(number, H)[1])
    engine.backward(one, retain_graph=True)
    engine.backward(two)


# -- memory ----------------------------------------------------------------------------------------------------------


def _held() -> int:
    """Bytes that this package's code has allocated and not let go of, Python's own memory."""
    mine = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, PACKAGE)])
    return sum(item.size for item in mine.traces)


class Tensors:
    """Bytes of tensors: the most that calls of one method had at a time, over what there was when they began."""

    def __init__(self) -> None:
        self.most = 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same, looked at."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
                out = method(*args, **kwargs)
            raw = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            now = 0
            for event in sorted(raw, key=lambda event: event.start_ns()):
                now += event.nbytes()
                self.most = max(self.most, now)
            return out

        return watched


def memory(parameters: int, stage: int, offload: bool, audit: bool = True) -> dict[str, Any]:
    """Three steps of an engine with so many parameters and the default guards, the first one audited (or none). Bytes
    that they hold on this rank: of Python, the most after a backward or a step, in the audited step and in the last
    one; of tensors, in the audit."""
    torch.manual_seed(0)
    config = lab.ds_config(stage, offload, zero={"reduce_bucket_size": 10**7} if stage < 3 else None)
    engine, _, _ = lab.build(Scales(parameters), config)
    told = facts_of(engine)
    chosen = [name for name, cls in GUARDS.items() if cls.choose(told, cls.Config()).status == "selected"]
    others = [{"name": name} for name in chosen if name != "gradient_audit"]
    tensors, held, rows = Tensors(), [], 0
    tracemalloc.start(1)
    try:
        with zeroguard.guard(engine, {"sinks": [], "guards": AUDITED_ONCE if audit else others}) as session:
            backend: Any = session._backend
            with mock.patch.object(backend, "audit_gradients", tensors.around(backend.audit_gradients)):
                for number in range(3):
                    _step(engine, number)
                    before = _held()
                    samples = backend._samples
                    rows = max(rows, sum(r.numel() * r.element_size() for r in samples.rows) if samples else 0)
                    engine.step()
                    held.append(max(before, _held()))
            found = len(session.findings)
    finally:
        tracemalloc.stop()
    lab.release(engine)
    return {"audited": held[0], "python": held[-1], "tensors": tensors.most + rows, "findings": found}


def kept(parameters: int, steps: int) -> dict[str, int]:
    """The same on a scripted engine, each of whose steps finds and repairs something that concerns every parameter,
    with other names each time: what the session keeps of it."""
    names = [f"layers.{number}.weight" for number in range(parameters)]
    config = load_config({"sinks": [], "on_violation": "record"})
    engine = ScriptedEngine(facts(stage=2))
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        session = Session(engine, config)
        loop = Script()
        for number in range(steps):
            del loop.events[:]
            engine.stale = tuple(names[number % 7 :])
            for event in loop.forward().backward().step().events:
                session.emit(event)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = sum(int(counts["repairs"]) for counts in session.counters().values())
    return {"bytes": after - before, "repairs": len(session.repairs), "counted": counted}


def audited(parameters: int, elements: int) -> dict[str, int]:
    """How many samples the audit takes in all of a model with so many parameters."""
    shared = nn.Parameter(torch.ones(elements), requires_grad=False)
    named = [(shared, f"layers.{number}.weight") for number in range(parameters)]
    samples = GradientSamples(lambda: named, torch.device("cpu"), 1, (), [torch.float32])
    samples.arm(elements, 0)
    return {"samples": samples.places.size}


# -- collectives and bytes -------------------------------------------------------------------------------------------

#: What zeroguard's one file of collectives may call.
CALLS = ("all_reduce", "all_gather_into_tensor", "all_gather_object")


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Every collective that zeroguard calls meanwhile: its name and the bytes of this rank's tensor."""
    seen: list[tuple[str, int]] = []
    with contextlib.ExitStack() as stack:
        for name in CALLS:
            original = getattr(dist, name)

            def call(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                if sys._getframe(1).f_globals.get("__name__") == collective.__name__:
                    seen.append((name, sum(t.numel() * t.element_size() for t in args if torch.is_tensor(t))))
                return original(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, call))
        yield seen


def collectives(parameters: int, stage: int, guards: Any = None, steps: int = 3) -> dict[str, Any]:
    """What each optimizer step of an engine with so many parameters communicates for zeroguard."""
    engine, _, _ = lab.build(Scales(parameters), lab.ds_config(stage, False))
    each: list[list[tuple[str, int]]] = []
    with zeroguard.guard(engine, {"sinks": [], "guards": guards}), counted() as seen:
        for number in range(steps):
            before = len(seen)
            _step(engine, number)
            engine.step()
            each.append(seen[before:])
    lab.release(engine)
    return {"steps": each}


# -- host time -------------------------------------------------------------------------------------------------------


def _median(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def scripted(parameters: int, steps: int = 300) -> dict[str, Any]:
    """A healthy step of all guards on a scripted ZeRO-2 engine that names so many parameters, on each rank there is:
    microseconds, and what is communicated. COLLECTIVE."""
    ranks = dist.get_world_size()
    told = facts(world_size=ranks, rank=dist.get_rank(), accelerator="cpu", resolves_data_dependency=True)
    engine = ScriptedEngine(told, idle=tuple(f"layers.{number}.weight" for number in range(parameters)))
    engine.groups = (dist.group.WORLD,)
    session = Session(engine, load_config({"sinks": []}))
    loop = Script()

    def step() -> None:
        del loop.events[:]
        for event in loop.forward().backward().step().events:
            session.emit(event)
        session.decide()

    for _ in range(20):
        step()
    with counted() as seen:
        micros = _median(step, steps)
    session.close()
    return {"microseconds": round(micros, 1), "collectives": len(seen) / steps, "bytes": seen[0][1] if seen else 0}


def voted(ranks: int, rounds: int = 50) -> float:
    """The host's part of one agreement in a job of so many ranks, in microseconds: everything but the network."""
    patches = {
        "is_initialized": lambda: True,
        "get_world_size": lambda *args, **kwargs: ranks,
        "get_rank": lambda *args, **kwargs: ranks // 2,
        "get_process_group_ranks": lambda group: list(range(ranks)),
        "all_reduce": lambda tensor, **kwargs: tensor.copy_(full),
    }
    full = torch.full((ranks + 1,), 6, dtype=torch.int64)
    full[-1] = 0
    with contextlib.ExitStack() as stack:
        for name, function in patches.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        return round(_median(lambda: collective.vote(False, 3, groups=(object(),)), rounds), 1)


def per_parameter(parameters: int, rounds: int = 15) -> dict[str, float]:
    """A step of ZeRO-2 with so many parameters, without and with the default guards, in turn: milliseconds of the
    processor, which other processes do not lengthen much."""
    engine, _, _ = lab.build(Scales(parameters), lab.ds_config(2, False, zero={"reduce_bucket_size": 10**7}))
    x = lab.batches(0, H)[1]

    def step() -> None:
        engine.backward(lab.losses(engine, x)[0])
        engine.step()

    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(rounds):
        for name in times:
            with zeroguard.guard(engine, UNAUDITED) if name == "with" else contextlib.nullcontext():
                step()
                began = time.process_time()
                for _ in range(3):
                    step()
                times[name].append((time.process_time() - began) / 3)
    lab.release(engine)
    extra = [guarded - bare for guarded, bare in zip(times["with"], times["without"], strict=True)]
    return {
        "without_ms": round(1e3 * statistics.median(times["without"]), 3),
        "with_ms": round(1e3 * statistics.median(times["with"]), 3),
        "extra_us_per_parameter": round(1e6 * statistics.median(extra) / parameters, 2),
    }
