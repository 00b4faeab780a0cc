"""Lightning's Trainer and Fabric, from both packages, ``lightning`` and ``pytorch_lightning``.

::

    from zeroguard.integrations.lightning import ZeroGuardCallback

    Trainer(strategy="deepspeed_stage_2_offload", callbacks=[ZeroGuardCallback()])

Importing this module imports one of the packages, unless one is there already.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import sys
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zeroguard import events as ev
from zeroguard.config import GuardConfig
from zeroguard.errors import EngineNotFoundError, GuardUnavailableError
from zeroguard.integrations.base import Keeper
from zeroguard.report.gradients import Per
from zeroguard.session import Session

__all__ = ["ZeroGuardCallback"]

logger = logging.getLogger("zeroguard")

#: Trainer and Fabric of either package.
_FAMILIES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
_PACKAGES = tuple(name for family in _FAMILIES for name in family)
_NORM = "zeroguard/grad_norm"
_FINDINGS = "zeroguard/findings"


def _bases() -> tuple[type, ...]:
    """The Callback classes that a Trainer of this process may ask for.

    The two packages hold the same code and have no class in common. Those that are imported already are taken, both if
    both are; else the first that is installed: importing the other one too would cost seconds for nothing.
    """
    installed = [
        (trainer, fabric) for trainer, fabric in _FAMILIES if importlib.util.find_spec(trainer.partition(".")[0])
    ]
    names = [trainer for trainer, _ in installed if trainer in sys.modules]
    names = names or [trainer for trainer, fabric in installed if fabric in sys.modules]
    names = names or [trainer for trainer, _ in installed[:1]]
    if not names and importlib.util.find_spec("lightning_fabric") is None:
        raise ImportError(
            "zeroguard.integrations.lightning needs Lightning, and neither lightning nor pytorch_lightning is "
            'installed: pip install "zeroguard[lightning]", or pip install pytorch_lightning'
        )
    return tuple(importlib.import_module(name).Callback for name in names)


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = type("_Callback", _bases(), {"__module__": __name__})


class ZeroGuardCallback(_Callback):
    """Guards the DeepSpeed engine of a Trainer, or those of a Fabric.

    A session lasts from ``on_fit_start`` to ``on_train_end``, and ends at an exception. Where the strategy is not
    DeepSpeed's it says so once, as a warning, and does nothing.

    Hooks take what Lightning gives them and anything else: a Fabric loop sends the same names with arguments of its
    own.

    Args:
        config: as for :func:`zeroguard.guard`: a mapping, a path to a YAML, JSON or TOML file, a
            :class:`zeroguard.GuardConfig`, or nothing to have the guards that apply chosen.
        sinks: as for :func:`zeroguard.guard`.
        grad_norm: whether ``zeroguard/grad_norm`` is logged, the norm over all gradients before clipping. Reading it
            waits for the device, at the steps at which the trainer logs.
        grad_norms: ``total``, ``parameter`` or ``module``: the norms of :meth:`zeroguard.Session.watch_norms` are
            logged as ``zeroguard/grad_norm/<name>``, once a step. A step with them is COLLECTIVE for one more
            all-reduce.
        grad_norms_every_n_steps: at each n-th step; left out, at those at which the trainer logs (in Fabric, each).
        progress_bar: whether the progress bar shows the number of findings.
        summary: whether rank 0 logs a summary at the end of fit.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(
        self,
        config: GuardConfig | dict[str, Any] | str | Path | None = None,
        *,
        sinks: Sequence[Any] = (),
        grad_norm: bool = False,
        grad_norms: Per | None = None,
        grad_norms_every_n_steps: int | None = None,
        progress_bar: bool = True,
        summary: bool = True,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"config": config, "sinks": sinks, "grad_norm": grad_norm}
        self._options.update(grad_norms=grad_norms, grad_norms_every_n_steps=grad_norms_every_n_steps)
        self._progress_bar = progress_bar
        self._summary = summary
        #: one; a Fabric with several engines has one for each
        self._keepers = [self._keeper()]
        self._stage = ""  # Lightning's name of what the trainer runs; empty without a trainer
        self._shown = -1.0  # the number of findings that was logged last
        self._told = False
        self._log = logger

    def _keeper(self) -> Keeper:
        return Keeper(**self._options)

    # -- what a user calls -------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The session that was opened last, readable after its end. None before the first one."""
        return self._keepers[-1].session

    @property
    def sessions(self) -> tuple[Session, ...]:
        """One for each engine of a Fabric. A Trainer has one engine at a time."""
        return tuple(keeper.session for keeper in self._keepers if keeper.session is not None)

    def metrics(self) -> dict[str, float]:
        """LOCAL. What is logged in fit, for loops that log by themselves: ``fabric.log_dict(callback.metrics())``.
        Counts are sums over all engines; a norm is that of the engine that came last."""
        out: dict[str, float] = {}
        for keeper in self._keepers:
            for name, value in keeper.metrics().items():
                out[name] = value if name.startswith(_NORM) else out.get(name, 0.0) + value
        return out

    def summary(self) -> str:
        """The summary of each engine, as it stands."""
        return "\n\n".join(keeper.summary() for keeper in self._keepers)

    def close(self, *, failed: bool = False, error: BaseException | None = None) -> None:
        """LOCAL, idempotent. Give the engines back; with ``failed`` nothing is waited for but the job's store, if
        ``error`` is the exception that ended the loop. Fabric has no event for the end of a loop; without this call the
        sessions end with the process."""
        running = [session for session in self.sessions if not session.closed]
        for keeper in self._keepers:
            keeper.close(failed=failed, error=error)
        if running and self._summary and self._stage in ("", "fit") and running[0].summary().facts.rank == 0:
            self._log.info("%s", self.summary())

    # -- a session's course ------------------------------------------------------------------------------------------

    def setup(self, trainer: Any = None, pl_module: Any = None, stage: str = "", **_: Any) -> None:
        """Comes before the engine exists."""
        self._stage = stage
        self._shown = -1.0
        self._log = _visible_logger(trainer)

    def on_fit_start(self, trainer: Any = None, *_: Any, **__: Any) -> None:
        """The first hook that sees the engine."""
        if _is_trainer(trainer):
            found = weakref.ref(trainer)  # the session outlives it
            self._keepers[0].writes = lambda: _writes_step(found())
            self._open(self._keepers[0], trainer, trainer)

    def on_validation_start(self, trainer: Any = None, *_: Any, **__: Any) -> None:
        """Within fit it is fit's engine. Any other evaluation has an engine of its own, without an optimizer."""
        if not _is_trainer(trainer) or self._stage == "fit":
            return
        try:
            self._open(self._keepers[0], trainer, trainer)
        except GuardUnavailableError as error:
            logger.info("zeroguard: trainer.%s runs unguarded: %s", self._stage, error)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Any = None, *_: Any, **__: Any) -> None:
        """Within fit the trainer now puts the module back into training, without a call that the backend could see.
        The session of any other evaluation is over."""
        if not _is_trainer(trainer):
            return
        if self._stage != "fit":
            self.close()
        elif self.session is not None:
            self.session.emit(ev.ModeChange(True))

    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self, trainer: Any = None, *_: Any, **__: Any) -> None:
        """The last hook before the trainer moves the module off the device."""
        self.close()

    def teardown(self, trainer: Any = None, *_: Any, **__: Any) -> None:
        """Where a run ends that had nothing to do: ``max_epochs=0``, or no batches."""
        self.close()

    def on_exception(self, trainer: Any = None, *given: Any, **named: Any) -> None:
        """Also after Ctrl+C. No ``teardown`` follows it."""
        error = next((one for one in (*given, *named.values()) if isinstance(one, BaseException)), None)
        try:
            self.close(failed=True, error=error)
        except Exception:  # raised from here, it would hide the exception that ended the run
            logger.exception("zeroguard: giving the engine back failed, after an exception in the run")

    def on_after_setup(self, fabric: Any = None, module: Any = None, **_: Any) -> None:
        """Fabric has set up one more module."""
        self._stage = ""
        self._log = _visible_logger(fabric)
        idle = [k for k in self._keepers if k.session is None or k.session.closed]
        keeper = idle[0] if idle else self._keeper()
        keeper.writes = None
        if self._open(keeper, module, fabric) is None:
            return
        if not idle:
            self._keepers.append(keeper)
        callback = weakref.ref(self)
        atexit.register(lambda: _close_at_exit(callback))

    def _open(self, keeper: Keeper, candidate: Any, owner: Any) -> Session | None:
        try:
            return keeper.open(candidate)
        except EngineNotFoundError:
            if not self._told:
                self._told = True
                self._no_engine(owner)
            return None

    def _no_engine(self, owner: Any) -> None:
        """Called once."""
        if getattr(owner, "is_global_zero", True):
            strategy = getattr(owner, "strategy", None)
            model = getattr(strategy, "model", None)
            warnings.warn(
                "ZeroGuardCallback guards nothing here: it looked for a DeepSpeed engine, and "
                f"{type(strategy).__name__} has {'no model' if model is None else 'a ' + type(model).__name__}. Choose "
                "one of DeepSpeed's strategies, such as strategy='deepspeed_stage_2', or take the callback out.",
                stacklevel=2,
            )

    # -- what is said and logged during fit --------------------------------------------------------------------------

    def on_before_backward(self, trainer: Any = None, pl_module: Any = None, *_: Any, **__: Any) -> None:
        """In automatic optimization Lightning has just divided the loss; in manual optimization it never does."""
        session = self._keepers[0].session
        if session is None or not _is_trainer(trainer) or not pl_module.automatic_optimization:
            return
        if trainer.accumulate_grad_batches > 1:
            session.emit(ev.LossDivided("Lightning", trainer.accumulate_grad_batches))

    def on_train_epoch_end(self, trainer: Any = None, *_: Any, **__: Any) -> None:
        """A window of micro-batches that the epoch cut short goes on in the next one."""
        session = self._keepers[0].session
        if session is not None and _is_trainer(trainer):
            session.emit(ev.EpochEnd())

    def on_train_batch_end(self, trainer: Any = None, pl_module: Any = None, *_: Any, **__: Any) -> None:
        """Log when the trainer is about to write, so that what it writes is fresh, and whenever there is a finding
        more, for the progress bar."""
        session = self._keepers[0].session
        if session is None or not _is_trainer(trainer) or trainer.barebones:
            return
        self._log_norms(trainer)
        found = sum(counts["findings"] for counts in session.counters().values())
        if found == self._shown and not _about_to_write(trainer):
            return
        self._shown = found
        for name, value in self._keepers[0].counts().items():
            # A tensor: a number would be copied to the device, and waited for. batch_size: else it is looked for in
            # the batch. No reduction over ranks: what is logged is rank 0's.
            pl_module.log(
                name,
                torch.tensor(value),
                prog_bar=self._progress_bar and name == _FINDINGS,
                on_step=True,
                on_epoch=False,
                batch_size=1,
            )

    def _log_norms(self, trainer: Any) -> None:
        """Straight to the loggers: what a module logs once stands in every later row of the epoch, also where no
        optimizer stepped, and under names of parameters that have no gradient any more."""
        norms = self._keepers[0].new_norms()
        for logger_ in trainer.loggers if norms else ():
            logger_.log_metrics(norms, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The same in both packages, so that a checkpoint can move between them."""
        return "ZeroGuardCallback"

    def state_dict(self) -> dict[str, Any]:
        """LOCAL. The counters, JSON-able; ``{}`` before the first session."""
        return self._keepers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """LOCAL. Go on counting from a checkpoint. In fit only: ``trainer.test(ckpt_path="best")`` also restores
        callbacks, and would turn the counters back."""
        if self._stage in ("", "fit"):
            # What this callback counted earlier is part of the checkpoint, or belongs to another run.
            self._keepers[0]._earlier.clear()
            self._keepers[0].load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the counters and no session; nor Lightning's ``log``, which leads to the whole module."""
        state = {name: value for name, value in vars(self).items() if name not in ("_keepers", "log", "log_dict")}
        return {**state, "_counters": self._keepers[0].state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "_counters"})
        self._keepers = [self._keeper()]
        self._keepers[0].load_state_dict(state["_counters"])


