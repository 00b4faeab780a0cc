"""Programs on Lightning's Trainer and Fabric, each beside plain PyTorch.

``package`` is a Trainer's package, whose Fabric is meant with it. One worker runs the programs of both.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.lab import identity
from tests.lab import programs as lab
from tests.lab.lightning_double import FABRICS, ON_GPU, TRAINERS, fabric_strategy, trainer_strategy, use_the_lab

use_the_lab()
ACCELERATOR = "gpu" if ON_GPU else "cpu"
#: Both packages before zeroguard's integration, whose class then has both of their bases. Where an older release of one
#: of them comes first on the path, the other one may be missing or broken.
for _package in TRAINERS:
    with contextlib.suppress(Exception):
        importlib.import_module(_package)
for _package in (*TRAINERS, *FABRICS.values()):
    logging.getLogger(_package).setLevel(logging.ERROR)
    logging.getLogger(f"{_package}.utilities.rank_zero").setLevel(logging.ERROR)

import zeroguard  # noqa: E402
from zeroguard.integrations import lightning as integration  # noqa: E402
from zeroguard.integrations.lightning import ZeroGuardCallback  # noqa: E402
from zeroguard.settings import resolve  # noqa: E402


def config_of(guarded: Any) -> dict[str, Any]:
    return {"sinks": []} if guarded is True else {"sinks": [], **guarded}


def model_of(package: str, mode: str, **hooks: Callable[..., Any]) -> Any:
    """A LightningModule around TwoHeads.

    mode: ``auto``, or manual optimization with ``one`` loss, two losses of one forward (``retained``), or two losses of
    two forwards (``forwards``). ``hooks`` are methods to add.
    """
    base = importlib.import_module(package).LightningModule

    class Lit(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = mode == "auto"
            self.net = lab.TwoHeads()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            one, two = lab.losses(self.net, batch)
            if mode == "auto":
                return one + two
            optimizer = self.optimizers()
            if mode == "one":
                self.manual_backward(one + two)
            elif mode == "retained":
                self.manual_backward(one, retain_graph=True)
                self.manual_backward(two)
            else:
                self.manual_backward(one)
                self.manual_backward(lab.losses(self.net, batch)[1])
            optimizer.step()
            return None

        def evaluate(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("loss", sum(lab.losses(self.net, batch)), batch_size=2)

        validation_step = test_step = evaluate

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.net(batch)[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=lab.LR)

    for name, hook in hooks.items():
        setattr(Lit, name, hook)
    torch.manual_seed(0)
    return Lit()


def data(steps: int, all_ranks: bool = False) -> list[torch.Tensor]:
    return [lab.batches(step)[0 if all_ranks else 1] for step in range(steps)]


def loader(steps: int) -> Any:
    return torch.utils.data.DataLoader(data(steps), batch_size=None)  # type: ignore[arg-type]


def engine_config(stage: int, offload: bool = False, **kw: Any) -> dict[str, Any]:
    """Without the accumulation steps, which Lightning wants to set."""
    config = lab.ds_config(stage, offload, **kw)
    config.pop("gradient_accumulation_steps")
    return config


def trainer_of(
    package: str, stage: int, callbacks: Any, *, offload: bool = False, strategy: Any = None, **kw: Any
) -> Any:
    options: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "devices": dist.get_world_size(),
        "strategy": strategy or trainer_strategy(package, engine_config(stage, offload)),
        "precision": "32-true",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "callbacks": callbacks,
        "default_root_dir": tempfile.gettempdir(),
    }
    return importlib.import_module(package).Trainer(**{**options, **kw})


def reference(model: torch.nn.Module, steps: int, accumulate: int = 1) -> torch.nn.Module:
    """The same training in plain PyTorch."""
    model.to(lab.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=lab.LR)
    plain = lab.Reference(model, optimizer, torch.float32)
    for step, xs in enumerate(data(steps, all_ranks=True)):
        for copy_, x in zip(plain.work, xs, strict=True):
            (sum(lab.losses(copy_, x)) / accumulate).backward()  # type: ignore[union-attr]
        if (step + 1) % accumulate == 0:
            plain.step()
    return model


def verdict(engine: Any, before: torch.nn.Module, steps: int, accumulate: int = 1) -> dict[str, Any]:
    """Exact or wrong, after training."""
    # After fit Lightning has moved the module to the host, and not the engine's partitions.
    expected = reference(copy.deepcopy(before), steps, accumulate).cpu()
    moved = max(
        (a - b.cpu()).abs().max().item() for a, b in zip(expected.parameters(), before.parameters(), strict=True)
    )
    engine.module.to(lab.DEVICE)
    pairs = zip(lab.weights(engine), expected.parameters(), strict=True)
    worst = torch.tensor(max((a.cpu() - b).abs().max().item() for a, b in pairs), device=lab.DEVICE)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    difference = worst.item()
    return {
        "status": "exact" if difference <= max(1e-6 * moved, 3e-8) else "wrong",
        "difference": difference,
        "moved": moved,
    }


def seen(callback: Any) -> dict[str, Any]:
    return lab.record(callback.session if callback is not None else None)


def fit(
    package: str,
    stage: int,
    mode: str,
    offload: bool = False,
    guarded: Any = True,
    accumulate: int = 1,
    steps: int = 4,
    validate: bool = False,
) -> dict[str, Any]:
    """One fit, compared with plain PyTorch."""
    model = model_of(package, mode)
    before = copy.deepcopy(model.net)
    callback = ZeroGuardCallback(config_of(guarded), summary=False) if guarded else None
    kw: dict[str, Any] = {"val_check_interval": 1, "num_sanity_val_steps": 1} if validate else {}
    trainer = trainer_of(
        package, stage, [callback] if callback else [], offload=offload, accumulate_grad_batches=accumulate, **kw
    )
    answer: dict[str, Any] = {"error": ""}
    try:
        trainer.fit(model, loader(steps), loader(1) if validate else None)
        answer.update(verdict(trainer.strategy.model, before, steps, accumulate))
    except RuntimeError as error:
        answer.update(status="crash", error=f"{type(error).__name__}: {error}")
    answer.update(seen(callback), closed=callback.session.closed if callback and callback.session else None)
    lab.release(trainer.strategy.model)
    return answer


# -- where guards act, and what is left behind ------------------------------------------------------------------------


def order(package: str, stage: int, mode: str, offload: bool = False, guarded: Any = True) -> dict[str, Any]:
    """What happened when: repairs, findings, the wrapped optimizer's step, and Lightning's hooks around them."""
    trace: list[str] = []

    class Hooks(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            base = trainer.strategy.model.optimizer.optimizer
            base.register_step_pre_hook(lambda *_: trace.append("optimizer.step"))

        def on_before_optimizer_step(self, *_: Any) -> None:
            trace.append("on_before_optimizer_step")

        def on_train_batch_end(self, *_: Any) -> None:
            trace.append("on_train_batch_end")

    def sink(item: Any) -> None:
        trace.append(("finding " if isinstance(item, zeroguard.Finding) else "repair ") + item.kind)

    callback = ZeroGuardCallback(config_of(guarded), sinks=[sink], summary=False)
    trainer = trainer_of(package, stage, [Hooks(), callback], offload=offload)
    with contextlib.suppress(RuntimeError):
        trainer.fit(model_of(package, mode), loader(2))
    lab.release(trainer.strategy.model)
    return {"order": trace, **seen(callback)}


class Stop(Exception):
    """Raised on purpose."""


def interrupted(package: str, stage: int, kind: str, guarded: bool, offload: bool = False) -> dict[str, Any]:
    """A fit that ends early, ``kind`` saying how; what of the engine is another object afterwards."""
    before: dict[str, Any] = {}
    engines: list[Any] = []

    class Before(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            engines.append(trainer.strategy.model)
            before.update(identity.snapshot(engines[0]))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and kind in ("training_step", "ctrl_c"):
            raise Stop if kind == "training_step" else KeyboardInterrupt
        return sum(lab.losses(self.net, batch))

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.net(batch)
        if kind == "validation_step":
            raise Stop

    model = model_of(package, "auto", training_step=training_step, validation_step=validation_step)
    callback = ZeroGuardCallback({"sinks": []})
    callbacks = [Before(), callback] if guarded else [Before()]
    trainer = trainer_of(package, stage, callbacks, offload=offload, val_check_interval=2)
    answer: dict[str, Any] = {"raised": ""}
    handler, stdin = signal.getsignal(signal.SIGINT), sys.stdin
    sys.stdin = io.StringIO()  # Lightning before 2.5 calls exit(), which closes it
    try:
        trainer.fit(model, loader(4), loader(1))
    except (Stop, SystemExit, KeyboardInterrupt) as error:  # Lightning 2.6 makes a SystemExit of Ctrl+C
        answer["raised"] = type(error).__name__
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.stdin = stdin
    answer["changed"] = sorted(identity.changed(before, identity.snapshot(engines[0])))
    answer["marked"] = [name for name in vars(engines[0]) if "zeroguard" in name]
    if guarded:
        answer.update(closed=callback.session.closed, failed=callback.session._failed, steps=callback.state_dict())
        # The engine can be guarded again.
        zeroguard.guard(engines[0], {"sinks": []}).close()
    lab.release(engines[0])
    return answer


# -- resume -----------------------------------------------------------------------------------------------------------


def counts(callback: Any, what: str = "repairs") -> dict[str, float]:
    return {name: c[what] for name, c in callback.state_dict().get("guards", {}).items()}


def resume(
    package: str, stage: int, saved_with: bool = True, loaded_with: bool = True, into: str = ""
) -> dict[str, Any]:
    """Two steps, a checkpoint, and two steps more in a new Trainer, of package ``into``."""
    into = into or package
    mode = "retained" if saved_with and loaded_with else "one"  # what runs unguarded
    folder = lab_folder()
    saves = importlib.import_module(f"{package}.callbacks").ModelCheckpoint(dirpath=folder, save_last=True)
    first = ZeroGuardCallback({"sinks": []}, summary=False)
    trainer = trainer_of(package, stage, [first, saves] if saved_with else [saves], enable_checkpointing=True)
    trainer.fit(model_of(package, mode), loader(2))
    lab.release(trainer.strategy.model)
    second = ZeroGuardCallback({"sinks": []}, summary=False)
    trainer = trainer_of(into, stage, [second] if loaded_with else [], max_epochs=2)
    trainer.fit(model_of(into, mode), loader(2), ckpt_path=f"{folder}/last.ckpt")
    lab.release(trainer.strategy.model)
    answer = {"step": trainer.global_step, "first": counts(first), "second": counts(second)}
    answer["events"] = counts(second, "events")
    # The first callback once more, as a script that fits and resumes in one process.
    if saved_with and loaded_with:
        again = trainer_of(package, stage, [first], max_epochs=2)
        again.fit(model_of(package, "retained"), loader(2), ckpt_path=f"{folder}/last.ckpt")
        answer["again"] = counts(first)
        if stage < 3:  # there DeepSpeed's engine without an optimizer cannot load a checkpoint
            again.test(model_of(package, "retained"), loader(1), ckpt_path=f"{folder}/last.ckpt", verbose=False)
            answer["after_test"] = counts(first)
        lab.release(again.strategy.model)
        answer["state"] = second.state_dict()
        answer["summary"] = second.summary()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return answer


def lab_folder() -> str:
    """The same on all ranks."""
    found = [tempfile.mkdtemp(prefix="zeroguard-lightning-")]
    dist.broadcast_object_list(found)
    return found[0]


# -- other runs of a Trainer ------------------------------------------------------------------------------------------


def runs(package: str, stage: int, guarded: bool = True) -> dict[str, Any]:
    """validate, fit, fit again, test and predict with one callback and one Trainer, then with two more Trainers. The
    module is a new one each time: on ZeRO-3 a second engine on the same module fails by itself."""
    callback = ZeroGuardCallback({"sinks": []}, summary=False)
    callbacks = [callback] if guarded else []
    mode = "retained" if guarded else "one"
    answer: dict[str, Any] = {"counts": [], "sessions": []}
    kept: list[Any] = []

    def note(what: str) -> None:
        answer["counts"].append([what, sum(counts(callback, "events").values())])
        marked = [name for name in vars(trainer.strategy.model) if "zeroguard" in name]
        session = callback.session
        if session not in kept:
            kept.append(session)
        answer["sessions"].append([what, kept.index(session), session and session.closed, marked])
        lab.release(trainer.strategy.model)

    trainer = trainer_of(package, stage, callbacks, num_sanity_val_steps=1)
    trainer.validate(model_of(package, mode), loader(1), verbose=False)
    note("validate")
    model = model_of(package, mode)
    before = copy.deepcopy(model.net)
    trainer.fit(model, loader(2), loader(1))
    answer.update(verdict(trainer.strategy.model, before, 2))
    note("fit")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model_of(package, mode), loader(2), loader(1))
    note("fit again")
    trainer.test(model_of(package, mode), loader(1), verbose=False)
    note("test")
    trainer.predict(model_of(package, mode), loader(1))
    note("predict")
    trainer = trainer_of(package, stage, callbacks, fast_dev_run=True)
    trainer.fit(model_of(package, mode), loader(2), loader(1))
    note("fast_dev_run")
    trainer = trainer_of(package, stage, callbacks, max_epochs=0)
    trainer.fit(model_of(package, mode), loader(2))
    note("no epoch")
    return answer


def leaves_early(package: str, run: str, guarded: bool) -> dict[str, Any]:
    """ZeRO-3, an evaluation that leaves the network after half of its layers, and what it leaves in flight."""
    from tests.lab import status

    base = importlib.import_module(package)
    seen_by: dict[str, Any] = {}

    class Deep(base.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = status.Deep()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.net(batch)

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.net(batch, until=3 if run == "fit" or batch_idx == 2 else -1)

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=lab.LR)

    class Look(base.Callback):  # type: ignore[misc, name-defined]
        """After zeroguard's callback, and before the trainer goes on."""

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            seen_by["right after"] = status._status(trainer.strategy.model)

        on_test_end = on_predict_end = on_validation_end

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if "right after" in seen_by:
                seen_by.setdefault("next batch", status._status(trainer.strategy.model))

    zero = {"stage3_prefetch_bucket_size": status.H**2 * 3, "stage3_max_reuse_distance": 0}
    callback = ZeroGuardCallback({"sinks": []}, summary=False)
    strategy = trainer_strategy(package, engine_config(3, zero=zero))
    callbacks = [callback, Look()] if guarded else [Look()]
    trainer = trainer_of(package, 3, callbacks, strategy=strategy, val_check_interval=3)
    torch.manual_seed(0)
    xs = [lab.batches(step, h=status.H)[1] for step in range(6)]
    batches = torch.utils.data.DataLoader(xs, batch_size=None)  # type: ignore[arg-type, var-annotated]
    if run == "fit":
        trainer.fit(Deep(), batches, torch.utils.data.DataLoader(xs[:3], batch_size=None))  # type: ignore[arg-type]
    else:
        getattr(trainer, run)(Deep(), torch.utils.data.DataLoader(xs[:3], batch_size=None))  # type: ignore[arg-type]
    answer = {"seen": seen_by, "end": status._status(trainer.strategy.model), **seen(callback)}
    lab.release(trainer.strategy.model)
    return answer


