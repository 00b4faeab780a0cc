"""Host reads of offloaded gradients on a scripted accelerator, where an unguarded read is always wrong."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator

from tests.lab.programs import DEVICE, TwoHeads, batches, build, ds_config, guard_of, losses, record, release, weights
from zeroguard.testing import scripted_accelerator

PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@contextlib.contextmanager
def on(kind: str) -> Iterator[Any]:
    """DeepSpeed on its own accelerator (``plain``) or on the scripted one (``scripted``)."""
    inner = get_accelerator()
    if kind == "plain":
        yield inner
        return
    with scripted_accelerator(inner) as accelerator:
        set_accelerator(accelerator)
        try:
            yield accelerator
        finally:
            set_accelerator(inner)


def _norm(value: Any) -> float:
    return float(value.norm())


def _safe_get(engine: Any) -> list[float]:
    from deepspeed.utils import safe_get_full_grad

    return [_norm(safe_get_full_grad(p)) for p in engine.module.parameters()]


def _dict(engine: Any) -> Any:
    return engine.optimizer.accumulated_grads_in_cpu


def _masters(engine: Any) -> Any:
    return engine.optimizer.single_partition_of_fp32_groups


def _norms(engine: Any, values: Iterable[Any]) -> list[float]:
    """Sorted by parameter: autograd may deliver gradients in another order in another run."""
    pairs = zip(_dict(engine).keys(), [_norm(value) for value in values], strict=True)
    return [norm for _, norm in sorted(pairs)]


#: Ways to read what a non-boundary backward accumulated, and what a boundary wrote. No word of zeroguard in them.
READS: dict[str, Callable[[Any], list[float]]] = {
    "items": lambda e: _norms(e, [v for _, v in _dict(e).items()]),
    "values": lambda e: _norms(e, _dict(e).values()),
    "getitem": lambda e: _norms(e, [_dict(e)[k] for k in _dict(e)]),
    "get": lambda e: _norms(e, [_dict(e).get(k) for k in list(_dict(e).keys())]),
    "to_dict": lambda e: _norms(e, dict(_dict(e)).values()),
    "copy": lambda e: _norms(e, copy.copy(_dict(e)).values()),
    "deepcopy": lambda e: _norms(e, copy.deepcopy(_dict(e)).values()),
    "pickle": lambda e: _norms(e, pickle.loads(pickle.dumps(_dict(e))).values()),
    "master_index": lambda e: [_norm(_masters(e)[i].grad) for i in range(len(_masters(e)))],
    "master_loop": lambda e: [_norm(m.grad) for m in _masters(e)],
    "master_zip": lambda e: [_norm(m.grad) for m, _ in zip(_masters(e), e.optimizer.bit16_groups, strict=True)],
    "gradient_dict": lambda e: [_norm(g) for group in e.optimizer.offload_gradient_dict.values() for g in group],
    "safe_get_full_grad": _safe_get,
}
OF_MASTERS = frozenset({"master_index", "master_loop", "master_zip", "gradient_dict", "safe_get_full_grad"})


def _run(
    kind: str,
    guarded: Any,
    look: Callable[[Any, Any, int], None],
    *,
    gas: int = 2,
    steps: int = 2,
    stage: int = 2,
    zero: dict | None = None,
) -> dict[str, Any]:
    """Train, and call ``look(engine, session, micro)`` after every backward."""
    torch.manual_seed(0)
    with on(kind) as accelerator:
        engine, _, _ = build(TwoHeads(), ds_config(stage, True, gas=gas, zero={**PINNED, **(zero or {})}))
        hot: list[str] = []  # what DeepSpeed and the guards waited for in their own time
        try:
            with guard_of(engine, guarded) as session:
                for step in range(steps):
                    for micro in range(gas):
                        _, x = batches(100 * step + micro)
                        loss = sum(losses(engine, x))
                        before = len(getattr(accelerator, "waits", ()))
                        engine.backward(loss)
                        hot += getattr(accelerator, "waits", [])[before:]
                        look(engine, session, step * gas + micro)
                        engine.step()
            return {
                "weights": [w.flatten().tolist() for w in weights(engine)],
                "hot": hot,
                "waits": list(getattr(accelerator, "waits", ())),
                **record(session),
            }
        finally:
            release(engine)


def reads(how: str, kind: str = "scripted", guarded: Any = True, at: int | None = None, **run: Any) -> dict[str, Any]:
    """The norms that one way of reading gives after backward number ``at`` (from 0) and after no other.

    ``hot`` are the waits during the backwards, ``read_waits`` those during the read, ``pending`` the copies
    that had not landed before and after it.
    """
    when = (1 if how in OF_MASTERS else 0) if at is None else at
    answer: dict[str, Any] = {}

    def look(engine: Any, session: Any, micro: int) -> None:
        if micro != when:
            return
        accelerator = get_accelerator()
        before, pending = len(getattr(accelerator, "waits", ())), getattr(accelerator, "pending", 0)
        answer["seen"] = READS[how](engine)
        answer["read_waits"] = list(getattr(accelerator, "waits", [])[before:])
        answer["pending"] = [pending, getattr(accelerator, "pending", 0)]

    answer.update(_run(kind, guarded, look, **run))
    return answer


def explicit(how: str, form: str, guarded: Any) -> dict[str, Any]:
    """Mode explicit: the norms read before and after ``session.host_read`` as a ``call`` or as a ``with`` block."""
    answer: dict[str, Any] = {}

    def look(engine: Any, session: Any, micro: int) -> None:
        if micro != (1 if how in OF_MASTERS else 0):
            return
        answer["before"] = READS[how](engine)
        tensors = list(_dict(engine).values())
        at = len(get_accelerator().waits)
        if form == "call":
            session.host_read(*tensors)
            answer["after"] = READS[how](engine)
        elif form == "call without tensors":
            session.host_read()
            answer["after"] = READS[how](engine)
        else:
            with session.host_read(tensors[0]):
                answer["after"] = READS[how](engine)
        answer["read_waits"] = list(get_accelerator().waits[at:])

    answer.update(_run("scripted", guarded, look))
    return answer


def quiet(kind: str = "scripted", guarded: Any = True, **run: Any) -> dict[str, Any]:
    """Train and read nothing."""
    return _run(kind, guarded, lambda engine, session, micro: None, **run)


def _user_copy(engine: Any, session: Any, kept: dict[str, Any]) -> Any:
    """A copy of the user's own, from the device to page-locked memory."""
    place = get_accelerator().pin_memory(torch.zeros(4))
    place.copy_(torch.full((4,), 2.0), non_blocking=True)
    return place


