"""The lab's programs with a LoopCallback in place of the context manager.

The harness plays the loop that announces: it puts the callback's calls around what the programs do with the engine, so
that every program runs unchanged.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.lab import programs as lab
from zeroguard.integrations.loop import LoopCallback


def over(mode: str, target: str, **case: Any) -> dict[str, Any]:
    """Run another lab function with LoopCallback, ``wrap=True`` or ``wrap=False``."""
    module, name = target.rsplit(".", 1)
    lab.LOOP = mode
    try:
        return getattr(importlib.import_module(f"tests.lab.{module}"), name)(**case)
    finally:
        lab.LOOP = ""


class Announcer:
    """Calls a LoopCallback around the engine's own methods, at the outermost call only."""

    def __init__(self, engine: Any, loop: LoopCallback) -> None:
        self.engine, self.loop = engine, loop
        self.depth = 0
        self.in_step = False
        self.training = True

    def around(self, original: Callable[..., Any], before: Callable[[], Any], after: Callable[[], Any]) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return original(*args, **kwargs)
            before()
            self.depth += 1
            try:
                out = original(*args, **kwargs)
            except BaseException as error:
                self.loop.on_exception(error)
                self.in_step = False
                raise
            finally:
                self.depth -= 1
            after()
            return out

        return called

    def reaches_engine(self, loss: torch.Tensor) -> bool:
        """Not a backward of the plain PyTorch model that runs beside the engine."""
        mine = {id(p) for p in self.engine.module.parameters()}
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if id(getattr(node, "variable", None)) in mine:
                return True
            todo += [following for following, _ in node.next_functions]
        return False

    def begin(self) -> None:
        if not self.in_step and torch.is_grad_enabled():
            self.in_step = True
            self.loop.on_step_begin()

    def before_backward(self) -> None:
        self.begin()
        self.loop.on_before_backward()

    def before_step(self) -> None:
        self.begin()
        self.loop.on_before_optimizer_step()

    def after_step(self) -> None:
        self.in_step = False
        self.loop.on_step_end()

    def mode(self, training: bool) -> None:
        if training != self.training:
            self.training = training
            (self.loop.on_eval_end if training else self.loop.on_eval_begin)()


@contextlib.contextmanager
def loop_of(engine: Any, config: dict[str, Any], mode: str) -> Iterator[Any]:
    """As zeroguard.guard(engine, config), by LoopCallback; ``mode`` is ``wrapped`` or ``announced``."""
    loop = LoopCallback(engine, config, wrap=mode == "wrapped")
    told = Announcer(engine, loop)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    owners = [(engine, "engine"), (engine.optimizer, "optimizer"), (engine.module, "module")]
    places = [
        (engine, "forward", told.begin, nothing),
        (engine, "backward", told.before_backward, loop.on_after_backward),
        (torch.Tensor, "backward", told.before_backward, loop.on_after_backward),
        (engine, "step", told.before_step, told.after_step),
        *((owner, "zero_grad", nothing, loop.on_zero_grad) for owner, _ in owners),
        (engine, "eval", lambda: told.mode(False), nothing),
        (engine, "train", nothing, lambda: told.mode(True)),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        for owner, name, before, after in places:
            stack.enter_context(_replaced(owner, name, told, before, after))
        try:
            yield loop.session
        except BaseException as error:
            loop.on_exception(error)
            raise


@contextlib.contextmanager
def _replaced(owner: Any, name: str, told: Announcer, before: Any, after: Any) -> Iterator[None]:
    original = getattr(owner, name)
    if owner is torch.Tensor:
        announced = told.around(original, before, after)

        def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return (announced if told.reaches_engine(self) else original)(self, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.backward = original  # type: ignore[method-assign]
        return
    kept = vars(owner).get(name, None)
    vars(owner)[name] = told.around(original, before, after)
    try:
        yield
    finally:
        if kept is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = kept


def order(case: str, stage: int = 2, offload: bool = False, wrap: bool = False) -> dict[str, Any]:
    """A loop of two losses a step that leaves out, or misplaces, one call in every step."""
    torch.manual_seed(0)
    engine, model, optimizer = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload))
    reference = lab.Reference(model, optimizer, torch.float32)
    differences: list[float] = []
    loop = LoopCallback(engine, {"sinks": []}, wrap=wrap, on_violation="record")

    def call(name: str) -> None:
        if name != case:
            getattr(loop, name)()

    for step in range(3):
        xs, x = lab.batches(step)
        call("on_step_begin")
        losses = lab.losses(engine, x)
        for number, loss in enumerate(losses):
            call("on_before_backward")
            engine.backward(loss, retain_graph=number == 0)
            call("on_after_backward")
        if case == "step_end_first":
            loop.on_step_end()
        call("on_before_optimizer_step")
        engine.step()
        if case != "step_end_first":
            call("on_step_end")
        for work, data in zip(reference.work, xs, strict=True):
            sum(lab.losses(work, data)).backward()
        reference.step()
        differences.append(lab.difference(engine, model))
    out = {"differences": differences, **lab.record(loop.session)}
    loop.close()
    try:
        loop.on_step_begin()
    except Exception as error:
        out["closed"] = f"{type(error).__name__}: {error}"
    lab.release(engine)
    return out


def raised(stage: int, offload: bool) -> dict[str, Any]:
    """on_violation: raise, with a call that is missing on every rank."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload))
    answer = {"raised": ""}
    with contextlib.suppress(Exception), LoopCallback(engine, {"sinks": []}, wrap=False) as loop:
        _, x = lab.batches(0)
        loop.on_step_begin()
        engine.backward(sum(lab.losses(engine, x)))
        loop.on_before_optimizer_step()
        engine.step()
        try:
            loop.on_step_end()
        except Exception as error:
            answer["raised"] = f"{type(error).__name__}: {error}"
    lab.release(engine)
    return answer


def untouched(stage: int, offload: bool) -> dict[str, Any]:
    """What is another object while a callback with ``wrap=False`` is at work, and after it is closed."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload))
    owners = {"engine": engine, "optimizer": engine.optimizer, "module": engine.module}

    def step() -> None:
        _, x = lab.batches(0)
        engine.backward(sum(lab.losses(engine, x)))
        engine.step()

    def snapshot() -> dict[str, int]:
        callables = {}
        for name, owner in owners.items():
            for key in (key for key in dir(owner) if not key.startswith("__")):
                value = vars(owner).get(key, getattr(type(owner), key, None))
                if callable(value) or isinstance(value, (dict, list)):
                    callables[f"{name}.{key}"] = id(value)
        return callables

    def hooks() -> int:
        module = engine.module
        return (
            len(module._forward_hooks)
            + len(module._forward_pre_hooks)
            + sum(len(p._backward_hooks or ()) for p in module.parameters())
        )

    step()
    before, hooked = snapshot(), hooks()
    loop = LoopCallback(engine, {"sinks": []}, wrap=False)
    # Between attaching and the first step: DeepSpeed itself makes new lists and dicts as it trains.
    during = sorted(key for key, value in snapshot().items() if before.get(key) != value)
    step()
    more = hooks() - hooked
    loop.close()
    out = {"during": during, "hooks": more, "left": hooks() - hooked, "marked": "_zeroguard_session" in vars(engine)}
    lab.release(engine)
    return out
