"""What the guard ``accumulation`` watches, theme by theme. Each watcher is a state machine of its own: events in, what
was seen out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from zeroguard import events as ev
from zeroguard.backends.base import Engine
from zeroguard.findings import Severity

__all__ = ["Ranks", "Seen", "Settings", "Trainer", "Updates", "Watcher"]

#: Skipped updates in a row that are no search for a loss scale, and no bad batch.
SKIPS = 10


class Seen(NamedTuple):
    """A kind of fault that was seen; ``text`` names its texts where there are several."""

    kind: str
    severity: Severity
    values: Mapping[str, Any]
    subject: tuple[str, ...] = ()
    text: str = ""


class Watcher:
    """Base class."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def handlers(self) -> dict[type[ev.Event], Any]:
        """Which events it wants, and what handles each."""
        raise NotImplementedError

    @property
    def repaired(self) -> bool:
        """Whether the accumulators are kept right, as in PyTorch."""
        return self.engine.actions.get("accumulator_reset") == "repair"


class Trainer(Watcher):
    """What a trainer and DeepSpeed do to one step without the other's knowing; but for the division, which asks for a
    repair."""

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {ev.GraphReached: self._reached, ev.GradientRead: self._read, ev.StepBegin: self._step}

    def _reached(self, event: ev.GraphReached) -> Iterable[Seen]:
        if event.stepped:
            yield Seen("step_between_backwards", "error", {"number": event.again + 1, "forward": event.forward})

    def _read(self, event: ev.GradientRead) -> Iterable[Seen]:
        if not event.backwards:
            yield Seen("late_gradient_read", "warning", {"what": event.what})
        elif event.early and (answer := self._answers_early()):
            values = {"what": event.what, "steps": self.engine.facts.accumulation_steps, "answer": answer}
            yield Seen("early_gradient_read", "warning", values)

    def _answers_early(self) -> str:
        """What DeepSpeed answers before the boundary; empty where that is right, or not known. Measured, see the
        docs."""
        facts = self.engine.facts
        if facts.managed_accumulation and facts.layout in (2, 3) and facts.offload:
            return (
                "zeros, or an earlier window's gradient, as it copies gradients to where it reads them at the boundary"
            )
        if facts.managed_accumulation and facts.layout == 2 and not facts.adds_at_boundary:
            return "an error, on the rank that holds the parameter, while the others wait for it"
        return ""

    def _step(self, event: ev.StepBegin) -> Iterable[Seen]:
        if event.by == "engine.step":
            return
        facts = self.engine.facts
        steps = facts.accumulation_steps
        # Only at a boundary do these reduce, or hand over, what the step consumes; the others do it at each backward.
        loses = facts.layout in (1, 2, "bf16") or facts.offload or (facts.stage == 0 and facts.world_size > 1)
        if steps > 1 and loses:
            yield Seen("bypassed_engine_step", "error", {"steps": steps})
        else:
            yield Seen("bypassed_engine_step", "warning", {}, text="bypassed_engine_step, counters")