def no_deepspeed(package: str) -> dict[str, Any]:
    """A Trainer with another strategy, fitted twice."""
    callback = ZeroGuardCallback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer = trainer_of(package, 2, [callback], strategy="auto", devices=1)
            trainer.fit(model_of(package, "auto"), loader(1))
    return {
        "warnings": [str(w.message) for w in caught if "zeroguard" in str(w.message).lower()],
        "state": callback.state_dict(),
        "summary": callback.summary(),
    }


def several_optimizers(package: str) -> dict[str, Any]:
    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD(self.net.a.parameters(), 0.1), torch.optim.SGD(self.net.b.parameters(), 0.1)]

    callback = ZeroGuardCallback({"sinks": []})
    trainer = trainer_of(package, 2, [callback])
    try:
        trainer.fit(model_of(package, "retained", configure_optimizers=configure_optimizers), loader(1))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "session": callback.session}
    return {"error": ""}


# -- what is logged ---------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def listening(name: str) -> Iterator[list[str]]:
    log, lines = logging.getLogger(name), Lines()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(lines)
    try:
        yield lines.lines
    finally:
        log.removeHandler(lines)
        log.setLevel(level)


def logged(
    package: str, mode: str, every: int = 2, steps: int = 5, accumulate: int = 1, guarded: Any = True, **options: Any
) -> dict[str, Any]:
    """What the loggers and the progress bar get."""
    rows: list[dict[str, Any]] = []
    module = importlib.import_module(f"{package}.loggers.logger")

    class Memory(module.DummyLogger):  # type: ignore[misc, name-defined]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            rows.append({"step": step, **{k: v for k, v in metrics.items() if k.startswith("zeroguard")}})

    callback = ZeroGuardCallback(config_of(guarded), **options)
    trainer = trainer_of(
        package,
        2,
        [callback],
        logger=Memory(),
        log_every_n_steps=every,
        accumulate_grad_batches=accumulate,
        offload=True,
    )
    with listening(package) as lines:
        trainer.fit(model_of(package, mode), loader(steps))
    lab.release(trainer.strategy.model)
    return {
        "rows": rows,
        "bar": {k: float(v) for k, v in trainer.progress_bar_metrics.items()},
        "callback_metrics": sorted(trainer.callback_metrics),
        "lines": [line for line in lines if "zeroguard" in line],
        **seen(callback),
    }