def _ignore(self: Any, *_: Any, **__: Any) -> None:
    """A hook that has nothing to do here."""


def _ignore_all_other_hooks(cls: type) -> None:
    """Lightning's own empty hooks refuse the arguments of a Fabric loop."""
    for name in dir(cls):
        if name.startswith("on_") and name not in vars(cls):
            setattr(cls, name, _ignore)


_ignore_all_other_hooks(ZeroGuardCallback)


def _is_trainer(candidate: Any) -> bool:
    return hasattr(candidate, "strategy") and hasattr(candidate, "accumulate_grad_batches")


def _about_to_write(trainer: Any) -> bool:
    """Whether the trainer's loggers get this batch's metrics. Asked of the connector that decides it, as Lightning's
    own monitors do: a count by ``log_every_n_steps`` is off by the batches in which a manual loop does not step."""
    connector = getattr(trainer, "_logger_connector", None)
    return bool(getattr(connector, "should_update_logs", True) or trainer.fast_dev_run)


def _writes_step(trainer: Any) -> bool:
    """As :func:`_about_to_write`, but the same on every rank, which ``trainer.should_stop`` need not be."""
    every = trainer.log_every_n_steps
    steps = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
    return bool(trainer.fast_dev_run or (every and steps % every == 0))


def _visible_logger(owner: Any) -> logging.Logger:
    """A child of Lightning's own logger, which shows INFO without any configuration; zeroguard's does not."""
    for cls in type(owner).__mro__:
        for package in _PACKAGES:
            if cls.__module__.startswith(f"{package}."):
                return logging.getLogger(f"{package}.zeroguard")
    return logger


def _close_at_exit(callback: weakref.ref[ZeroGuardCallback]) -> None:
    found = callback()
    if found is not None:
        found.close(failed=True)
