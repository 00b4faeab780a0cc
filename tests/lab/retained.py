"""What backwards leave behind, and kinds of loops beyond one forward with two losses."""

from __future__ import annotations

from typing import Any

import torch

from tests.lab import programs as lab


def _engine(stage: int, offload: bool = False) -> tuple[Any, lab.Reference, torch.nn.Module]:
    torch.manual_seed(0)
    engine, model, optimizer = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload))
    return engine, lab.Reference(model, optimizer, torch.float32), model


def state_after(stage: int) -> dict[str, Any]:
    """The backward state after the retained backward, after the follow-up, and after the step."""
    engine, _, _ = _engine(stage)
    out: dict[str, Any] = {}

    def look(session: Any, full: bool = False) -> dict[str, Any]:
        state = session._backend.backward_state()
        seen = {"depth": state.depth, "hooks": state.hooks, "unfinished": state.unfinished}
        if full:
            queued = engine.optimizer._backward_hook_state.post_backward_callback_queued
            seen |= {"counters": state.counters, "queued": queued}
        return seen

    with lab.guard_of(engine, True) as session:
        _, x = lab.batches(1)
        one, two = lab.losses(engine, x)
        one.backward(retain_graph=True)
        out["after_first"] = look(session)
        two.backward()
        out["after_second"] = look(session)
        engine.step()
        out["after_step"] = look(session, full=True)
    lab.release(engine)
    return out


def next_step(stage: int, by: str, offload: bool = False) -> dict[str, Any]:
    """A step with a retained backward whose second loss is only evaluated, then ordinary steps."""
    engine, reference, model = _engine(stage, offload)
    differences: list[float] = []
    with lab.guard_of(engine, True) as session:
        for step in range(4):
            xs, x = lab.batches(step)
            one, two = lab.losses(engine, x)
            retained = step % 2 == 0
            lab._run(engine, one, by, retained)
            if retained and step == 2:
                lab._run(engine, two, by, False)
            engine.step()
            for work, data in zip(reference.work, xs, strict=True):
                first, second = lab.losses(work, data)
                (first + second if step == 2 else first).backward()
            reference.step()
            differences.append(lab.difference(engine, model))
    out = {"differences": differences, **lab.record(session)}
    lab.release(engine)
    return out


def beyond(scenario: str, stage: int, offload: bool) -> dict[str, Any]:
    """Loops that plain PyTorch runs as they stand."""
    engine, reference, model = _engine(stage, offload)
    differences: list[float] = []
    with lab.guard_of(engine, True) as session:
        for step in range(3):
            xs, x = lab.batches(step)
            _scenario(engine, scenario, x, engine.backward)
            engine.step()
            for work, data in zip(reference.work, xs, strict=True):
                _scenario(
                    work, scenario, data, lambda loss, retain_graph=False: loss.backward(retain_graph=retain_graph)
                )
            reference.step()
            differences.append(lab.difference(engine, model))
    out = {"differences": differences, **lab.record(session)}
    lab.release(engine)
    return out


def _scenario(model: Any, scenario: str, x: torch.Tensor, backward: Any) -> None:
    if scenario == "three_backwards":
        one, two = lab.losses(model, x)
        backward(one, retain_graph=True)
        backward(two, retain_graph=True)
        backward(one + 0.5 * two)
    elif scenario == "two_forwards":
        first, second = lab.losses(model, x), lab.losses(model, x * 0.5 + 1)
        backward(first[0] + first[1])
        backward(second[0])
    elif scenario == "interleaved":
        first = lab.losses(model, x)
        backward(first[0], retain_graph=True)
        second = lab.losses(model, x * 0.5 + 1)
        backward(second[0])
        backward(first[1])
    else:  # torch.autograd.grad runs a graph task over the same forward first: a look at, or a penalty on, its gradient
        x = x.clone().requires_grad_(True)
        one, two = lab.losses(model, x)
        (grad,) = torch.autograd.grad(one, x, create_graph=scenario == "penalty", retain_graph=True)
        backward(one + two + grad.pow(2).sum())
