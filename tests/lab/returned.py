"""After close each attribute, method, hook, container and class is the original, however loop and session ended.

Two engines of one configuration take the same course, one of them unguarded: what changes there is DeepSpeed's own
doing, and is not asked about on the other.
"""

from __future__ import annotations

import functools
import gc
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

import zeroguard
from tests.lab import idle, snapshot
from tests.lab import programs as lab
from tests.lab.host_read import on
from zeroguard.attach import announce

#: How the loop ends; the backward last, because DeepSpeed does not get over it by itself.
PHASES = ("", "forward", "step", "backward")
CONFIG = {"sinks": [], "on_violation": "record", "guards": [{"name": "automatic"}, {"name": "gradient_audit"}]}


METHODS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Boom(Exception):
    """What the loop raises."""


def _engine(stage: int, offload: bool, dtype: str, extra: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    return lab.build(idle.Breaking(), lab.ds_config(stage, offload, dtype, **(extra or {})))[0]


def train(engine: Any, fail: str = "") -> None:
    """A step, and one that raises in a phase."""
    kind = next(engine.module.parameters()).dtype
    _, x = lab.batches(0)

    def once(boom: str = "") -> None:
        engine.zero_grad()
        engine.backward(engine(x.to(kind), boom).float().pow(2).mean())
        engine.step()

    once()
    if fail != "step":
        return once(fail)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    own = vars(base).get("step")

    def broken(*args: Any, **kwargs: Any) -> None:
        raise Boom("boom in step")

    vars(base)["step"] = broken
    try:
        once()
    finally:
        vars(base).pop("step")
        if own is not None:
            vars(base)["step"] = own
    return None


# -- ways to close
# ----------------------------------------------------------------------


def _by_hand(session: Any) -> None:
    session.close()
    session.close()


def _from_a_thread(session: Any) -> None:
    thread = threading.Thread(target=session.close)
    thread.start()
    thread.join()


def _by_the_collector(session: Any) -> None:
    class Owner:
        def __init__(self) -> None:
            self.me = self  # a cycle, which only the collector ends
            self.session = session

        def __del__(self) -> None:
            self.session.close()

    Owner()
    gc.collect()


WAYS: dict[str, Callable[[Any], None]] = {
    "twice": _by_hand,
    "from a thread": _from_a_thread,
    "by the collector": _by_the_collector,
}


def course(
    stage: int,
    offload: bool,
    dtype: str = "fp32",
    extra: dict[str, Any] | None = None,
    wrap: bool = True,
    accelerator: str = "plain",
) -> dict[str, Any]:
    """All phases and ways to close on one engine; ``left`` and ``reachable`` are empty where all was given back."""
    gc.collect()  # an engine that goes clears names in deepspeed.utils.debug
    with on(accelerator):
        plain, guarded = (_engine(stage, offload, dtype, extra) for _ in range(2))
        for engine in (plain, guarded):
            train(engine)
        packages = [snapshot.packages()]
        moving, methods = _alone(plain)
        packages.append(snapshot.packages())
        answer = {"own": len(moving), "own_methods": sorted(methods), **_under_guard(guarded, wrap, moving)}
        packages.append(snapshot.packages())
    own, new = (snapshot.changed(*packages[n : n + 2]) for n in (0, 1))
    answer["packages"] = sorted(new - own)
    for engine in (plain, guarded):
        lab.release(engine)
    return answer


def _alone(engine: Any) -> tuple[set[str], set[str]]:
    """What DeepSpeed itself replaces, and what of that are methods."""
    moving: set[str] = set()
    methods: set[str] = set()
    for fail in PHASES:
        before = snapshot.engine(engine)
        _run(engine, fail)
        after = snapshot.engine(engine)
        moving |= (new := snapshot.changed(before, after))
        methods |= {p for p in new if isinstance(before.get(p), METHODS) or isinstance(after.get(p), METHODS)}
    return moving, methods


def _under_guard(engine: Any, wrap: bool, moving: set[str]) -> dict[str, Any]:
    answer: dict[str, Any] = {"left": {}, "reachable": {}, "raised": {}}
    for number, fail in enumerate(PHASES):
        way = list(WAYS)[number % len(WAYS)]
        before = snapshot.engine(engine)
        session = zeroguard.guard(engine, CONFIG) if wrap else announce(engine, {**CONFIG, "guards": None})[0]
        answer["touched"] = len(snapshot.changed(before, snapshot.engine(engine)))
        answer["raised"][fail] = _run(engine, fail)
        WAYS[way](session)
        assert session.closed
        case = f"{fail or 'no error'}, closed {way}"
        # The scripted accelerator is zeroguard's, and the test's; what is queued on it moves.
        left = {p for p in snapshot.changed(before, snapshot.engine(engine)) - moving if "._device." not in p}
        reachable = [name for name in snapshot.ours(engine) if "._scripted." not in name]
        for name, what in (("left", sorted(left)), ("reachable", reachable)):
            if what:
                answer[name][case] = what[:20]
        answer["selected"] = list(session.selection.selected)
    return answer


def _run(engine: Any, fail: str) -> str:
    try:
        train(engine, fail)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_courses(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Several configurations, in one process."""
    return {"answers": [course(**case) for case in cases]}


def destroyed(stage: int, offload: bool) -> dict[str, Any]:
    """``engine.destroy()`` came first."""
    engine = _engine(stage, offload, "fp32", None)
    session = zeroguard.guard(engine, CONFIG)
    train(engine)
    engine.destroy()
    session.close()
    answer = {"reachable": snapshot.ours(engine), "findings": [f.text() for f in session.findings]}
    lab.release(engine)
    return answer
