"""A trainer trains, then evaluates, maybe on an engine that it makes for the purpose: the same program with zeroguard
and without, what it computes, and what is another object on each engine afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch

from tests.lab import programs as lab
from tests.lab import snapshot


class Engines:
    """Every engine that is made, and what it was like when it was new."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.before: list[snapshot.Snapshot] = []
        #: What leads to the trainer, its callbacks and their sessions, and is no part of an engine.
        self.beyond: list[Any] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        original = deepspeed.initialize

        def initialize(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            self.made.append(made[0])
            self.before.append(self._snapshot(made[0]))
            return made

        deepspeed.initialize = initialize
        try:
            yield
        finally:
            deepspeed.initialize = original

    def _snapshot(self, engine: Any) -> snapshot.Snapshot:
        return snapshot.engine(engine, beyond=tuple(self.beyond))

    def changed(self) -> list[list[str]]:
        """For each engine."""
        pairs = zip(self.before, self.made, strict=True)
        return [sorted(snapshot.changed(before, self._snapshot(engine))) for before, engine in pairs]

    def ours(self) -> list[list[str]]:
        """For each engine, what of zeroguard can be reached from it."""
        return [snapshot.ours(engine, beyond=tuple(self.beyond)) for engine in self.made]

    def release(self) -> None:
        for engine in self.made:
            lab.release(engine)


class Sessions:
    """Every session that a callback opened, with the engine that it guards, in the order of the runs."""

    def __init__(self, callback: Any, engines: Engines) -> None:
        self.callback, self.engines = callback, engines
        self.runs: list[list[Any]] = []
        self.open: list[str] = []

    def note(self, run: str) -> None:
        """After a run."""
        session = None if self.callback is None else self.callback.session
        self.runs.append([run, len(self.engines.made), session])
        self.open += [run] if session is not None and not session.closed else []

    def answer(self) -> dict[str, Any]:
        sessions: list[Any] = []
        for _, _, session in self.runs:
            if session is not None and session not in sessions:
                sessions.append(session)
        return {
            "runs": [[run, made, sessions.index(s) if s else None] for run, made, s in self.runs],
            "open": self.open,
            "findings": [finding.text() for session in sessions for finding in session.findings],
            "repairs": [repair.kind for session in sessions for repair in session.repairs],
        }


def lightning(package: str, stage: int, guarded: bool) -> dict[str, Any]:
    """fit with a validation after each batch, then test, validate and predict with the module that was trained."""
    from tests.lab import lightning_programs as programs

    engines = Engines()
    callback = programs.ZeroGuardCallback({"sinks": []}, summary=False) if guarded else None
    sessions = Sessions(callback, engines)
    model = programs.model_of(package, "one")
    start = copy.deepcopy(model.net)
    trainer = programs.trainer_of(package, stage, [callback] if callback else [], val_check_interval=1)
    engines.beyond.append(trainer)
    answer: dict[str, Any] = {}
    with engines.watched():
        trainer.fit(model, programs.loader(3), programs.loader(1))
        sessions.note("fit")
        answer.update(programs.verdict(trainer.strategy.model, start, 3))
        after = programs.reference(copy.deepcopy(start), 3)
        values: list[float] = [float(trainer.callback_metrics["loss"])]
        for run in ("test", "validate", "predict"):
            quiet = {} if run == "predict" else {"verbose": False}
            out = getattr(trainer, run)(model, programs.loader(2), **quiet)
            sessions.note(run)
            values += [out[0]["loss"]] if run != "predict" else [float(one.sum()) for one in out]
    answer["values"] = values
    with torch.no_grad():
        xs = programs.data(2)
        losses = [float(sum(lab.losses(after, x))) for x in xs]
        mean = sum(losses) / 2
        answer["true"] = [losses[0], mean, mean, *(float(after(x)[0].sum()) for x in xs)]
    answer.update(changed=engines.changed(), ours=engines.ours(), **sessions.answer())
    engines.release()
    return answer


def transformers(stage: int, guarded: bool) -> dict[str, Any]:
    """train with an evaluation after each step, then evaluate and predict; on ZeRO-3 also a second Trainer of the same
    model and callback, whose evaluation has an engine of its own."""
    from tests.lab import hf_programs as programs

    engines = Engines()
    with programs.fresh() as folder, programs._quiet(), engines.watched():
        made = programs.callback(True) if guarded else None
        sessions = Sessions(made, engines)
        args = programs.arguments(folder, stage, eval_strategy="steps", eval_steps=1)
        data = programs.rows(programs.BATCH * 3)
        sets = {"train_dataset": data, "eval_dataset": data[: programs.BATCH], "callbacks": [made] if made else []}
        running = programs.Sequential(model=programs.tiny(), args=args, **sets)
        engines.beyond.append(running)
        running.train()
        sessions.note("train")
        weights = [lab.full(p) for p in engines.made[-1].module.parameters()]
        values = [row["eval_loss"] for row in running.state.log_history if "eval_loss" in row]
        values.append(running.evaluate()["eval_loss"])
        sessions.note("evaluate")
        values.append(running.predict(data[: programs.BATCH]).metrics["test_loss"])
        sessions.note("predict")
        if stage == 3:  # the others refuse to evaluate without training
            args = programs.arguments(folder, stage)
            second = programs.Sequential(model=running.model, args=args, **sets)
            engines.beyond.append(second)
            values.append(second.evaluate()["eval_loss"])
            sessions.note("second trainer")
        expected, _ = programs.reference("Sequential", 3, 1, programs.OPTIMIZERS["sgd"])
        answer: dict[str, Any] = {"values": values, "difference": programs.compare([weights], expected[-1:])[0]}
        answer["true"] = [_loss(programs, weights) for weights in expected]
        answer.update(changed=engines.changed(), ours=engines.ours(), **sessions.answer())
        engines.release()
    return answer


def _loss(programs: Any, weights: list[torch.Tensor]) -> float:
    """Of the first batch, in plain PyTorch."""
    model = programs.tiny().eval()
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(value)
        return float(model(**programs.batch(0)).loss)