def by_hand(clear_at: int = -1) -> Callable[..., Any]:
    """A training_step that steps after every second batch; at batch ``clear_at`` it takes the gradients away first."""

    def training_step(self: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.manual_backward(sum(lab.losses(self.net, batch)))
        if batch_idx == clear_at:
            self.trainer.strategy.model.zero_grad()
        if batch_idx % 2:
            self.optimizers().step()

    return training_step


def true_norms(before: torch.nn.Module, steps: int, window: int, divide: bool, per: str) -> list[dict[str, float]]:
    """Of each optimizer step, in plain PyTorch."""
    optimizer = torch.optim.SGD(before.parameters(), lr=lab.LR)
    plain = lab.Reference(before, optimizer, torch.float32)
    out = []
    for number, xs in enumerate(data(steps, all_ranks=True)):
        for copy_, x in zip(plain.work, xs, strict=True):
            (sum(lab.losses(copy_, x)) / (window if divide else 1)).backward()  # type: ignore[union-attr]
        if (number + 1) % window == 0:
            squares: dict[str, float] = {}
            for name, *grads in zip(
                dict(before.named_parameters()), *([p.grad for p in w.parameters()] for w in plain.work), strict=True
            ):
                key = {"total": "total", "parameter": f"net.{name}", "module": f"net.{name.split('.')[0]}"}[per]
                squares[key] = squares.get(key, 0.0) + (sum(grads) / len(grads)).double().pow(2).sum().item()
            out.append({f"zeroguard/grad_norm/{key}": square**0.5 for key, square in squares.items()})
            plain.step()
    return out


def norms(
    package: str,
    stage: int,
    mode: str = "auto",
    offload: bool = False,
    per: str = "total",
    every: int = 1,
    window: int = 1,
    steps: int = 4,
    clear_at: int = -1,
    guarded: Any = True,
    **options: Any,
) -> dict[str, Any]:
    """What the loggers get with ``grad_norms``, row by row, beside plain PyTorch's norms of each step.

    ``mode`` ``hand``: the loop steps by itself, after every second batch."""
    rows: list[dict[str, Any]] = []
    module = importlib.import_module(f"{package}.loggers.logger")

    class Memory(module.DummyLogger):  # type: ignore[misc, name-defined]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            found = {k: float(v) for k, v in metrics.items() if k.startswith("zeroguard/grad_norm")}
            if found:
                rows.append({"step": step, "norms": found})

    model = model_of(package, mode, **({"training_step": by_hand(clear_at)} if mode == "hand" else {}))
    before = copy.deepcopy(model.net)
    callback = ZeroGuardCallback(config_of(guarded), summary=False, grad_norms=per, **options)
    kw = {"logger": Memory(), "log_every_n_steps": every, "offload": offload}
    trainer = trainer_of(package, stage, [callback], accumulate_grad_batches=1 if mode == "hand" else window, **kw)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(model, loader(steps))
    lab.release(trainer.strategy.model)
    return {
        "rows": rows,
        "true": true_norms(before, steps, window, mode == "auto", per),
        "warnings": [str(w.message) for w in told if "watch_norms" in str(w.message)],
        "callback_metrics": sorted(trainer.callback_metrics),
        "metrics": callback.metrics(),
        **seen(callback),
    }


# -- two packages, copies, factories, the command line ---------------------------------------------------------------


def crosswise(package: str) -> dict[str, Any]:
    """The callback alone and in a list, in either Trainer; copies of it."""
    import pickle

    answer: dict[str, Any] = {"bases": [c.__module__.partition(".callbacks")[0] for c in ZeroGuardCallback.__mro__]}
    for name, callbacks in (("alone", ZeroGuardCallback), ("list", lambda c: [ZeroGuardCallback(c)])):
        trainer = trainer_of(package, 1, callbacks({"sinks": []}))
        trainer.fit(model_of(package, "retained"), loader(1))
        callback = next(c for c in trainer.callbacks if isinstance(c, ZeroGuardCallback))
        answer[name] = len(callback.session.repairs)
        lab.release(trainer.strategy.model)
    answer["key"] = callback.state_key
    for name, copied in (("pickle", pickle.loads(pickle.dumps(callback))), ("deepcopy", copy.deepcopy(callback))):
        answer[name] = [copied.session, copied.state_dict() == callback.state_dict(), hasattr(copied, "log")]
    fresh = pickle.loads(pickle.dumps(ZeroGuardCallback({"on_violation": "warn"}, grad_norm=True)))
    trainer = trainer_of(package, 1, [fresh])
    trainer.fit(model_of(package, "retained"), loader(1))
    answer["fresh"] = [len(fresh.session.repairs), fresh.session.config.on_violation]
    lab.release(trainer.strategy.model)
    return answer


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def factory(package: str, value: str, explicit: str = "") -> dict[str, Any]:
    """A Trainer with ZEROGUARD set; ``explicit``: a callback of the code's own, given to the Trainer (``trainer``) or
    by the model (``model``), or a session, opened by a callback before the installed one (``session``) or after it
    (``later session``)."""
    mine = ZeroGuardCallback({"sinks": []}, summary=False)
    sessions: list[Any] = []

    class Own(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            if explicit == "session":
                sessions.append(zeroguard.guard(trainer, {"sinks": []}))

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if explicit == "later session":
                sessions.append(zeroguard.guard(trainer, {"sinks": []}))

        def on_train_end(self, *_: Any) -> None:
            sessions[0].close()

    hooks = {"configure_callbacks": lambda self: [mine]} if explicit == "model" else {}
    callbacks = {"trainer": [mine], "session": [Own()], "later session": [Own()]}.get(explicit, [])
    with environment(ZEROGUARD=value), listening(package) as lines:
        trainer = trainer_of(package, 1, callbacks)
        names = [type(c).__name__ for c in trainer.callbacks if "ZeroGuard" in type(c).__name__]
        trainer.fit(model_of(package, "retained", **hooks), loader(2))
    installed = [c for c in trainer.callbacks if type(c).__name__ == "InstalledZeroGuardCallback"]
    answer = {"names": names, "lines": [line for line in lines if "zeroguard, rank" in line]}
    answer["mine"] = None if mine.session is None else len(mine.session.repairs)
    answer["own"] = len(sessions[0].repairs) if sessions else None
    answer["installed"] = [len(c.session.repairs) if c.session else None for c in installed]
    answer["state"] = [bool(c.state_dict()) for c in installed]
    answer["keys"] = [c.state_key for c in installed]
    lab.release(trainer.strategy.model)
    return answer


def factory_without_deepspeed(package: str) -> dict[str, Any]:
    with environment(ZEROGUARD="1"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(package, 2, [], strategy="auto", devices=1)
        trainer.fit(model_of(package, "auto"), loader(1))
    return {"warnings": [str(w.message) for w in caught if "zeroguard" in str(w.message).lower()]}


def command_line(
    package: str, args: list[str], files: dict[str, str] | None = None, fit: bool = False
) -> dict[str, Any]:
    """LightningCLI with these arguments, in a folder with these files; what came of the callback."""
    cli = importlib.import_module(f"{package}.cli")
    kind = type(model_of(package, "retained"))
    kind.train_dataloader = lambda self: loader(2)
    here = os.getcwd()
    common = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    common |= {"accelerator": ACCELERATOR, "devices": 1}
    common |= {"enable_model_summary": False, "use_distributed_sampler": False}
    if fit:
        strategy = trainer_strategy(package, engine_config(2))
        registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
        registry.register("lab", type(strategy), override=True, config=engine_config(2))
        common["strategy"] = "lab"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (files or {}).items():
            (Path(folder) / name).write_text(text)
        os.chdir(folder)
        try:
            made = cli.LightningCLI(
                kind,
                args=["fit", *args] if fit else args,
                run=fit,
                save_config_callback=None if fit else cli.SaveConfigCallback,
                trainer_defaults=common,
                seed_everything_default=False,
                parser_kwargs={} if fit else {"exit_on_error": False},
            )
            dump = "" if fit else made.parser.dump(made.config)
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            os.chdir(here)
    callback = next(c for c in made.trainer.callbacks if isinstance(c, ZeroGuardCallback))
    config = callback._options["config"]
    if not isinstance(config, str):
        config = json.loads(resolve(config).config.model_dump_json())
    answer = {
        "config": config,
        "grad_norm": callback._options["grad_norm"],
        "grad_norms": callback._options["grad_norms"],
        "dump": dump,
        **seen(callback),
    }
    if fit:
        lab.release(made.trainer.strategy.model)
    return answer


# -- Fabric -----------------------------------------------------------------------------------------------------------


def fabric_of(package: str, stage: int, offload: bool = False, callbacks: Any = (), **kw: Any) -> Any:
    name = FABRICS[package]
    config = lab.ds_config(stage, offload, **kw)
    made = importlib.import_module(name).Fabric(
        accelerator=ACCELERATOR,
        devices=dist.get_world_size(),
        precision="32-true",
        strategy=fabric_strategy(name, config),
        callbacks=list(callbacks),
    )
    made.launch()
    return made


def fabric_loop(
    fabric: Any, model: Any, optimizer: Any, mode: str, steps: int, gas: int = 1, engine: Any = None
) -> None:
    """With ``engine`` its step is called after each micro-batch, else the optimizer's after the last of a window."""
    for number, x in enumerate(data(steps)):
        one, two = lab.losses(model, x)
        if mode == "one":
            fabric.backward(one + two, model=model)
        elif mode == "retained":
            fabric.backward(one, model=model, retain_graph=True)
            fabric.backward(two, model=model)
        else:
            fabric.backward(one, model=model)
            fabric.backward(lab.losses(model, x)[1], model=model)
        if engine is not None:
            engine.step()
        elif (number + 1) % gas == 0:
            optimizer.step()
            optimizer.zero_grad()


def fabric(
    package: str,
    stage: int,
    mode: str,
    offload: bool = False,
    by: str = "callback",
    gas: int = 1,
    steps: int = 4,
    guarded: Any = True,
    engine_step: bool = False,
    grad_norms: Any = None,
) -> dict[str, Any]:
    """A Fabric loop, compared with plain PyTorch. by: ``callback``, or ``zeroguard.guard`` of the ``module`` or of the
    ``fabric``, or nothing."""
    callback = ZeroGuardCallback(config_of(guarded), summary=False, grad_norms=grad_norms)
    made = fabric_of(package, stage, offload, [callback] if by == "callback" else [], gas=gas)
    torch.manual_seed(0)
    net = lab.TwoHeads()
    before = copy.deepcopy(net)
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=lab.LR))
    engine = model._forward_module
    answer: dict[str, Any] = {"error": ""}
    source = {"module": model, "fabric": made}.get(by)
    guard = contextlib.nullcontext() if source is None else zeroguard.guard(source, config_of(guarded))
    try:
        with guard as session:
            fabric_loop(made, model, optimizer, mode, steps, gas, engine if engine_step else None)
        answer.update(verdict(engine, before, steps, gas))
    except (RuntimeError, KeyError, zeroguard.GuardViolation) as error:
        answer.update(status="crash", error=f"{type(error).__name__}: {error}")
    session = callback.session or session
    answer["true"] = true_norms(copy.deepcopy(before), steps, gas, True, "total")
    if by == "callback":
        answer["open"] = not callback.session.closed
        made.call("on_train_start", made, "whatever", loop=1)  # a loop's own events are none of its business
        answer["metrics"] = callback.metrics()
        callback.close()
    answer["marked"] = [name for name in vars(engine) if "zeroguard" in name]
    answer["engine_steps"] = engine.global_steps
    answer.update(lab.record(session))
    lab.release(engine)
    return answer


def fabric_engines(package: str) -> dict[str, Any]:
    """Two engines under one Fabric, and what can end the sessions: events that the loop sends, or the process."""
    answer: dict[str, Any] = {}
    for end in ("on_train_end", "teardown", "on_exception", "close", "exit"):
        callback = ZeroGuardCallback({"sinks": []})
        made = fabric_of(package, 2, callbacks=[callback])
        pairs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            net = lab.TwoHeads()
            pairs.append(made.setup(net, torch.optim.SGD(net.parameters(), lr=lab.LR)))
        for model, optimizer in pairs:
            fabric_loop(made, model, optimizer, "retained", 2)
        sessions = callback.sessions
        answer["repairs"] = [len(session.repairs) for session in sessions]
        with listening(FABRICS[package]) as lines:
            if end == "close":
                callback.close()
            elif end == "exit":
                integration._close_at_exit(weakref.ref(callback))
            else:
                made.call(end)
        answer[end] = [all(session.closed for session in sessions), "\n".join(lines).count("zeroguard, rank")]
        answer["metrics"] = callback.metrics()
        for model, _ in pairs:
            lab.release(model._forward_module)
    return answer


def fabric_factory(package: str, explicit: bool) -> dict[str, Any]:
    callback = ZeroGuardCallback({"sinks": []}, summary=False)
    with environment(ZEROGUARD="1"):
        made = fabric_of(package, 1, callbacks=[callback] if explicit else [])
    net = lab.TwoHeads()
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=lab.LR))
    fabric_loop(made, model, optimizer, "retained", 2)
    found = [c for c in made._callbacks if isinstance(c, ZeroGuardCallback)]
    answer = {"found": [[type(c).__name__, len(c.session.repairs) if c.session else None] for c in found]}
    for one in found:
        one.close()
    lab.release(model._forward_module)
    return answer


