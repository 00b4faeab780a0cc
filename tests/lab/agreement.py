"""Ranks that agree over a real process group, while their engines are written down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import zeroguard
from tests.lab import programs as lab
from zeroguard import events as ev
from zeroguard.backends.base import GradientAudit, Mismatch, ParamStatus
from zeroguard.config import load_config, registry
from zeroguard.session import Session
from zeroguard.testing import Script, ScriptedEngine, facts

LOOP_STEPS = 3
#: guard -> its configuration, the engine's stage, and the finding that the faulty rank has.
GUARDS: dict[str, tuple[dict[str, Any], int, str]] = {
    "retained_graph": ({"action": "detect"}, 2, "second_backward"),
    "accumulator_reset": ({"action": "detect"}, 2, "stale_gradient"),
    "param_status": ({"action": "raise"}, 3, "in_flight"),
    "accumulation": ({}, 2, "overwritten_gradient"),
    "gradient_audit": ({"action": "raise"}, 2, "gradient_scaled"),
}


def _step(guard: str, engine: ScriptedEngine, script: Script, faulty: bool) -> None:
    """Append one step; the faulty rank's has the fault of this guard."""
    two = faulty and guard in ("retained_graph", "accumulation")
    if guard == "retained_graph":
        script.forward().backward()
        if two:
            script.backward()
    else:
        script.forward().backward()
        if two:
            script.forward().backward()
    if faulty:
        engine.stale = ("w",) if guard == "accumulator_reset" else ()
        engine.status = ParamStatus(in_flight=("w",), registry=1) if guard == "param_status" else ParamStatus()
        bad = (Mismatch("w", "scaled", 0.5, 2.0),) if guard == "gradient_audit" else ()
        engine.audit = GradientAudit(audited=1, mismatches=bad)
    script.step()


def each_guard(every: int = 1, agree: bool = True) -> dict[str, Any]:
    """On each rank in turn, each guard has a finding in the first step. What every rank then raised, and at which
    step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out: dict[str, Any] = {}
    for guard, (options, stage, _) in GUARDS.items():
        if registry()[guard].communicates and not agree:
            continue  # not to be had
        for victim in range(ranks):
            engine = ScriptedEngine(facts(stage=stage, rank=rank, world_size=ranks, accelerator="cpu"))
            engine.groups = (dist.group.WORLD,)
            engine.audit = GradientAudit(audited=1)
            config = {"guards": [{"name": guard, **options}], "sinks": [], "agree_every_n_steps": every}
            session = Session(engine, load_config({**config, "agree": agree}))
            out[f"{guard} {victim}"] = _run(guard, session, engine, rank == victim)
    return out


def _run(guard: str, session: Session, engine: ScriptedEngine, faulty: bool) -> dict[str, Any]:
    script = Script(repairing=False)
    said = {"raised": "", "ranks": [], "step": -1, "kinds": []}
    try:
        with session:
            for number in range(LOOP_STEPS):
                before = len(script.events)
                _step(guard, engine, script, faulty and number == 0)
                for event in script.events[before:]:
                    session.emit(event)
                    if isinstance(event, ev.StepEnd):
                        engine.steps, engine.status, engine.stale = event.step, ParamStatus(), ()
                        engine.audit = GradientAudit(audited=1)
                        said["step"] = event.step
                        session.decide()
    except zeroguard.GuardViolation as error:
        said.update(raised=type(error).__name__, ranks=list(error.ranks), text=str(error))
        said["kinds"] = [finding.kind for finding in error.findings]
    return said


# -- how much is said ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The collectives and messages that Python starts meanwhile, whoever asks for them."""
    calls: list[str] = []
    undo = []
    for cls in (dist.ProcessGroup, dist.ProcessGroupGloo):
        for name in (*_COLLECTIVES, "barrier", "send", "recv", "recv_anysource", "monitored_barrier"):
            original = vars(cls).get(name)
            if original is not None:
                undo.append((cls, name, original))
                setattr(cls, name, _counting(original, name, calls))
    try:
        yield calls
    finally:
        for cls, name, original in undo:
            setattr(cls, name, original)


_COLLECTIVES = [
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base", "gather", "scatter"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
]


def _counting(original: Any, name: str, calls: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    return call


def _local(stage: int) -> list[dict[str, str]]:
    """The guards that never wait for another rank: all but gradient_audit."""
    names = ["retained_graph", "accumulator_reset", "accumulation", *(["param_status"] if stage == 3 else [])]
    return [{"name": name} for name in names]


def talk(stage: int, guarded: Any, steps: int = 4) -> dict[str, Any]:
    """The collectives of each step of a loop, and those of the session's end."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, False))
    a_step: list[list[str]] = []
    with recorded() as calls:
        with lab.guard_of(engine, None if guarded is None else {"guards": _local(stage), **guarded}):
            attach = list(calls)
            for step in range(steps):
                calls.clear()
                one, two = lab.losses(engine, lab.batches(step)[1])
                engine.backward(one + two)
                engine.step()
                a_step.append(list(calls))
            calls.clear()
        end = list(calls)
    lab.release(engine)
    return {"attach": attach, "steps": a_step, "end": end}


def exits(stage: int) -> dict[str, Any]:
    """Every way out of a session, with an exception in each phase, on all ranks: which collectives zeroguard starts."""
    out: dict[str, list[str]] = {}
    for where in ("forward", "backward", "step", "between", "collective", "close", "LoopCallback"):
        torch.manual_seed(0)
        engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, False))
        calls = _leave(engine, where, {"sinks": [], "guards": _local(stage)})
        if calls:
            out[where] = calls
        lab.release(engine)
    return {"calls": out}


def _leave(engine: Any, where: str, config: dict[str, Any]) -> list[str]:
    error = RuntimeError("third_party/gloo/gloo/x.cc:1 gone") if where == "collective" else ValueError("boom")
    with recorded() as calls:
        if where == "LoopCallback":
            from zeroguard.integrations.loop import LoopCallback

            loop = LoopCallback(engine, config)
            loop.on_exception(error)
            loop.close()
        elif where == "close":
            zeroguard.guard(engine, config).close()
        else:
            with contextlib.suppress(ValueError, RuntimeError), zeroguard.guard(engine, config) as session:
                if where in _BEGINS:
                    session.emit(_BEGINS[where])
                    session.emit(ev.Raised(session.phase, "ValueError: boom"))
                raise error
    return calls


_BEGINS = {
    "forward": ev.ForwardBegin(1, True, True),
    "backward": ev.BackwardBegin(1, "engine.backward"),
    "step": ev.StepBegin(0, 1),
}
