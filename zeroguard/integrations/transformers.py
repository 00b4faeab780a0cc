"""Hugging Face's Trainer: a callback that guards the engine of each ``trainer.train()``.

::

    with ZeroGuardTrainerCallback(on_violation="warn").attach(trainer) as guarded:
        trainer.train()
    print(guarded.summary())

Accelerate without the Trainer needs no callback: ``with zeroguard.guard(accelerator): ...``.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel
from transformers.trainer_callback import ExportableState, TrainerCallback

from zeroguard import events as ev
from zeroguard.attach import engine_of
from zeroguard.config import GuardConfig
from zeroguard.errors import AlreadyGuardedError, ConfigError, EngineNotFoundError
from zeroguard.integrations.base import Keeper
from zeroguard.integrations.trainer_steps import BatchBegin, BatchEnd, TrainerSteps
from zeroguard.report.gradients import Per
from zeroguard.session import Session

__all__ = ["ZeroGuardTrainerCallback"]

logger = logging.getLogger("zeroguard")

#: Where a Trainer keeps the Keeper of its callback, which a resume replaces by one that it makes from the checkpoint.
_MARK = "_zeroguard_keeper"
_FALSE = ("", "0", "false", "no", "off", "f", "n")


class _Keeper(Keeper):
    """Knows whose session it holds: one callback may serve several Trainers, one after the other."""

    owner: weakref.ref[Any] | None = None


class ZeroGuardTrainerCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Guards the DeepSpeed engine of a ``transformers.Trainer`` from the start of each ``train()`` to its end.

    Give it to ``Trainer(callbacks=[...])`` or call :meth:`attach`. The Trainer calls nothing when training raises:
    only ``with callback.attach(trainer): trainer.train()`` gives the engine back at once then. Otherwise that happens
    at the next ``train()``, with the end of the Trainer, or at exit.

    The guards act inside ``engine.backward`` and before ``engine.optimizer.step``, where no callback of the Trainer is
    called: all of them come after the step.

    Args:
        config: as for :func:`zeroguard.guard`.
        sinks: as for :func:`zeroguard.guard`. They are not part of the exported state.
        grad_norm: whether ``zeroguard/grad_norm`` is logged, the norm over all gradients before clipping.
        grad_norms: ``total``, ``parameter`` or ``module``: the norms of :meth:`zeroguard.Session.watch_norms` are
            logged as ``zeroguard/grad_norm/<name>``, once a step. A step with them is COLLECTIVE for one more
            all-reduce.
        grad_norms_every_n_steps: at each n-th step, if need be in a row of their own; left out, at those at which the
            Trainer logs.
        missing: what happens when a training starts without a DeepSpeed engine: ``warn`` through the logger
            ``zeroguard`` (level ERROR) and ``warnings``, or ``raise`` an EngineNotFoundError.
        overrides: fields of :class:`zeroguard.GuardConfig`.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(
        self,
        config: GuardConfig | dict[str, Any] | str | Path | None = None,
        *,
        sinks: Sequence[object] = (),
        grad_norm: bool = False,
        grad_norms: Per | None = None,
        grad_norms_every_n_steps: int | None = None,
        missing: Literal["warn", "raise"] = "warn",
        **overrides: Any,
    ) -> None:
        if missing not in ("warn", "raise"):
            raise ConfigError(f"missing: {missing!r} is not allowed; allowed: 'warn', 'raise'")
        self.missing = missing
        self.keeper = _Keeper(
            config,
            sinks=sinks,
            grad_norm=grad_norm,
            grad_norms=grad_norms,
            grad_norms_every_n_steps=grad_norms_every_n_steps,
            **overrides,
        )
        self._trainer: weakref.ref[Any] | None = None
        self._restored = False

    # -- what a user calls -------------------------------------------------------------------------------------------

    def attach(self, trainer: Any) -> ZeroGuardTrainerCallback:
        """LOCAL, before ``trainer.train()``. Add this callback to a Trainer. Returns the callback, which is a context
        manager: leaving it gives the engine back, also after an exception.

        Raises:
            EngineNotFoundError: ``trainer`` is no Trainer.
            AlreadyGuardedError: the Trainer has another callback of this kind.
        """
        if not hasattr(trainer, "callback_handler") or not hasattr(trainer, "add_callback"):
            raise EngineNotFoundError(
                f"attach() takes a transformers.Trainer, not {type(trainer).__module__}.{type(trainer).__qualname__}. "
                "For an Accelerator or an engine use 'with zeroguard.guard(...)'."
            )
        self._bind(trainer)
        return self

    @property
    def session(self) -> Session | None:
        """The session of the training that runs, or of the last one; None before the first."""
        return self.keeper.session

    def metrics(self) -> dict[str, float]:
        """LOCAL. What is logged; see :meth:`Keeper.metrics`."""
        return self.keeper.metrics()

    def summary(self) -> str:
        """The summary of the last session, and the totals where there was more than one."""
        return self.keeper.summary()

    def close(self, *, failed: bool = False) -> None:
        """LOCAL, idempotent. Give the engine back; ``failed`` after an exception."""
        self.keeper.close(failed=failed)

    def __enter__(self) -> ZeroGuardTrainerCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.keeper.close(failed=kind is not None, error=error)

    # -- what the Trainer calls --------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer exists, its engine does not."""
        self._find(state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The engine exists, with the checkpoint in it where there is one."""
        trainer = self._find(state)
        # Left open by a train() that raised; its engine may be gone.
        self.keeper.close(failed=True)
        # A checkpoint from before this callback has no entry for it, and the Trainer asks for one when it saves.
        if isinstance(state.stateful_callbacks, dict):
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if trainer is not None:
            found = weakref.ref(trainer)  # the session outlives it
            self.keeper.writes = lambda: _logs(found(), 1)
        # Through the accelerator: the Trainer itself keeps an engine that accelerate has destroyed.
        session = None if trainer is None else self.keeper.try_open(trainer.accelerator)
        self.keeper.owner = self._trainer
        if session is None:
            self._not_guarded(trainer, args, state)
            return
        session.watch(TrainerSteps(TrainerSteps.Config(), session._backend))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of a step comes next."""
        self._emit(BatchBegin())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has counted a step."""
        self._emit(BatchEnd())
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None or self.keeper.grad_norms_every is None or _logs(trainer, 0):
            return
        norms = self.keeper.new_norms()
        if norms:
            trainer.log(norms)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Accelerate closes the window with the last batch; where it did not, it goes on in the next epoch."""
        self._emit(ev.EpochEnd())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the counters to the row of a training step, and to that of the whole training."""
        if self.session is None or logs is None or not ("loss" in logs or "train_loss" in logs):
            return
        row = state.log_history[-1] if state.log_history else {}
        metrics = {**self.keeper.counts(), **self.keeper.new_norms()}
        # The history has its own copy of the row, made before any callback was called.
        if row.get("step") == state.global_step and logs.keys() <= row.keys():
            row.update(metrics)
        logs.update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every step, evaluation and checkpoint is done."""
        self.keeper.close()
        if self.session is not None and state.is_world_process_zero:
            logger.info("%s", self.keeper.summary())

    def _emit(self, event: ev.Event) -> None:
        session = self.keeper.session
        if session is not None and not session.closed:
            session.emit(event)

    # -- exported state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """LOCAL. What a checkpoint keeps, JSON-able: how to make this callback again, and its counters."""
        keeper = self.keeper
        args = {
            "config": keeper.config,
            "grad_norm": keeper.grad_norm,
            "grad_norms": keeper.grad_norms,
            "grad_norms_every_n_steps": keeper.grad_norms_every,
            "missing": self.missing,
            **keeper.overrides,
        }
        return {"args": _jsonable(args), "attributes": {"counters": keeper.state_dict()}}

    @property
    def counters(self) -> dict[str, Any]:
        """The counters of all sessions of this rank; setting them goes on from there. The Trainer does that with
        ``restore_callback_states_from_checkpoint=True``, on a callback that it makes for the purpose."""
        return self.keeper.state_dict()

    @counters.setter
    def counters(self, value: dict[str, Any]) -> None:
        self._restored = True
        self.keeper.load_state_dict(value)

    # -- the Trainer and its engine ----------------------------------------------------------------------------------

    def _find(self, state: Any) -> Any:
        """The Trainer whose ``state`` this is; None if there is none. The Trainer tells its callbacks everything but
        itself, so it is looked for among all objects; that takes a tenth of a second, once."""
        known = None if self._trainer is None else self._trainer()
        if known is not None and known.state is state:
            return known
        for trainer in _trainers():
            if vars(trainer).get("state") is state:
                self._bind(trainer)
                return trainer
        return None

    def _bind(self, trainer: Any) -> None:
        handler = trainer.callback_handler
        for other in handler.callbacks:
            if isinstance(other, ZeroGuardTrainerCallback) and other is not self:
                raise AlreadyGuardedError(
                    f"this {type(trainer).__name__} already has a ZeroGuardTrainerCallback; keep one of them "
                    "(trainer.remove_callback(callback) takes one away)"
                )
        if not any(other is self for other in handler.callbacks):
            trainer.add_callback(self)
        # First in the row: what on_log adds then also reaches the callbacks of report_to. A new list, because the
        # handler may be going through the old one right now.
        handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]
        self._trainer = weakref.ref(trainer)
        earlier = vars(trainer).get(_MARK)
        if self._restored and earlier is not None and earlier is not self.keeper:
            # The Trainer has made this callback from a checkpoint. Whoever holds the one that the program made goes on
            # with it: its sinks, its summary, its 'with' block.
            earlier.load_state_dict(self.keeper.state_dict())
            self.keeper = earlier
        elif earlier is not self.keeper:
            # Weak, because a sink may lead to the Trainer.
            weakref.finalize(trainer, _close, weakref.ref(self.keeper), self._trainer)
        vars(trainer)[_MARK] = self.keeper

    def _not_guarded(self, trainer: Any, args: Any, state: Any) -> None:
        cause, remedy = _why(trainer, args)
        text = (
            f"ZeroGuardTrainerCallback guards nothing in this training: it found no DeepSpeed engine.\n"
            f"  looked at:  {_looked(trainer, args)}\n  cause:      {cause}\n  what to do: {remedy}"
        )
        if self.missing == "raise":
            raise EngineNotFoundError(text)
        if state.is_world_process_zero:
            # Training scripts often switch warnings off; the log gets the whole text.
            logger.error("%s", text)
            warnings.warn(f"zeroguard guards nothing in this training: {cause}", stacklevel=2)


