"""What a session tells of gradients: norms in total, by parameter or by module, and whole gradients; on call, or norms
before each step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, overload

from zeroguard.backends.base import Engine
from zeroguard.errors import ConfigError, GradientsUnavailableError, SessionClosedError

__all__ = ["GradientReads", "NormWatch", "Per", "at_least_one", "grouped", "known_per"]

Per = Literal["total", "parameter", "module"]


def known_per(per: str) -> str:
    """``per`` itself.

    Raises:
        ConfigError: it is none of ``total``, ``parameter`` and ``module``.
    """
    if per not in get_args(Per):
        raise ConfigError(f"per={per!r}: gradient norms are given per {', '.join(map(repr, get_args(Per)))}")
    return per


def at_least_one(every: int) -> int:
    """``every`` itself.

    Raises:
        ConfigError: it is below 1.
    """
    if every < 1:
        raise ConfigError(f"every_n_steps={every!r}: 1 or more")
    return every


def grouped(norms: dict[str, float], per: str) -> dict[str, float]:
    """Norms by parameter as norms ``per``: the root of the sum of squares over the parameters that a module holds
    itself (not those of its children; the root module's name is empty), or over all, under the name ``total``."""
    if per == "parameter":
        return norms
    out: dict[str, float] = {}
    for name, norm in norms.items():
        key = name.rpartition(".")[0] if per == "module" else "total"
        out[key] = math.hypot(out.get(key, 0.0), norm)
    return out


class NormWatch:
    """Norms that are read before a step, and kept for a logger.

    Attributes:
        per: what :func:`grouped` is asked for; empty where nothing is watched.
        due: whether to read before the step that is given by its number, from 0.
        last: the newest norms, a new dict each time; empty where none could be read.
    """

    def __init__(self, per: str = "", due: Callable[[int], bool] = lambda step: True) -> None:
        self.per = per and known_per(per)
        self.due = due
        self.last: dict[str, float] = {}
        self._told = False

    def look(self, step: int, read: Callable[[], dict[str, float]]) -> None:
        """As COLLECTIVE as ``read``, which is called on every rank or on none. ``step`` counts completed steps."""
        if not self.per or not self.due(step):
            return
        try:
            self.last = dict(grouped(read(), self.per))
        except GradientsUnavailableError as error:
            self.last = {}
            if not self._told:
                self._told = True
                warnings.warn(f"watch_norms: no gradient norms before step {step}: {error}", stacklevel=2)


class GradientReads:
    """The part of :class:`zeroguard.Session` that reads gradients."""

    closed: bool
    _backend: Engine
    _norms = NormWatch()

    @overload
    def grad_norms(self, per: Literal["total"] = "total") -> float: ...
    @overload
    def grad_norms(self, per: Literal["parameter", "module"]) -> dict[str, float]: ...
    def grad_norms(self, per: Per = "total") -> float | dict[str, float]:
        """COLLECTIVE, between a boundary backward and its step. 2-norms of the gradients that the step will consume,
        the same on every rank: averaged over the ranks, without the loss scale, before clipping.

        ``total`` gives one number; ``parameter`` name -> norm; ``module`` name -> norm over the parameters that a
        module holds itself. One all-reduce. What no backward of this window reached is left out. Stages 0 to 3.

        Raises:
            GradientsUnavailableError: on every rank: there is no gradient to read; the message says why.
            SessionClosedError: after close.
            ConfigError: another ``per``.
        """
        self._must_be_open("grad_norms")
        known_per(per)
        norms = grouped(self._backend.grad_norms(), per)
        return norms["total"] if per == "total" else norms

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """COLLECTIVE, between a boundary backward and its step, with the same ``names`` on every rank. The gradients
        that :meth:`grad_norms` measures: name -> fp32 tensor in the parameter's shape, on the accelerator, yours to
        keep and to change.

        All that the optimizer steps, or those named. What no backward of this window reached is left out, as PyTorch
        has None there. One collective for 64 MiB, whose tensors share memory. Stages 0 to 3.

        Raises:
            GradientsUnavailableError: on every rank: there is no gradient to read; the message says why.
            SessionClosedError: after close.
            ConfigError: a name that the model does not have; the message names the nearest.
        """
        self._must_be_open("gradients")
        return self._backend.gradients(names)

    def watch_norms(
        self, per: Per | None = "total", *, every_n_steps: int = 1, when: Callable[[int], bool] | None = None
    ) -> None:
        """LOCAL, with the same arguments on every rank. Read :meth:`grad_norms` right before each step, or each n-th,
        for :attr:`last_grad_norms`; None ends it. From now on the step is COLLECTIVE for one more all-reduce.

        ``when`` instead of ``every_n_steps``: called with the number of completed steps before each step, and has to
        say the same on every rank.

        Where nothing can be read, :attr:`last_grad_norms` is empty, and the first time a warning says why.

        Raises:
            SessionClosedError: after close.
            ConfigError: another ``per``, or ``every_n_steps`` below 1.
        """
        self._must_be_open("watch_norms")
        every = at_least_one(every_n_steps)
        self._norms = NormWatch(per or "", when or (lambda step: step % every == 0))

    @property
    def last_grad_norms(self) -> dict[str, float]:
        """What :meth:`watch_norms` read last, by name (``total`` for the one number)."""
        return self._norms.last

    def before_step(self) -> None:
        """COLLECTIVE with :meth:`watch_norms`, else LOCAL. Called by the backend while gradients wait for the step."""
        if not self.closed:
            self._norms.look(self._backend.steps, self._backend.grad_norms)

    def _must_be_open(self, call: str) -> None:
        if self.closed:
            raise SessionClosedError(f"session.{call}() after close: call it while the session is open")