def fabric_without_deepspeed(package: str) -> dict[str, Any]:
    callback = ZeroGuardCallback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric = importlib.import_module(FABRICS[package]).Fabric
        made = fabric(accelerator=ACCELERATOR, devices=1, callbacks=[callback])
        for _ in range(2):
            made.setup(torch.nn.Linear(2, 2))
    return {"warnings": [str(w.message) for w in caught if "zeroguard" in str(w.message).lower()]}


# -- which package ----------------------------------------------------------------------------------------------------


def bases() -> dict[str, Any]:
    """Which Callback classes are chosen, by what is installed and what of it is imported already."""
    from unittest import mock

    class Module:
        def __init__(self, name: str) -> None:
            self.Callback = name

    def chosen(installed: str, loaded: str) -> Any:
        modules = {name: module for name, module in integration.sys.modules.items() if "lightning" not in name}
        modules |= dict.fromkeys(loaded.split())
        with (
            mock.patch.object(integration.importlib.util, "find_spec", lambda n: n if n in installed.split() else None),
            mock.patch.object(integration.importlib, "import_module", Module),
            mock.patch.object(integration.sys, "modules", modules),
        ):
            try:
                return list(integration._bases())
            except ImportError as error:
                return str(error)

    both = "lightning pytorch_lightning lightning_fabric"
    return {
        "both installed": chosen(both, ""),
        "both, one loaded": chosen(both, "pytorch_lightning lightning_fabric"),
        "both, both loaded": chosen(both, "lightning lightning.pytorch pytorch_lightning"),
        "both, the other's Fabric loaded": chosen(both, "lightning_fabric"),
        "one": chosen("pytorch_lightning lightning_fabric", ""),
        "the other": chosen("lightning", ""),
        "Fabric alone": chosen("lightning_fabric", "lightning_fabric"),
        "none": chosen("", ""),
    }