def _logs(trainer: Any, ahead: int) -> bool:
    """Whether the Trainer logs the step that it has counted last, or the one that is so many ``ahead``. The same on
    every rank; what other callbacks ask for by ``control.should_log`` is not known before the step."""
    args, state = trainer.args, trainer.state
    step = state.global_step + ahead
    if args.logging_first_step and step == 1:
        return True
    if args.logging_strategy == "epoch":
        return bool(trainer.accelerator.gradient_state.end_of_dataloader or step >= state.max_steps)
    return bool(args.logging_strategy == "steps" and step % state.logging_steps == 0)


def _close(keeper: weakref.ref[_Keeper], trainer: weakref.ref[Any]) -> None:
    """When a Trainer is gone, and at exit."""
    alive = keeper()
    if alive is not None and alive.owner is trainer:
        alive.close(failed=True)


def _trainers() -> Iterator[Any]:
    from transformers import Trainer

    # Not isinstance: it asks the objects, and proxies among them answer with side effects.
    return (item for item in gc.get_objects() if issubclass(type(item), Trainer))


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        # Only what was set: the rest comes from the environment, a file and the defaults of the run that resumes.
        fields = value.model_fields_set if isinstance(value, GuardConfig) else None
        return value.model_dump(mode="json", include=fields)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _looked(trainer: Any, args: Any) -> str:
    if trainer is None:
        return "all objects of this process, for the Trainer whose state this callback was given"
    wrapped = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)
    on_cpu = os.environ.get("ACCELERATE_USE_CPU")
    return (
        f"trainer.accelerator.deepspeed_engine_wrapped ({'None' if wrapped is None else type(wrapped).__name__}), "
        f"trainer.accelerator.distributed_type ({_distributed(trainer)}), TrainingArguments.deepspeed "
        f"({'set' if args.deepspeed else 'not set'}), ACCELERATE_USE_CPU ({'not set' if on_cpu is None else on_cpu})"
    )