def _kept_accumulator(engine: Any, session: Any, kept: dict[str, Any]) -> Any:
    """The newest accumulator, past the view that waits."""
    data = engine.optimizer.accumulated_grads_in_cpu
    return list(getattr(data, "data", data).values())[-1]


def _behind_view(engine: Any, session: Any, kept: dict[str, Any]) -> Any:
    """The newest accumulator as the guard hands it out."""
    return list(_dict(engine).values())[-1]


def _waited(engine: Any, session: Any, kept: dict[str, Any]) -> Any:
    place = _user_copy(engine, session, kept)
    session.host_read(place)
    return place


def _event_waited(engine: Any, session: Any, kept: dict[str, Any]) -> Any:
    place = _user_copy(engine, session, kept)
    event = get_accelerator().Event()
    event.record()
    event.synchronize()
    return place


def _other_part(engine: Any, session: Any, kept: dict[str, Any]) -> Any:
    """The half of a buffer that no copy is filling."""
    place = get_accelerator().pin_memory(torch.zeros(8))
    place[:4].copy_(torch.full((4,), 2.0), non_blocking=True)
    return place[4:]


def _blocking(engine: Any, session: Any, kept: dict[str, Any]) -> Any:
    place = get_accelerator().pin_memory(torch.zeros(4))
    return place.copy_(torch.full((4,), 2.0))


SOURCES = {
    "user": _user_copy,
    "kept": _kept_accumulator,
    "view": _behind_view,
    "waited": _waited,
    "event": _event_waited,
    "other part": _other_part,
    "blocking": _blocking,
}


def _onto_device(tensor: Any) -> Any:
    return torch.zeros_like(tensor, device=DEVICE).copy_(tensor, non_blocking=True).sum()


