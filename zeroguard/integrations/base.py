"""What every integration shares: one session at a time, and counters that outlive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeroguard.attach import engine_of, guard
from zeroguard.config import GuardConfig
from zeroguard.errors import ConfigError, EngineNotFoundError
from zeroguard.report.gradients import Per, at_least_one, known_per
from zeroguard.session import Session
from zeroguard.settings import known, resolve

__all__ = ["Keeper"]

#: Of the exported state; an unknown one is refused, an older one read.
STATE_VERSION = 1
_COUNTS = ("events", "checks", "repairs", "findings", "seconds")


class Keeper:
    """Holds the session of a trainer's callback. A trainer may build several engines, one after the other (fit, then
    test); the counters go on over all of them, and over a resume.

    The configuration is checked when the callback is made, not hours later when the engine exists.

    Args:
        config: as for :func:`zeroguard.guard`.
        sinks: as for :func:`zeroguard.guard`.
        grad_norm: whether :meth:`metrics` holds ``zeroguard/grad_norm``.
        grad_norms: ``total``, ``parameter`` or ``module``: :meth:`metrics` holds the norms that
            :meth:`zeroguard.Session.watch_norms` reads before steps, as ``zeroguard/grad_norm/<name>``.
        grad_norms_every_n_steps: before each n-th step; left out, whenever :attr:`writes` says so.
        overrides: fields of :class:`zeroguard.GuardConfig`.

    Raises:
        ConfigError: the configuration is wrong.

    Attributes:
        writes: set before :meth:`open`: whether the trainer is going to log the step that comes, the same on every
            rank. Without it, every step is one to read norms at.
    """

    writes: Callable[[], bool] | None = None

    def __init__(
        self,
        config: GuardConfig | dict[str, Any] | str | Path | None = None,
        *,
        sinks: Sequence[object] = (),
        grad_norm: bool = False,
        grad_norms: Per | None = None,
        grad_norms_every_n_steps: int | None = None,
        **overrides: Any,
    ) -> None:
        resolve(config, **known(overrides))
        self.config = config
        self.overrides = overrides
        self.sinks = tuple(sinks)
        self.grad_norm = grad_norm
        if grad_norms is not None:
            known_per(grad_norms)
        self.grad_norms = grad_norms
        if grad_norms_every_n_steps is not None:
            at_least_one(grad_norms_every_n_steps)
            if grad_norms is None:
                raise ConfigError("grad_norms_every_n_steps says when, but not what: give grad_norms='total', too")
        self.grad_norms_every = grad_norms_every_n_steps
        self.session: Session | None = None
        self._engine: Any = None
        self._counted: Session | None = None  # closed, and part of _earlier
        self._earlier: dict[str, dict[str, float]] = {}
        self._given: dict[str, float] = {}  # the norms that new_norms() gave last

    def open(self, candidate: Any) -> Session:
        """LOCAL, on every rank. Guard the engine that ``candidate`` is or leads to.

        On the engine that is guarded already this does nothing; a session on another engine is closed first.

        Raises:
            EngineNotFoundError: there is none; the message says what was looked at.
        """
        engine = engine_of(candidate)
        if self.session is not None and not self.session.closed and self._engine is engine:
            return self.session
        self.close()
        self.session = guard(engine, self.config, sinks=self.sinks, **self.overrides)
        self._engine = engine
        if self.grad_norms is not None:
            self.session.watch_norms(self.grad_norms, when=self._due)
        return self.session

    def _due(self, step: int) -> bool:
        """``step`` steps are complete."""
        if self.grad_norms_every is not None:
            return (step + 1) % self.grad_norms_every == 0
        return self.writes is None or self.writes()

    def try_open(self, candidate: Any) -> Session | None:
        """As :meth:`open`, but None where there is no engine."""
        try:
            return self.open(candidate)
        except EngineNotFoundError:
            return None

    def close(self, *, failed: bool = False, error: BaseException | None = None) -> None:
        """LOCAL, idempotent. Give the engine back; with ``failed`` nothing is waited for but what
        :meth:`zeroguard.Session.on_exception` says of ``error``, the exception that ended the loop, where it is known.

        The session stays readable (``findings``, ``summary()``).
        """
        session, self._engine = self.session, None
        if session is None or session.closed:
            return
        try:
            if error is not None:
                session.on_exception(error)
        finally:  # it waits for the store, and may be interrupted there
            session.close(failed=failed)
        self._earlier = self._totals()
        self._counted = session

    def _totals(self) -> dict[str, dict[str, float]]:
        """Guard -> counters, of all sessions so far."""
        totals = {name: dict(counts) for name, counts in self._earlier.items()}
        if self.session is not None and self.session is not self._counted:
            for name, counts in self.session.counters().items():
                mine = totals.setdefault(name, dict.fromkeys(_COUNTS, 0))
                for key in _COUNTS:
                    mine[key] = mine.get(key, 0) + counts[key]
        return totals

    def metrics(self) -> dict[str, float]:
        """LOCAL. What a trainer's logger gets: :meth:`counts` and :meth:`norms`."""
        return {**self.counts(), **self.norms()}

    def counts(self) -> dict[str, float]:
        """LOCAL. Over all sessions and resumes of this rank.

        ``zeroguard/findings`` and ``zeroguard/repairs`` are counts, ``zeroguard/host_wait_ms`` milliseconds spent
        waiting for offloaded gradients, ``zeroguard/grad_norm`` the last step's norm over all gradients before clipping
        (only when asked for, and only where DeepSpeed computed one).
        """
        totals = self._totals()
        out = {
            "zeroguard/findings": float(sum(counts["findings"] for counts in totals.values())),
            "zeroguard/repairs": float(sum(counts["repairs"] for counts in totals.values())),
            "zeroguard/host_wait_ms": 1e3 * totals.get("host_read", {}).get("seconds", 0.0),
        }
        if self.grad_norm and self.session is not None and not self.session.closed:
            norm = self.session.grad_norm()
            if norm is not None:
                out["zeroguard/grad_norm"] = norm
        return out

    def norms(self) -> dict[str, float]:
        """LOCAL. The newest norms by ``grad_norms``, ``zeroguard/grad_norm/<name>``: ``total``, or a parameter's or
        module's name, ``(root)`` for the model itself. Empty where none could be read."""
        if self.grad_norms is None or self.session is None:
            return {}
        last = self.session.last_grad_norms
        return {f"zeroguard/grad_norm/{name or '(root)'}": norm for name, norm in last.items()}

    def new_norms(self) -> dict[str, float]:
        """LOCAL. :meth:`norms`, but those of one step only once."""
        last = {} if self.session is None else self.session.last_grad_norms
        if last is self._given:
            return {}
        self._given = last
        return self.norms()

    def state_dict(self) -> dict[str, Any]:
        """LOCAL. The counters, JSON-able; ``{}`` before the first session."""
        totals = self._totals()
        return {"version": STATE_VERSION, "guards": totals} if totals else {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """LOCAL. Go on counting from ``state``; what this run has counted so far is added. Nothing, or the state of a
        run without zeroguard, is no error; keys that this version does not know are kept out."""
        for name, counts in ((state or {}).get("guards") or {}).items():
            mine = self._earlier.setdefault(name, dict.fromkeys(_COUNTS, 0))
            for key in _COUNTS:
                mine[key] = mine.get(key, 0) + counts.get(key, 0)

    def summary(self) -> str:
        """The summary of the last session, and the totals where there was more than one session or a resume."""
        if self.session is None:
            return "zeroguard: no DeepSpeed engine was guarded."
        text = str(self.session.summary())
        totals, last = self._totals(), self.session.counters()
        if any(counts["events"] != last.get(name, {}).get("events", 0) for name, counts in totals.items()):
            findings = int(sum(counts["findings"] for counts in totals.values()))
            repairs = int(sum(counts["repairs"] for counts in totals.values()))
            text += f"\n\nWith earlier engines and the runs before a resume: {repairs} repairs, {findings} findings."
        return text
