"""Callbacks for loops, and home-made trainers, that keep a list of callbacks themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from zeroguard import events as ev
from zeroguard.attach import announce, guard
from zeroguard.backends.base import Evidence
from zeroguard.config import GuardConfig
from zeroguard.errors import SessionClosedError
from zeroguard.findings import Finding
from zeroguard.guards.base import Guard, GuardModel
from zeroguard.session import Session

__all__ = ["LoopCallback"]


class _CallOrderConfig(GuardModel):
    """No options."""


class _CallOrder(Guard):
    """Whether the loop's calls tell the whole story. Not chosen by a configuration: LoopCallback brings it.

    ``open`` are the calls that wait for their counterpart, innermost last.
    """

    name = "call_order"
    Config = _CallOrderConfig

    #: call -> its counterpart
    ENDS = {
        "on_step_begin": "on_step_end",
        "on_before_backward": "on_after_backward",
        "on_eval_begin": "on_eval_end",
    }
    BEGINS = {end: begin for begin, end in ENDS.items()}

    def __init__(self, engine: Any) -> None:
        super().__init__(_CallOrderConfig(), engine)
        self.open: list[str] = []
        self.announced = False  # the step that comes next, or is just over

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {ev.StepEnd: self._step_end}

    def _step_end(self, event: ev.StepEnd) -> Iterable[Finding]:
        self.step = event.step
        return ()

    def called(self, name: str, evidence: Evidence) -> list[Finding]:
        """The loop calls ``name``. Returns what is wrong with that."""
        self.checks += 1
        out: list[Finding] = []
        if evidence.gradients:
            seen = f"{evidence.gradients} parameter gradients arrived before {name} with no backward announced"
            out.append(self._missing("on_before_backward", seen))
        if evidence.steps and not self.announced:
            out.append(self._missing("on_before_optimizer_step", f"DeepSpeed stepped before {name}"))
        if name in self.ENDS:
            out += self._begins(name)
        elif name in self.BEGINS:
            out += self._ends(name)
        elif name == "on_before_optimizer_step":
            out += self._inside_step(name)
            if "on_before_backward" in self.open:
                out.append(self._missing("on_after_backward", f"{name} comes first"))
                self.open.remove("on_before_backward")
        if name == "on_before_optimizer_step":
            self.announced = True
        elif name in ("on_step_begin", "on_step_end"):
            self.announced = False
        return out

    def _begins(self, name: str) -> list[Finding]:
        out: list[Finding] = []
        if name in self.open:
            out.append(self._missing(self.ENDS[name], f"{name} is called again before it"))
            del self.open[self.open.index(name) :]
        if name == "on_before_backward":
            out += self._inside_step(name)
        self.open.append(name)
        return out

    def _ends(self, name: str) -> list[Finding]:
        begin = self.BEGINS[name]
        if begin not in self.open:
            return [self._missing(begin, f"{name} is called without it")]
        start = self.open.index(begin)
        inner = self.open[start + 1 :]
        del self.open[start:]
        return [self._missing(self.ENDS[other], f"{name} comes first") for other in inner]

    def _inside_step(self, name: str) -> list[Finding]:
        if "on_step_begin" in self.open:
            return []
        self.open.append("on_step_begin")
        return [self._missing("on_step_begin", f"{name} is called outside a step")]

    def forget(self) -> None:
        """After an exception nothing is open any more."""
        self.open.clear()
        self.announced = False

    def _missing(self, name: str, seen: str) -> Finding:
        return self.finding(
            "missing_call",
            "error",
            subject=(),
            expected=f"LoopCallback.{name} has been called",
            seen=seen,
            effect="with wrap=False the guards see only what the loop announces: here they could not act in time",
            cause=f"the loop does not call {name}, or calls it at another place",
            remedy=f"call {name} where its docstring says, or leave wrap=True, where no call is needed",
        )


class LoopCallback:
    """One engine's guards, as the callbacks that a loop calls.

    By default the engine is also wrapped, as by :func:`zeroguard.guard`: then the calls may be left out, one and all.
    With ``wrap=False`` nothing of DeepSpeed is replaced; these calls alone drive the guards, and one that is missing or
    out of order is a finding of the guard ``call_order``. (What a call cannot say, which parameters a backward reaches,
    is seen by PyTorch's hooks on the module and its parameters.) A step is::

        on_step_begin()
        out = engine(batch)                      # one micro-batch or several, one backward or several
        on_before_backward(); engine.backward(loss); on_after_backward()
        on_before_optimizer_step(); engine.step(); on_step_end()

    Not driven with ``wrap=False``, as no call announces them: checks before a checkpoint, transparent waits of
    ``host_read`` (call :meth:`on_before_host_read`), and of ``accumulation`` what concerns a
    trainer, clips, and the order of gradients on several ranks.

    Args:
        engine, config, sinks: as for :func:`zeroguard.guard`.
        wrap: whether the engine is wrapped.
        overrides: fields of :class:`zeroguard.GuardConfig`.

    Attributes:
        session: the :class:`zeroguard.Session`.

    Raises:
        As :func:`zeroguard.guard`; and GuardUnavailableError where ``wrap=False`` cannot do on this DeepSpeed release.
    """

    def __init__(
        self,
        engine: Any,
        config: GuardConfig | dict[str, Any] | str | Path | None = None,
        *,
        wrap: bool = True,
        sinks: Sequence[object] = (),
        **overrides: Any,
    ) -> None:
        self.wrap = wrap
        self._failed = False
        self._error: BaseException | None = None
        self._told: Any = None
        self._order: _CallOrder | None = None
        if wrap:
            self.session: Session = guard(engine, config, sinks=sinks, **overrides)
            return
        self.session, self._told = announce(engine, config, sinks=sinks, **overrides)
        self._order = _CallOrder(self._told)
        self.session.watch(self._order)

    # -- a step --------------------------------------------------------------------------------------------------------

    def on_step_begin(self) -> None:
        """LOCAL. Before the first forward of a step, or of each micro-batch if on_step_end ends each."""
        self._failed, self._error = False, None
        self._called("on_step_begin")

    def on_before_backward(self) -> None:
        """LOCAL. Right before each ``engine.backward(loss)`` or ``loss.backward()``."""
        if self._called("on_before_backward"):
            self._told.before_backward()

    def on_after_backward(self) -> None:
        """LOCAL. Right after each backward."""
        if self._called("on_after_backward"):
            self._told.after_backward()

    def on_zero_grad(self) -> None:
        """LOCAL. Right after the loop's own ``zero_grad()`` in the middle of a step. The one call whose absence cannot
        be noticed: nothing in DeepSpeed shows it."""
        if self._called("on_zero_grad"):
            self._told.zero_grad_called()

    def on_before_host_read(self, *tensors: Any) -> AbstractContextManager[None]:
        """LOCAL. Before Python reads these offloaded tensors (all offloaded gradients, if none is given); returns once
        they are safe to read. See :meth:`zeroguard.Session.host_read`."""
        self._called("on_before_host_read")
        return self.session.host_read(*tensors)

    def on_before_optimizer_step(self) -> None:
        """LOCAL, but COLLECTIVE with :meth:`zeroguard.Session.watch_norms` and ``wrap=False``. Right before each
        ``engine.step()``, at a boundary or not."""
        if self._called("on_before_optimizer_step"):
            self._told.before_step_call()

    def on_step_end(self) -> None:
        """COLLECTIVE with ``agree``, ``on_violation: raise`` and ``wrap=False``, else LOCAL. After ``engine.step()``.

        Raises:
            GuardViolation: with ``wrap=False``; else ``engine.step()`` has raised it.
        """
        if self._called("on_step_end"):
            self._told.after_step_call()
            self.session.decide()

    # -- beside the step -----------------------------------------------------------------------------------------------

    def on_eval_begin(self) -> None:
        """LOCAL. Before an evaluation."""
        if self._called("on_eval_begin"):
            self._told.mode_changed(False)

    def on_eval_end(self) -> None:
        """LOCAL. After an evaluation, before training goes on."""
        if self._called("on_eval_end"):
            self._told.mode_changed(True)

    def on_exception(self, error: BaseException) -> None:
        """LOCAL. The loop has caught ``error``. Calls nothing collective and waits for nothing; training may go on. If
        :meth:`close` comes next instead, the other ranks are told that this one left with ``error``."""
        self._failed, self._error = True, error
        if self._order is not None and not self.session.closed:
            self._order.forget()
            self._told.raised(error)

    def close(self) -> None:
        """LOCAL, idempotent. Give the engine back; after on_exception nothing is waited for but the job's store
        (:meth:`zeroguard.Session.on_exception`)."""
        try:
            if self._error is not None:
                self.session.on_exception(self._error)
        finally:  # it waits for the store, and may be interrupted there
            self.session.close(failed=self._failed)

    def _called(self, name: str) -> bool:
        """Whether the backend is to be told; a missing call is reported and made up for, so that it does not put the
        guards out of step for good."""
        if self.session.closed:
            raise SessionClosedError(f"LoopCallback.{name}() after close(); make a new LoopCallback")
        if self._order is None:
            return False
        evidence = self._told.evidence()
        for finding in self._order.called(name, evidence):
            self.session.record(finding)
        self._told.make_up(name, evidence)
        return True

    def __enter__(self) -> LoopCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.on_exception(error)
        self.close()

    def __repr__(self) -> str:
        return f"<zeroguard.LoopCallback wrap={self.wrap}, {self.session!r}>"
