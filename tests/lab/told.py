"""An exception leaves a trainer's loop, or a script under ``zeroguard run``: which session is told of it, and when."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.lab import programs as lab
from tests.lab import snapshot
from tests.lab.later_engines import Engines
from zeroguard import Session
from zeroguard.integrations.loop import LoopCallback

SCRIPT = """
import sys

import torch

from tests.lab import programs as lab

engine = lab.build(torch.nn.Linear(8, 8), lab.ds_config({stage}, False))[0]
engine.backward(engine(lab.batches(0)[1]).pow(2).mean())
engine.step()
{end}
"""
#: How the script ends.
ENDS = {
    "raise": 'raise ValueError("boom")',
    "ctrl_c": "raise KeyboardInterrupt",
    "exit": "sys.exit(3)",
    "exit well": "sys.exit(0)",
    "return": "",
}


class Boom(Exception):
    """What the loop raises."""


class Told:
    """What ``Session.on_exception`` was called with. ``fails``: it then raises an exception of its own."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[tuple[Session, BaseException, bool]] = []
        self.raised: BaseException | None = None

    def run(self, loop: Callable[[], Any]) -> None:
        def on_exception(session: Session, error: BaseException) -> None:
            self.calls.append((session, error, session.closed))
            if self.fails:
                raise OSError("telling failed")

        with mock.patch.object(Session, "on_exception", on_exception):
            try:
                loop()
            except BaseException as error:
                self.raised = error

    def answer(self, session: Any, engine: Any, *beyond: Any) -> dict[str, Any]:
        """``same``: the session was told of what came out of the loop, and not of a copy or a cause."""
        return {
            "raised": f"{type(self.raised).__name__}: {self.raised}",
            "told": [f"{type(error).__name__}: {error}" for _, error, _ in self.calls],
            "same": all(told is session and error is self.raised for told, error, _ in self.calls),
            "open": not any(closed for *_, closed in self.calls),
            "closed": session.closed,
            "failed": session._failed,
            "left": snapshot.ours(engine, beyond=beyond),
        }


def lightning(package: str, stage: int, where: str, fails: bool = False) -> dict[str, Any]:
    """``where``: the method of the module that raises; the evaluations but for validation come after a whole fit."""
    from tests.lab import lightning_programs as programs

    def boom(self: Any, batch: Any, batch_idx: int) -> Any:
        raise Boom(where)

    class Watch(importlib.import_module(package).Callback):  # type: ignore[misc]
        """Behind zeroguard's: when the trainer's other callbacks hear of it, the engine is back."""

        open: bool | None = None

        def on_exception(self, *_: Any) -> None:
            self.open = not callback.session.closed

    callback, watch = programs.ZeroGuardCallback({"sinks": []}, summary=False), Watch()
    trainer = programs.trainer_of(package, stage, [callback, watch], val_check_interval=1)
    model = programs.model_of(package, "one", **{where: boom})
    told, engines = Told(fails), Engines()

    def loop() -> None:
        trainer.fit(model, programs.loader(2), programs.loader(1))
        getattr(trainer, where.removesuffix("_step"))(model, programs.loader(1))

    with engines.watched():
        told.run(loop)
    answer = told.answer(callback.session, engines.made[-1], trainer, callback)
    answer.update(engines=len(engines.made), later=watch.open)
    engines.release()
    return answer


def lightning_ctrl_c(package: str, stage: int) -> dict[str, Any]:
    """Lightning turns it into another exception, after its callbacks have heard of it."""
    from tests.lab import lightning_programs as programs

    told = Told()
    told.run(lambda: programs.interrupted(package, stage, "ctrl_c", True))
    return {"told": [type(error).__name__ for _, error, _ in told.calls]}


def transformers(stage: int, fails: bool = False) -> dict[str, Any]:
    """The second training step raises, inside the callback's ``with`` block."""
    from tests.lab import hf_programs as programs

    told, engines = Told(fails), Engines()
    with programs.fresh() as folder, programs._quiet(), engines.watched():
        made = programs.callback(True)
        running = programs.trainer_of(folder, programs.Failing, stage, [])

        def loop() -> None:
            with made.attach(running):
                running.train()

        told.run(loop)
        answer = told.answer(made.session, engines.made[-1], running, made)
        engines.release()
    return answer


def by_hand(stage: int, fails: bool = False) -> dict[str, Any]:
    """A loop with a LoopCallback's ``with`` block."""
    told = Told(fails)
    engine = lab.build(torch.nn.Linear(8, 8), lab.ds_config(stage, False))[0]
    callback = LoopCallback(engine, {"sinks": []})

    def loop() -> None:
        with callback:
            raise Boom("boom")

    told.run(loop)
    answer = told.answer(callback.session, engine, callback)
    lab.release(engine)
    return answer


@contextlib.contextmanager
def _process(launcher: Any) -> Iterator[list[Callable[[], None]]]:
    """What the launcher and a script change in their process, back again; what runs at its end, last one first."""
    at_exit: list[Callable[[], None]] = []
    main, argv, path, hook = sys.modules["__main__"], sys.argv, sys.path[0], sys.excepthook

    def register(call: Callable[..., None], *arguments: Any) -> None:
        at_exit.insert(0, lambda: call(*arguments))

    try:
        with mock.patch.object(launcher, "atexit", mock.Mock(register=register)):
            yield at_exit
    finally:
        sys.modules["__main__"], sys.argv, sys.path[0], sys.excepthook = main, argv, path, hook


def launched(stage: int, end: str, fails: bool = False) -> dict[str, Any]:
    """``zeroguard run`` in this process. ``excepthook``: it is the launcher's, which shows the script's part only."""
    from zeroguard.integrations import launcher
    from zeroguard.integrations.script import Script

    told, engines, hook = Told(fails), Engines(), sys.excepthook
    with tempfile.TemporaryDirectory() as folder, engines.watched(), _process(launcher) as at_exit:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT.format(stage=stage, end=ENDS[end]), encoding="utf-8")
        options = {"config": None, "report": None, "on_violation": "record", "script": Script(str(script))}
        told.run(lambda: launcher.run(argparse.Namespace(**options)))
        hidden = sys.excepthook is not hook
        session = _session(engines.made[-1])
        with contextlib.redirect_stderr(None):
            for call in at_exit:
                call()
    answer = {**told.answer(session, engines.made[-1]), "hidden": hidden}
    engines.release()
    return answer


def _session(engine: Any) -> Any:
    return next(
        one for one in gc.get_objects() if type(one) is Session and getattr(one._backend, "engine", None) is engine
    )
