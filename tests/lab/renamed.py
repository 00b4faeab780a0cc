"""A DeepSpeed in which one attribute has another name: zeroguard does not find it, DeepSpeed itself still works."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import zeroguard
from tests.lab import host_read, identity
from tests.lab import programs as lab
from zeroguard.backends import deepspeed as door
from zeroguard.backends.deepspeed.attributes import TABLE, Attribute
from zeroguard.config import GUARDS

EVERYTHING = [{"name": "automatic"}, {"name": "gradient_audit", "every_n_steps": 1, "action": "raise"}]


def _mine() -> bool:
    """Whether zeroguard asks: two frames up, behind the method that asks this."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("zeroguard.")


def _without(kind: type, name: str) -> type:
    """A subclass of ``kind`` in which ``name`` is not there for zeroguard."""

    def __getattribute__(self: Any, attribute: str) -> Any:
        if attribute == name and _mine():
            raise AttributeError(attribute)
        return kind.__getattribute__(self, attribute)

    def __getattr__(self: Any, attribute: str) -> Any:
        if attribute == name and _mine():
            raise AttributeError(attribute)
        return kind.__getattr__(self, attribute)  # type: ignore[attr-defined]

    space: dict[str, Any] = {"__getattribute__": __getattribute__, "__module__": kind.__module__}
    if hasattr(kind, "__getattr__"):
        space["__getattr__"] = __getattr__
    return type(kind)(kind.__name__, (kind,), space)


def _owners(engine: Any, owner: str) -> list[Any]:
    return {
        "engine": lambda: [engine],
        "optimizer": lambda: [engine.optimizer],
        "module": lambda: [engine.module],
        "hook_state": lambda: [engine.optimizer._backward_hook_state],
        "param": lambda: list(engine.module.parameters()),
    }[owner]()


@contextlib.contextmanager
def renamed(engine: Any, item: Attribute) -> Iterator[None]:
    """Meanwhile zeroguard does not find the attribute."""
    before = [(owner, type(owner)) for owner in _owners(engine, item.owner)]
    for owner, kind in before:
        owner.__class__ = _without(kind, item.name)
    try:
        yield
    finally:
        for owner, kind in before:
            owner.__class__ = kind


def rows(engine: Any) -> list[Attribute]:
    """The rows of the table that something asks for on this engine."""
    facts = door.facts_of(engine)
    asked = (facts.layout, facts.deepspeed_version, facts.offload)
    return [item for item in TABLE if any(item.wanted(guard, *asked) for guard in (*GUARDS, "reading"))]