def _distributed(trainer: Any) -> str:
    kind = trainer.accelerator.distributed_type
    return str(getattr(kind, "value", kind))


def _why(trainer: Any, args: Any) -> tuple[str, str]:
    """The likely cause of a missing engine, and the way out."""
    if trainer is None:
        return (
            "the Trainer was not found; it may be hidden from Python's garbage collector (gc.freeze)",
            "call callback.attach(trainer) before trainer.train()",
        )
    try:
        engine_of(trainer)
    except EngineNotFoundError:
        pass
    else:
        return (
            "train() has destroyed the engine of an earlier train() or evaluate() of this Trainer and goes on with it; "
            "the Trainer itself will fail at its first backward",
            "make a new Trainer for each train(), or give it model_init instead of a model",
        )
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "")
    if on_cpu.lower() not in _FALSE:
        return (
            f"with ACCELERATE_USE_CPU={on_cpu} in the environment Accelerate drops DeepSpeed without a word",
            "unset ACCELERATE_USE_CPU; DeepSpeed runs on a CPU with DS_ACCELERATOR=cpu",
        )
    if not args.deepspeed:
        return (
            "TrainingArguments has no deepspeed=..., and the launcher did not ask Accelerate for DeepSpeed either",
            "give TrainingArguments(deepspeed=...) a file or a dict, or take the callback away",
        )
    return (
        f"TrainingArguments has deepspeed=..., but Accelerate chose {_distributed(trainer)}",
        "look for ACCELERATE_* variables in the environment, and for an Accelerator made before the TrainingArguments",
    )
