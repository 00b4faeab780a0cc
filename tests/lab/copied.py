"""A guarded module is copied, pickled, saved, and an engine is dropped, as without a guard."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

import zeroguard
from tests.lab import idle, returned, snapshot
from tests.lab import programs as lab


def _saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved,
}


@contextlib.contextmanager
def _without_hooks(module: Any) -> Iterator[None]:
    """DeepSpeed's own hooks cannot be pickled."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    kept = [(vars(part), name, vars(part)[name]) for part in module.modules() for name in names]
    for space, name, _ in kept:
        space[name] = OrderedDict()
    try:
        yield
    finally:
        for space, name, hooks in kept:
            space[name] = hooks


def _outcome(engine: Any, how: str) -> dict[str, Any]:
    module = engine.module
    try:
        with _without_hooks(module):
            made = COPIES[how](module)
    except Exception as error:
        return {"error": type(error).__name__}
    values = [p.detach().float().sum().item() for p in made.parameters()]
    out: dict[str, Any] = {"type": type(made).__qualname__, "values": values, "training": made.training}
    if how != "copy":
        made.train(False)
        made.zero_grad()
        for param in made.parameters():
            param.requires_grad_(False)
        out["original"] = [module.training, all(p.requires_grad for p in module.parameters())]
    return out


def copies(stage: int, offload: bool) -> dict[str, Any]:
    """What each way to copy gives, without a guard, under it, and after it; what of zeroguard is in the copy."""
    engine = returned._engine(stage, offload, "fp32", None)
    returned.train(engine)
    answer: dict[str, Any] = {how: [_outcome(engine, how)] for how in COPIES}
    with zeroguard.guard(engine, returned.CONFIG):
        for how, rows in answer.items():
            rows.append(_outcome(engine, how))
        with _without_hooks(engine.module):  # those of the copy lead to the engine, and so to the session
            made = copy.deepcopy(engine.module)
        reach = snapshot.ours(made, beyond=(engine, engine.optimizer, engine.module))
    for how, rows in answer.items():
        rows.append(_outcome(engine, how))
    lab.release(engine)
    return {"outcomes": answer, "reachable": reach}


# -- dropped engines
# ----------------------------------------------------------------------


def _dropped(stage: int, offload: bool, how: str, destroy: bool) -> bool:
    """Whether the engine is gone once nobody has it any more."""
    engine, *rest = lab.build(idle.Breaking(), lab.ds_config(stage, offload))
    del rest
    session = None
    if how != "unguarded":
        session = zeroguard.guard(engine, returned.CONFIG, sinks=[lambda record: None])
    returned.train(engine)
    if how in ("closed", "closed, and the session kept"):
        assert session is not None
        session.close()
    if how != "closed, and the session kept":
        session = None
    if how == "failed":
        with contextlib.suppress(ValueError):
            returned.train(engine, "forward")
    if destroy:
        engine.destroy()
    here = weakref.ref(engine)
    del engine
    for _ in range(2):
        gc.collect()
    return here() is None and (session is None or session.closed)


def dropped(stage: int, offload: bool, destroy: bool) -> dict[str, bool]:
    """By what was done with the session."""
    ways = ("unguarded", "closed", "closed, and the session kept", "never closed", "failed")
    return {how: _dropped(stage, offload, how, destroy) for how in ways}