#: What is done with the host tensor; the last ones read nothing on the host.
USES: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t.view(-1)[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "norm": lambda t: t.norm(),
    "add": lambda t: t + 1,
    "add_": lambda t: t.add_(0),
    "copy to host": lambda t: torch.zeros(t.shape).add_(t),
    "cat": lambda t: torch.cat([torch.zeros(1), t.flatten()]),
    "foreach": lambda t: torch._foreach_norm([t]),
    "clone": lambda t: t.clone(),
    "cast": lambda t: t.double(),
    "bool": lambda t: bool(t.view(-1)[0]),
    "print": lambda t: repr(t),
    "pickle": lambda t: pickle.dumps(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "equal": lambda t: torch.equal(t, t),
    "column": lambda t: t.view(-1, 2)[:, 0].sum(),
    "onto the device": _onto_device,
    "view": lambda t: t.view(-1)[1:].t(),
    "shape": lambda t: (t.shape, t.numel(), t.is_pinned(), torch.empty_like(t).shape, t.data_ptr()),
    "fill": lambda t: t.zero_(),
}


def detect(source: str, use: str, guarded: Any) -> dict[str, Any]:
    """What a use of a host tensor shows right after the first backward, with the detector or without."""
    kept: dict[str, Any] = {}

    def look(engine: Any, session: Any, micro: int) -> None:
        if micro == 0:
            tensor = SOURCES[source](engine, session, kept)
            kept["found"] = len(session.findings)
            USES[use](tensor)

    return {**_run("scripted", guarded, look), **kept}


def detector_leaves_nothing(nested: bool) -> dict[str, Any]:
    """Whether PyTorch's stacks of modes are as before, also with somebody else's mode on top."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def stacks() -> list[int]:
        return [len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())]

    answer: dict[str, Any] = {"before": stacks(), "warnings": []}
    on_ = {"guards": [{"name": "host_read", "detect": True}]}
    with on("scripted"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine, _, _ = build(TwoHeads(), ds_config(2, True, zero=PINNED))
        other = Other()
        session = guard_of(engine, on_)
        answer["during"] = stacks()
        if nested:
            other.__enter__()
        session.close()
        if nested:
            other.__exit__(None, None, None)
        answer["warnings"] = [str(w.message) for w in told if "zeroguard left" in str(w.message)]
        answer["works"] = float((torch.ones(2) + 1).sum())
        release(engine)
    answer["after"] = stacks()
    while len(_get_current_dispatch_mode_stack()) > answer["before"][0]:  # for the cases after this one
        _get_current_dispatch_mode_stack()[-1].__exit__(None, None, None)
    return answer


def middle(what: str, folder: str, stage: int = 2, kind: str = "scripted", guarded: Any = True) -> dict[str, Any]:
    """Reads of DeepSpeed's own functions, and a checkpoint, in the middle of an accumulation window and at its end."""
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad

    seen: list[list[float]] = []

    def look(engine: Any, session: Any, micro: int) -> None:
        params = list(engine.module.parameters())
        if what == "partitions":
            groups = engine.optimizer.get_fp32_grad_partitions()
            seen.append([float(g.norm()) for group in groups.values() for g in group.values()])
        elif what == "checkpoint":
            engine.save_checkpoint(f"{folder}/{micro}")
        else:
            read = safe_get_full_grad if what == "full" else safe_get_local_grad
            values = [read(p) for p in params]
            seen.append([-1.0 if v is None else float(v.norm()) for v in values])

    answer = _run(kind, guarded, look, stage=stage)
    if what == "checkpoint":
        seen = [_saved(f"{folder}/{micro}") for micro in range(4)]
    return {**answer, "seen": seen}


def _saved(folder: str) -> list[float]:
    """The norms of all tensors in a checkpoint, by name."""
    found: list[tuple[str, float]] = []

    def walk(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append((name, float(value.float().norm())))
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{name}.{key}", item)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                walk(f"{name}.{i}", item)

    for path in sorted(Path(folder).rglob("*.pt")):
        walk(path.name, torch.load(path, weights_only=False))
    return [norm for _, norm in sorted(found)]


def undone(guarded: Any = True) -> dict[str, Any]:
    """Whether the wrapped attributes are foreign objects while guarded, and the original ones afterwards."""
    names = ("accumulated_grads_in_cpu", "single_partition_of_fp32_groups", "offload_gradient_dict")
    with on("scripted"):
        torch.manual_seed(0)
        engine, _, _ = build(TwoHeads(), ds_config(2, True, gas=2, zero=PINNED))
        try:
            optimizer = engine.optimizer
            before = [getattr(optimizer, name) for name in names]
            mappings = [p._hp_mapping.offload_gradient_dict for p in engine.module.parameters()]
            methods = set(vars(optimizer)) | set(vars(engine))
            with guard_of(engine, guarded):
                during = [getattr(optimizer, name) is old for name, old in zip(names, before, strict=True)]
                for micro in range(2):
                    engine.backward(sum(losses(engine, batches(micro)[1])))
                    engine.step()
            after = [getattr(optimizer, name) is old for name, old in zip(names, before, strict=True)]
            mapped = all(
                p._hp_mapping.offload_gradient_dict is old
                for p, old in zip(engine.module.parameters(), mappings, strict=True)
            )
            left = sorted((set(vars(optimizer)) | set(vars(engine))) - methods)
            return {"during": during, "after": after, "mapped": mapped, "left": left, "type": type(before[0]).__name__}
        finally:
            release(engine)


def own_tensor(offload: bool, guarded: Any = True) -> dict[str, Any]:
    """A copy to the host that the user starts, and session.host_read for it, with and without offloaded gradients."""
    torch.manual_seed(0)
    with on("scripted") as accelerator:
        engine, _, _ = build(TwoHeads(), ds_config(2, offload, zero=PINNED if offload else None))
        try:
            with guard_of(engine, guarded) as session:
                place = accelerator.pin_memory(torch.zeros(4))
                place.copy_(torch.ones(4), non_blocking=True)
                before = place.tolist()
                session.host_read(place)
                return {"before": before, "after": place.tolist(), **record(session)}
        finally:
            release(engine)