def _engine(stage: int, offload: bool, bf16: bool) -> Any:
    torch.manual_seed(0)
    zero = host_read.PINNED if offload else None
    extra = {"data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}
    return lab.build(lab.TwoHeads(), lab.ds_config(stage, offload, "bf16" if bf16 else "fp32", zero=zero, **extra))[0]


def attach(stage: int, offload: bool, bf16: bool = False) -> dict[str, Any]:
    """Each row in turn: what attaching says, with ``on_unavailable`` at its default and at ``warn``, and whether
    anything stays changed. On the scripted accelerator, where every guard has work."""
    with host_read.on("scripted"):
        engine = _engine(stage, offload, bf16)
        facts = door.facts_of(engine)
        chosen = [name for name, cls in GUARDS.items() if cls.choose(facts, cls.Config()).status == "selected"]
        answer: dict[str, Any] = {}
        for item in rows(engine):
            seen: dict[str, Any] = {"lost": item.lost, "since": item.since}
            seen["guards"] = [g for g in chosen if item.wanted(g, facts.layout, facts.deepspeed_version, facts.offload)]
            with renamed(engine, item):
                before = identity.snapshot(engine)
                try:
                    zeroguard.guard(engine, {"sinks": [], "guards": EVERYTHING}).close()
                    seen["error"] = "nothing raised"
                except Exception as error:
                    seen["error"] = type(error).__name__
                    seen["text"], seen["guard"] = str(error), getattr(error, "guard", "")
                    seen["missing"] = list(getattr(error, "missing", ()))
                seen["changed"] = identity.changed(before, identity.snapshot(engine))
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    with zeroguard.guard(
                        engine, {"sinks": [], "guards": EVERYTHING, "on_unavailable": "warn"}
                    ) as session:
                        verdicts = {row.guard: row.verdict for row in session.rows}
                seen["unavailable"] = sorted(guard for guard, verdict in verdicts.items() if verdict == "unavailable")
                seen["warnings"] = [str(w.message) for w in caught if "unavailable" in str(w.message)]
            answer[f"{item.owner}.{item.name}"] = seen
        lab.release(engine)
    return answer


def _run(stage: int, offload: bool, guarded: dict[str, Any], item: Attribute | None) -> dict[str, Any]:
    """Two losses, with one attribute renamed before zeroguard comes."""
    original, stack = lab.guard_of, contextlib.ExitStack()

    def guard_of(engine: Any, config: Any) -> Any:
        if item is not None:
            stack.enter_context(renamed(engine, item))
        return original(engine, config)

    with stack, warnings.catch_warnings(), mock.patch.object(lab, "guard_of", guard_of):
        warnings.simplefilter("ignore")
        answer = lab.two_losses("misuse_manual", stage, offload, guarded=guarded, steps=2)
    repairs = sorted({repair["guard"] for repair in answer["repairs"]})
    return {**{key: answer[key] for key in ("status", "differences", "error")}, "repairs": repairs}


def trained(stage: int, offload: bool) -> dict[str, Any]:
    """Each row in turn: a loop with a fault in it, guarded by what is left, and the same loop guarded by the same
    guards where nothing is renamed."""
    engine = _engine(stage, offload, False)
    facts = door.facts_of(engine)
    items = rows(engine)
    lab.release(engine)
    on_request = [name for name, cls in GUARDS.items() if cls.on_request]
    chosen = [name for name, cls in GUARDS.items() if cls.choose(facts, cls.Config()).status == "selected"]
    alone: dict[tuple[str, ...], dict[str, Any]] = {}
    answer: dict[str, Any] = {}
    for item in items:
        gone = {g for g in GUARDS if item.wanted(g, facts.layout, facts.deepspeed_version, facts.offload)}
        left = tuple(name for name in chosen if name not in gone and name not in on_request)
        if left not in alone:
            alone[left] = _run(stage, offload, {"guards": [{"name": name} for name in left]}, None)
        seen = _run(stage, offload, {"on_unavailable": "warn"}, item)
        answer[f"{item.owner}.{item.name}"] = {"left": list(left), "alone": alone[left], "seen": seen}
    return answer


def read(stage: int, offload: bool) -> dict[str, Any]:
    """Each row that reads of gradients need: what ``session.grad_norms()`` says without it, and that training goes
    on."""
    engine = _engine(stage, offload, False)
    facts = door.facts_of(engine)
    asked = (facts.layout, facts.deepspeed_version, facts.offload)
    answer: dict[str, Any] = {}
    for number, item in enumerate(TABLE):
        if not item.wanted("reading", *asked) or any(item.wanted(g, *asked) for g in GUARDS if g != "gradient_audit"):
            continue
        with contextlib.ExitStack() as stack:
            stack.enter_context(renamed(engine, item))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of the audit, which needs them too
            session = stack.enter_context(zeroguard.guard(engine, {"sinks": [], "on_unavailable": "warn"}))
            engine.backward(sum(lab.losses(engine, lab.batches(number)[1])))
            try:
                answer[f"{item.owner}.{item.name}"] = f"read: {session.grad_norms()}"
            except Exception as error:
                answer[f"{item.owner}.{item.name}"] = f"{type(error).__name__}: {error}"
            engine.step()
    lab.release(engine)
    return answer
