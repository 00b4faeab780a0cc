"""A look at the weights on an accelerator: it waits for nothing, and its answer comes with the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from zeroguard.backends.deepspeed.finite import Finite


class Far(torch.Tensor):
    """Device memory."""

    device = torch.device("cuda")  # type: ignore[assignment]


class Event:
    """Says when it is waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: Any) -> None:
        self.log.append("recorded")

    def synchronize(self) -> None:
        self.log.append("waited")


def made(values: torch.Tensor) -> tuple[Any, list[str]]:
    log: list[str] = []
    accelerator = SimpleNamespace(
        pin_memory=lambda tensor: tensor, Event=lambda: Event(log), current_stream=lambda: None
    )
    look: Any = Finite.__new__(Finite)
    vars(look).update(
        facts=SimpleNamespace(layout=3),
        optimizer=SimpleNamespace(fp32_partitioned_groups_flat=[values.as_subclass(Far)]),
        accelerator=lambda: accelerator,
        steps=0,
    )
    assert look.spoiled_step() == 0, "the first look"
    return look, log


def test_the_answer_comes_with_the_next_look() -> None:
    values = torch.ones(100)
    look, log = made(values)
    for step in (1, 2, 3, 4):
        look.steps = step
        if step == 3:
            values.fill_(float("nan"))
        assert look.spoiled_step() == (3 if step == 4 else 0)
    assert log == ["recorded", "waited", "recorded", "waited", "recorded", "waited", "recorded"]


def test_the_last_answer_is_fetched() -> None:
    values = torch.ones(100)
    look, _ = made(values)
    look.steps = 1
    values.fill_(float("inf"))
    assert look.spoiled_step() == 0
    assert look.spoiled_step(last=True) == 1
    assert look.spoiled_step(last=True) == 0


def test_what_was_not_finite_at_first_is_not_reported() -> None:
    values = torch.ones(16)
    values[0] = float("-inf")
    look, _ = made(values)
    for step in (1, 2):
        look.steps = step
        assert look.spoiled_step() == 0
    values[1] = float("inf")
    look.spoiled_step()
    assert look.spoiled_step(last=True) == 2
