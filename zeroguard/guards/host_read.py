"""Guard ``host_read``: Python does not read offloaded gradients before the copies that fill them have landed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from zeroguard import events as ev
from zeroguard.backends.base import Action, EngineFacts, Request
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["HostReadConfig", "HostReadGuard"]


class HostReadConfig(GuardModel):
    """Options of the guard ``host_read``."""

    name: Literal["host_read"] = "host_read"
    """The guard's name."""
    mode: Literal["transparent", "explicit"] = "transparent"
    """``transparent``: reads through ``optimizer.accumulated_grads_in_cpu``,
    ``optimizer.single_partition_of_fp32_groups`` (the fp32 gradients), ZeRO-3's gradient partitions and
    ``safe_get_full_grad`` wait by themselves; a tensor that you took out of them before and kept does not: give it to
    ``session.host_read``. ``explicit``: only ``session.host_read`` waits."""
    wait: Literal["event", "stream", "device"] = "event"
    """What is waited for: the copies (``event``), everything on the streams that copied (``stream``), or the device."""


class HostReadGuard(Guard):
    """Waits before the host reads offloaded accumulators.

    Source of the claim: on one H200, ZeRO-2, pinned, overlap_comm false, 101 of 402 reads of
    ``accumulated_grads_in_cpu`` right after a backward were wrong on DeepSpeed 0.19.8, 401 on 0.19.2 and 131 on
    0.18.5; with the wait none of 402 on each (docs/gpu.md). Stages 1 to 3 with the optimizer offloaded to the CPU.
    LOCAL.
    """

    name = "host_read"
    Config = HostReadConfig

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        if facts.stage == 0 or facts.offload_optimizer != "cpu":
            return Choice("not_applicable", f"{facts.describe()} has no gradients in host memory")
        if facts.resolves_data_dependency:
            return Choice(
                "not_needed",
                f"accelerator '{facts.accelerator}' resolves data dependencies: copies land before Python goes on",
            )
        events = "DeepSpeed's own events" if facts.own_copy_events else "events recorded at each copy"
        return Choice(
            "selected",
            f"{facts.describe()} on '{facts.accelerator}': gradients are copied to host memory behind Python's back; "
            f"reads wait for {events}",
        )

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {ev.HostRead: self._read, ev.StepBegin: self._step_begin, ev.StepEnd: self._step_end}

    def _read(self, event: ev.HostRead) -> Iterable[Outcome]:
        self.checks += 1
        yield Request(Action.WAIT_COPIES, (event.tensors, self.config.wait))

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Outcome]:
        # The optimizer is a host reader too: before 0.19.8 nothing makes it wait.
        if not self.engine.facts.own_copy_events:
            yield Request(Action.WAIT_COPIES, ((), self.config.wait))

    def _step_end(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        return ()
