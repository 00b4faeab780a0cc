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
    detect: bool = False
    """For a test run: find every read by the host of page-locked memory that the device is still filling, of
    DeepSpeed's buffers or of your own (``tensor.to("cpu", non_blocking=True)``), and report the line that read and the
    line that copied. Every operation of PyTorch passes through Python meanwhile."""


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
        if not config.detect and (facts.stage == 0 or facts.offload_optimizer != "cpu"):
            return Choice("not_applicable", f"{facts.describe()} has no gradients in host memory")
        if facts.resolves_data_dependency:
            return Choice(
                "not_needed",
                f"accelerator '{facts.accelerator}' resolves data dependencies: copies land before Python goes on",
            )
        if config.detect and (facts.stage == 0 or facts.offload_optimizer != "cpu"):
            return Choice("selected", "detect: every read of host memory that a copy is still filling is found")
        events = "DeepSpeed's own events" if facts.own_copy_events else "events recorded at each copy"
        return Choice(
            "selected",
            f"{facts.describe()} on '{facts.accelerator}': gradients are copied to host memory behind Python's back; "
            f"reads wait for {events}",
        )

    def handlers(self) -> dict[type[ev.Event], Any]:
        wanted: dict[type[ev.Event], Any] = {
            ev.HostRead: self._read,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step_end,
        }
        return wanted | ({ev.ReadInFlight: self._in_flight} if self.config.detect else {})

    def _in_flight(self, event: ev.ReadInFlight) -> Iterable[Outcome]:
        self.checks += 1
        yield self.finding(
            "read_in_flight",
            "error",
            expected="a wait between a copy to the host and the first read of what it fills",
            seen=f"{event.size} bytes were still on their way when they were read, at {event.reader}",
            effect="the read gives an old value, or part old and part new; this one was made to wait",
            cause=f"the copy was started with non_blocking=True, at {event.copier}, and nobody waited for it",
            remedy="call session.host_read(tensor), or wait for an event recorded behind the copy, before the read",
        )

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