class Updates(Watcher):
    """A step updates the weights."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.applied = 0
        self.skipped = 0  # in a row

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {ev.StepEnd: self._step_end}

    def _step_end(self, event: ev.StepEnd) -> Iterable[Seen]:
        if event.applied:
            self.applied += 1
            self.skipped = 0
            return
        self.skipped += 1
        searching = self.engine.facts.loss_scale == "dynamic"
        if not searching:  # else it is how a loss scale is found, and found again
            scaled = self.engine.facts.loss_scale == "static"
            cause = "a batch, or an overflow" + (" of fp16 at this fixed loss scale" if scaled else " in the model")
            yield Seen("skipped_update", "warning", {"cause": cause})
        # Before the first applied update a scale may fall from 2^32, and DeepSpeed itself gives up at its minimum.
        if self.skipped == SKIPS and (self.applied or not searching):
            scale = ", and a lower loss scale does not help" if searching else ""
            values = {"n": self.skipped, "applied": self.applied, "scale": scale}
            yield Seen("updates_keep_being_skipped", "warning" if searching else "error", values)


class Settings(Watcher):
    """Gradients are clipped as the user set it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.steps = 0
        self.backwards = False

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {
            ev.BackwardEnd: self._end,
            ev.GradientClip: self._clip,
            ev.StepEnd: self._step_end,
            ev.Close: self._close,
        }

    def _end(self, event: ev.BackwardEnd) -> Iterable[Seen]:
        self.backwards = True
        return ()

    def _clip(self, event: ev.GradientClip) -> Iterable[Seen]:
        if self.backwards and not event.gradients and self.engine.facts.stage:
            limit = "..." if event.limit is None else f"{event.limit:g}"
            yield Seen("clipped_nothing", "warning", {"by": event.by, "limit": limit})

    def _step_end(self, event: ev.StepEnd) -> Iterable[Seen]:
        self.steps += 1
        # Reading a norm waits for the device: after steps 1, 2, 4, 8, ...
        if self.steps & (self.steps - 1) == 0:
            yield from self._clipped()

    def _close(self, event: ev.Close) -> Iterable[Seen]:
        if not event.failed and self.steps:
            yield from self._clipped()

    def _clipped(self) -> Iterable[Seen]:
        limit = self.engine.facts.unasked_clipping
        norm = self.engine.grad_norm() if limit else None
        if norm is not None and limit < norm < float("inf"):
            version = self.engine.facts.deepspeed_version
            yield Seen("unconfigured_clipping", "warning", {"limit": limit, "norm": norm, "version": version})


class Ranks(Watcher):
    """Ranks reduce the same gradients in the same order, and have the same boundaries: a fingerprint of the window, to
    be compared where ranks agree on stopping anyway.

    Stages 1 and 2, where a difference is silent. Stage 0 makes up for one, and on stage 3 it hangs.
    """

    ORDER_BITS = 31

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.flags = b""
        self.aborted = False
        self.window = 0

    def handlers(self) -> dict[type[ev.Event], Any]:
        facts = self.engine.facts
        if facts.world_size == 1 or facts.layout not in (1, 2):
            return {}
        return {
            ev.BackwardEnd: self._end,
            ev.BackwardAborted: self._aborted,
            ev.ZeroGrad: self._zero_grad,
            ev.StepBegin: self._step_begin,
        }

    def _end(self, event: ev.BackwardEnd) -> Iterable[Seen]:
        self.flags += b"1" if event.boundary else b"0"
        return ()

    def _aborted(self, event: ev.BackwardAborted) -> Iterable[Seen]:
        self.aborted = True
        return ()

    def _zero_grad(self, event: ev.ZeroGrad) -> Iterable[Seen]:
        if self.repaired:
            self.flags, self.aborted = b"", False
        return ()

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Seen]:
        order = 0 if self.aborted else self.engine.gradient_order()
        # Where accumulators add up as in PyTorch, and on stage 1, which hangs, boundaries need not be compared.
        silent = order and self.engine.facts.layout == 2 and not self.repaired
        flags = zlib.crc32(self.flags) >> 1 if silent else 0
        self.window = order << self.ORDER_BITS | flags
        self.flags, self.aborted = b"", False
        return ()

    def fingerprint(self) -> int:
        """Of the window that was stepped last, once; 0 for nothing to compare."""
        window, self.window = self.window, 0
        return window

    def differs(self, words: Mapping[int, int]) -> Iterable[Seen]:
        """Judge the fingerprints of all ranks."""
        for shift, kind, what in (
            (self.ORDER_BITS, "rank_order", "the order"),
            (0, "rank_boundaries", "the boundaries"),
        ):
            groups: dict[int, list[int]] = {}
            for rank, word in words.items():
                groups.setdefault(word >> shift & ((1 << self.ORDER_BITS) - 1), []).append(rank)
            if len(groups) > 1:
                parts = sorted(map(_ranks, groups.values()), key=len)
                seen = f"{what} of {' is not that of '.join(parts[:2])}"
                yield Seen(kind, "error", {"seen": seen})
                return  # a different order comes with different boundaries


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank(s) {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
