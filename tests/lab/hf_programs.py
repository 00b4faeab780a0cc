"""Hugging Face's Trainer and an Accelerate loop on a real DeepSpeed engine, beside the same training in plain PyTorch.

One rank: on a CPU accelerate takes every process for a world of its own and fails in its gather.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin
from deepspeed.utils import safe_get_full_grad
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import zeroguard
from tests.lab import programs as lab
from tests.lab.identity import changed, snapshot
from zeroguard.integrations.transformers import ZeroGuardTrainerCallback

VOCABULARY, LENGTH, BATCH = 32, 8, 2

# As the worker does it after its own imports: DeepSpeed makes several collections an engine, and each walks all this.
gc.collect()
gc.freeze()

logging.getLogger("accelerate").setLevel(logging.ERROR)
logging.getLogger("transformers").setLevel(logging.ERROR)


def tiny() -> GPT2LMHeadModel:
    """The same weights in every case."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCABULARY, (LENGTH,), generator=generator) for _ in range(count)]
    # The first label has no prediction, but the Trainer would count it in the number of items that it divides by.
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in ids]
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def batch(number: int) -> dict[str, torch.Tensor]:
    """The micro-batch that a sequential sampler gives at this place."""
    part = rows(BATCH * (number + 1))[-BATCH:]
    return {key: torch.stack([row[key] for row in part]) for key in part[0]}


def second_loss(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().pow(2).mean()


# -- the Trainers ------------------------------------------------------------------------------------------------------


class Sequential(Trainer):
    """Its batches come in the order of the data set."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Summed(Sequential):
    """Two losses, one backward."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        out = model(**inputs)
        loss = out.loss + second_loss(out.logits)
        return (loss, out) if return_outputs else loss


class Twice(Sequential):
    """Two losses of one forward, two backwards."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        out = model(**self._prepare_inputs(inputs))
        self.accelerator.backward(out.loss, retain_graph=True, scale_wrt_gas=False)
        self.accelerator.backward(second_loss(out.logits), scale_wrt_gas=False)
        return out.loss.detach()


class TwoForwards(Sequential):
    """Two losses of two forwards, two backwards."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = model(**inputs).loss
        self.accelerator.backward(loss, scale_wrt_gas=False)
        self.accelerator.backward(second_loss(model(**inputs).logits), scale_wrt_gas=False)
        return loss.detach()


class ByHand(Sequential):
    """Two losses of one forward, two backwards and one step, by the engine's own methods; a read before the step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        out = model(**self._prepare_inputs(inputs))
        last, gas = self.accelerator.sync_gradients, self.args.gradient_accumulation_steps
        model.set_gradient_accumulation_boundary(last)
        model.backward(out.loss / gas, retain_graph=True, scale_wrt_gas=False)
        model.backward(second_loss(out.logits) / gas, scale_wrt_gas=False)
        if last:
            grad = safe_get_full_grad(next(model.module.parameters()))
            self.read = [*getattr(self, "read", []), float(grad.abs().sum())]
        model.step()
        return out.loss.detach()


class Failing(Sequential):
    """Raises in the second training step; ``text`` says what."""

    text = "boom"
    left = 1

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        if self.state.global_step == 1 and self.left:
            self.left -= 1
            raise RuntimeError(self.text)
        return super().training_step(model, inputs, *args)


class OutOfMemory(Failing):
    """Raises what auto_find_batch_size waits for."""

    text = "CUDA out of memory."


TRAINERS = {c.__name__: c for c in (Sequential, Summed, Twice, TwoForwards, ByHand, Failing, OutOfMemory)}


class Watch(TrainerCallback):
    """Writes down what a callback sees, and the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []
        self.trace: list[str] = []
        self.reads: list[str] = []
        self.engines: list[Any] = []
        self.before: dict[str, Any] = {}
        self.read_at = ""
        self.logs: list[list[str]] = []

    def engine(self, engine: Any) -> None:
        self.engines.append(engine)
        self.before = snapshot(engine)
        original = engine.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self.trace.append("optimizer.step")
            return original(*args, **kwargs)

        step.__wrapped__ = original  # type: ignore[attr-defined]
        if self.read_at:
            return
        vars(engine.optimizer)["step"] = step
        self.before = snapshot(engine)

    def _read(self, place: str) -> None:
        self.trace.append(place)
        if self.read_at == place:
            try:
                grad = safe_get_full_grad(next(self.engines[-1].module.parameters()))
                self.reads.append("None" if grad is None else f"{float(grad.abs().sum()):.6f}")
            except Exception as error:
                self.reads.append(f"{type(error).__name__}: {error}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read("on_pre_optimizer_step")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read("on_optimizer_step")

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.trace.append("on_step_end")
        if self.engines:
            self.weights.append([lab.full(p) for p in model.parameters()])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(sorted(logs))


# -- surroundings ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fresh(watch: Watch | None = None) -> Iterator[Path]:
    """No state of accelerate's from the case before, a folder that goes away, and every engine watched."""
    environ = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="zeroguard-hf-"))
    original = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if watch is not None:
            watch.engine(made[0])
        return made

    deepspeed.initialize = initialize
    try:
        _reset()
        yield folder
    finally:
        deepspeed.initialize = original
        _reset()
        os.environ.clear()
        os.environ.update(environ)
        shutil.rmtree(folder, ignore_errors=True)


def _reset() -> None:
    # Not destroying the process group: it is the worker's.
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def arguments(folder: Path, stage: int | None, *, gas: int = 1, offload: bool = False, **extra: Any) -> Any:
    if stage is not None:
        config = lab.ds_config(stage, offload, gas=gas)
        config |= dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
        )
        extra["deepspeed"] = {**config, **extra.pop("ds", {})}
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": gas,
        "learning_rate": lab.LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **extra,
    }
    return TrainingArguments(**given)


def callback(guarded: Any, **extra: Any) -> ZeroGuardTrainerCallback:
    config = {"sinks": []} if guarded is True else {"sinks": [], **guarded}
    return ZeroGuardTrainerCallback(config, **extra)


def unwrapped(watch: Watch) -> list[str]:
    """What is not what it was when the last engine was made."""
    places = changed(watch.before, snapshot(watch.engines[-1]))
    return [name for name in places if name.split(".")[0] not in ("params", "hooks")] + wrappers(watch.engines[-1])


def wrappers(engine: Any) -> list[str]:
    """What of zeroguard's is on an engine."""
    return [
        f"{type(owner).__name__}.{name}"
        for owner in (engine, engine.optimizer, engine.module)
        for name, value in vars(owner).items()
        if "zeroguard" in type(value).__module__ or "zeroguard" in name
    ]


# -- a training --------------------------------------------------------------------------------------------------------


def reference(
    trainer: str, steps: int, gas: int, optimizer: Callable[..., Any], clip: float = 0.0
) -> tuple[list[list[torch.Tensor]], list[float]]:
    """The weights after each step in plain PyTorch, and the sum of the first parameter's absolute gradient."""
    model = tiny()
    model.train()
    opt = optimizer(model.parameters())
    out, sums = [], []
    for step in range(steps):
        for micro in range(gas):
            result = model(**batch(step * gas + micro))
            loss = result.loss if trainer == "Sequential" else result.loss + second_loss(result.logits)
            (loss / gas).backward()
        sums.append(float(next(model.parameters()).grad.abs().sum()))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        out.append([p.detach().clone() for p in model.parameters()])
    return out, sums


def compare(mine: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> list[float]:
    """The largest difference of any parameter, for each step."""
    pairs = zip(mine, theirs, strict=False)
    return [max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True)) for one, two in pairs]


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=lab.LR),
    # A large epsilon: else Adam makes a whole update of the rounding of a gradient that is zero.
    "adamw_torch": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-3, weight_decay=0.0),
}


def train(
    stage: int,
    trainer: str = "Sequential",
    gas: int = 1,
    offload: bool = False,
    optim: str = "sgd",
    clip: float = 0.0,
    guarded: Any = True,
    how: str = "attach",
    read_at: str = "",
    steps: int = 3,
) -> dict[str, Any]:
    """A training under the Trainer, compared with plain PyTorch after each step."""
    watch = Watch()
    watch.read_at = read_at
    answer: dict[str, Any] = {"status": "exact", "error": "", "session": "open"}
    with fresh(watch) as folder:
        extra = {"max_grad_norm": clip, "optim": optim, "max_steps": steps}
        if optim != "sgd":
            extra |= {"learning_rate": 1e-3, "adam_epsilon": 1e-3}
        args = arguments(folder, stage, gas=gas, offload=offload, **extra)
        callbacks: list[Any] = [watch]
        made = None
        if guarded:
            made = callback(guarded, sinks=[lambda record: watch.trace.append(record.kind)])
        if made is not None and how == "list":
            callbacks.append(made)
        data = rows(BATCH * gas * steps)
        with _quiet():
            running = TRAINERS[trainer](model=tiny(), args=args, train_dataset=data, callbacks=callbacks)
            if made is not None and how == "add":
                running.add_callback(made)
            context = made.attach(running) if made is not None and how == "attach" else contextlib.nullcontext()
            try:
                with context:
                    running.train()
            except Exception as error:
                answer["status"], answer["error"] = "crash", f"{type(error).__name__}: {error}"
                answer["trace_back"] = traceback.format_exc()
        if made is not None:
            answer.update(lab.record(made.session))
            answer["closed"] = made.session is not None and made.session.closed
        if not watch.engines:
            return answer  # something failed before there was an engine
        answer["left"] = unwrapped(watch)
        answer["engine_steps"] = watch.engines[-1].global_steps
        answer["global_step"] = running.state.global_step
        answer["trace"], answer["reads"], answer["logs"] = watch.trace, watch.reads, watch.logs
        answer["history"] = running.state.log_history
        answer["by_hand"] = getattr(running, "read", [])
        expected, answer["true"] = reference(trainer, steps, gas, OPTIMIZERS[optim], clip)
        answer["differences"] = compare(watch.weights, expected)
        if answer["status"] == "exact" and not all(d <= 1e-6 for d in answer["differences"]):
            answer["status"] = "wrong"
        lab.release(watch.engines[-1])
    return answer


class Cleared(ByHand):
    """Takes the gradients away before its second step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss
        model.backward(loss)
        if self.state.global_step == 1:
            model.zero_grad()
        model.step()
        return loss.detach()


def true_norms(steps: int, gas: int, per: str) -> list[dict[str, float]]:
    """Of each step, in plain PyTorch."""
    model = tiny()
    model.train()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    out = []
    for step in range(steps):
        for micro in range(gas):
            (model(**batch(step * gas + micro)).loss / gas).backward()
        squares: dict[str, float] = {}
        for name, param in model.named_parameters():
            key = {"total": "total", "parameter": name, "module": name.rpartition(".")[0]}[per]
            squares[key] = squares.get(key, 0.0) + param.grad.double().pow(2).sum().item()
        out.append({f"zeroguard/grad_norm/{key}": square**0.5 for key, square in squares.items()})
        optimizer.step()
        optimizer.zero_grad()
    return out


def norms(
    stage: int, trainer: str = "Sequential", gas: int = 1, offload: bool = False, steps: int = 4, **options: Any
) -> dict[str, Any]:
    """What the history and an earlier callback get with ``grad_norms``, beside plain PyTorch's norms of each step.
    ``options`` are the callback's where they are its own, else of TrainingArguments."""
    own = {name: options.pop(name) for name in list(options) if name.startswith("grad_norm")}
    watch = Watch()
    with fresh(watch) as folder, _quiet(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = callback({"on_violation": "record"}, **{"grad_norms": "total", **own})
        args = arguments(folder, stage, gas=gas, offload=offload, max_steps=steps, **options)
        data = rows(BATCH * gas * steps)
        running = {**TRAINERS, "Cleared": Cleared}[trainer](
            model=tiny(), args=args, train_dataset=data, callbacks=[watch, made]
        )
        running.train()
        lab.release(watch.engines[-1])
    history = running.state.log_history
    named = [{name: v for name, v in row.items() if name.startswith("zeroguard/grad_norm")} for row in history]
    return {
        "rows": [[row["step"], found] for row, found in zip(history, named, strict=True) if found],
        "losses": [row["step"] for row in history if "loss" in row],
        "logged": [sum(name.startswith("zeroguard/grad_norm/") for name in logs) for logs in watch.logs],
        "true": true_norms(steps, gas, own.get("grad_norms", "total")),
        "warnings": [str(w.message) for w in told if "watch_norms" in str(w.message)],
        **lab.record(made.session),
    }


# -- finding the engine, and not finding it ----------------------------------------------------------------------------


def trainer_of(folder: Path, kind: type[Trainer], stage: int | None, callbacks: list[Any], **extra: Any) -> Trainer:
    args = arguments(folder, stage, **extra)
    data = rows(BATCH * 4)
    return kind(model=tiny(), args=args, train_dataset=data, eval_dataset=data[:BATCH], callbacks=callbacks)


class Owner(TrainerCallback):
    """Writes down which engine a callback guards, while it does."""

    def __init__(self, made: ZeroGuardTrainerCallback) -> None:
        self.made, self.engine = made, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session = self.made.session
        self.engine = None if session is None or session.closed else session._backend.engine


def two_trainers(stage: int) -> dict[str, Any]:
    """Two Trainers in one process, made before either trains."""
    with fresh() as folder, _quiet():
        made = [callback(True), callback(True)]
        owners = [Owner(one) for one in made]
        trainers = [trainer_of(folder, Sequential, stage, [c, o]) for c, o in zip(made, owners, strict=True)]
        for one in reversed(trainers):
            one.train()
        answer = {"own": [o.engine is t.model_wrapped for o, t in zip(owners, trainers, strict=True)]}
        answer["different"] = owners[0].engine is not owners[1].engine
        answer["first"] = [t.callback_handler.callbacks[0] is c for c, t in zip(made, trainers, strict=True)]
        for one in trainers:
            lab.release(one.model_wrapped)
    return answer


def one_callback_two_trainers(stage: int) -> dict[str, Any]:
    """The same callback in two Trainers, and twice in one."""
    with fresh() as folder, _quiet():
        made = callback(True)
        owner = Owner(made)
        trainers = [trainer_of(folder, Sequential, stage, [owner, made]) for _ in range(2)]
        answer: dict[str, Any] = {"own": [], "counts": []}
        for one in trainers:
            one.train()
            answer["own"].append(owner.engine is one.model_wrapped)
            answer["counts"].append(made.counters["guards"]["trainer_steps"]["checks"])
        made.attach(trainers[0]).attach(trainers[0])
        answer["listed"] = sum(c is made for c in trainers[0].callback_handler.callbacks)
        answer["summary"] = made.summary()
        for text, call in {
            "second": lambda: callback(True).attach(trainers[0]),
            "no_trainer": lambda: callback(True).attach(tiny()),
            "missing": lambda: callback(True, missing="ignore"),
            "config": lambda: ZeroGuardTrainerCallback(on_violatoin="warn"),
        }.items():
            answer[text] = raised(call)
        for one in trainers:
            lab.release(one.model_wrapped)
    return answer


class LetGo(TrainerCallback):
    """Lets go of what it is given in the middle of a training."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.held.clear()
        gc.collect()


def folds(stage: int) -> dict[str, Any]:
    """One callback in two Trainers: the end of the first comes while the second one trains."""
    with fresh() as folder, _quiet():
        made, held = callback(True), []
        first = trainer_of(folder, Sequential, stage, [made])
        first.train()
        lab.release(first.model_wrapped)
        gone = weakref.ref(first)
        second = trainer_of(folder, Sequential, stage, [made, LetGo(held)])
        held.append(first)
        del first
        second.train()
        lab.release(second.model_wrapped)
        return {"first_gone": gone() is None, "checks": made.counters["guards"]["trainer_steps"]["checks"]}


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


@contextlib.contextmanager
def heard() -> Iterator[tuple[list[str], list[str]]]:
    """What the logger zeroguard and warnings.warn say."""
    handler = Records()
    logger = logging.getLogger("zeroguard")
    logger.addHandler(handler)
    said: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", message="zeroguard")
            yield handler.texts, said
        said += [f"{w.category.__name__}: {w.message}" for w in caught]
    finally:
        logger.removeHandler(handler)


def no_engine(stage: int | None, missing: str = "warn", how: str = "list") -> dict[str, Any]:
    """A training without DeepSpeed: stage None, or ACCELERATE_USE_CPU in the worker's environment."""
    with fresh() as folder, _quiet(), heard() as (logged, warned):
        made = callback(True, missing=missing)
        running = trainer_of(folder, Sequential, stage, [made] if how == "list" else [])
        if how == "attach":
            made.attach(running)
        error = raised(running.train)
        history = running.state.log_history
    return {"logged": logged, "warned": warned, "error": error, "history": history, "summary": made.summary()}


def again(stage: int, model_init: bool = False) -> dict[str, Any]:
    """train() twice with one Trainer: without model_init the Trainer itself cannot do that under DeepSpeed."""
    with fresh() as folder, _quiet(), heard() as (logged, warned):
        made = callback(True)
        extra = {"model": None, "model_init": tiny} if model_init else {"model": tiny()}
        args = arguments(folder, stage)
        owner = Owner(made)
        running = Sequential(args=args, train_dataset=rows(BATCH * 4), callbacks=[made, owner], **extra)
        running.train()
        first = running.model_wrapped
        error = raised(running.train)
        answer = {
            "error": error,
            "closed": made.session is not None and made.session.closed,
            "new": running.model_wrapped is not first,
            "own": owner.engine is running.model_wrapped,
            "left": wrappers(first) + wrappers(running.model_wrapped),
            "checks": made.counters["guards"]["trainer_steps"]["checks"],
        }
        lab.release(first)
        lab.release(running.model_wrapped)
    return {**answer, "logged": logged, "warned": warned}


def evaluation(stage: int) -> dict[str, Any]:
    """evaluate() and predict() alone, then a training with evaluations in it."""
    with fresh() as folder, _quiet(), heard() as (logged, warned):
        made = callback(True)
        running = trainer_of(folder, Sequential, stage, [made])
        alone = [raised(running.evaluate), raised(lambda: running.predict(running.eval_dataset))]
        before = made.session is None
        lab.release(running.model_wrapped)
        _reset()
        watch = Watch()
        extra = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1}
        second = trainer_of(folder, Sequential, stage, [watch, made], **extra)
        second.train()
        answer = {"alone": alone, "no_session": before, "history": second.state.log_history, **lab.record(made.session)}
        lab.release(second.model_wrapped)
    return {**answer, "logged": logged, "warned": warned, "logs": watch.logs}


# -- exceptions and resumes --------------------------------------------------------------------------------------------


def failing(stage: int, how: str) -> dict[str, Any]:
    """A training step raises. ``with``: in a with block; ``list``: without, and the Trainer ends."""
    watch = Watch()
    with fresh(watch) as folder, _quiet():
        made = callback(True)
        running = trainer_of(folder, Failing, stage, [watch, made])
        answer: dict[str, Any] = {}
        if how == "with":
            with made.attach(running):
                answer["error"] = raised(running.train)
        else:
            answer["error"] = raised(running.train)
            answer["open"] = made.session is not None and not made.session.closed
            gone = weakref.ref(running)
            del running
            gc.collect()
            answer["gone"] = gone() is None
        answer["left"] = unwrapped(watch)
        answer["closed"] = made.session is not None and made.session.closed
        lab.release(watch.engines[-1])
    return answer


def two_engines(stage: int) -> dict[str, Any]:
    """auto_find_batch_size: the first engine fails, a second one is made in the same train()."""
    watch = Watch()
    with fresh(watch) as folder, _quiet():
        made = callback(True)
        owner = Owner(made)
        running = trainer_of(folder, OutOfMemory, stage, [watch, made, owner], auto_find_batch_size=True)
        error = raised(running.train)
        answer = {
            "error": error,
            "engines": len(watch.engines),
            "last": owner.engine is watch.engines[-1],
            "left": [wrappers(engine) for engine in watch.engines],
            "steps": running.state.global_step,
            **lab.record(made.session),
        }
        for engine in watch.engines:
            lab.release(engine)
    return answer


def resume(stage: int, restore: bool, how: str = "list", first: bool = True) -> dict[str, Any]:
    """Two of four steps, then a new Trainer goes on; without ``first`` the checkpoint is from before zeroguard."""
    watches = [Watch(), Watch()]
    records: list[str] = []
    answer: dict[str, Any] = {}
    with fresh(watches[0]) as folder, _quiet():
        extra = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": restore}
        made = callback(True, grad_norm=True) if first else None
        running = trainer_of(folder, Sequential, stage, [watches[0], *([made] if made else [])], max_steps=2, **extra)
        running.train()
        if made is not None:
            answer["before"] = made.counters["guards"]["trainer_steps"]
        lab.release(running.model_wrapped)
        checkpoint = str(folder / "checkpoint-2")
        answer["saved"] = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["stateful_callbacks"]
        _reset()
        made = callback({"on_violation": "warn"}, grad_norm=True, sinks=[lambda record: records.append(record.kind)])
        owner = Owner(made)
        callbacks = [watches[1], owner, *([made] if how == "list" else [])]
        # A late read in each step: something to find.
        watches[1].read_at = "on_optimizer_step"
        second = trainer_of(folder, Sequential, stage, callbacks, max_steps=4, **extra)
        watches[1].engines = watches[0].engines
        with made.attach(second) if how == "attach" else contextlib.nullcontext():
            second.train(resume_from_checkpoint=checkpoint)
        in_list = [c for c in second.callback_handler.callbacks if isinstance(c, ZeroGuardTrainerCallback)]
        answer["listed"], answer["same"] = len(in_list), in_list[0] is made
        answer["first"] = second.callback_handler.callbacks[0] is in_list[0]
        answer["own"] = owner.engine is second.model_wrapped
        answer["closed"] = made.session is not None and made.session.closed
        answer["after"] = made.counters["guards"]["trainer_steps"]
        answer["sink"], answer["history"] = records, second.state.log_history
        answer["totals"] = made.summary()
        answer["saved_again"] = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
        expected, _ = reference("Sequential", 4, 1, OPTIMIZERS["sgd"])
        answer["differences"] = compare(watches[0].weights + watches[1].weights, expected)
        answer.update(lab.record(made.session))
        lab.release(second.model_wrapped)
    return answer


def from_json(stage: int) -> dict[str, Any]:
    """The key ``zeroguard`` of the DeepSpeed configuration, given to TrainingArguments."""
    with fresh() as folder, _quiet():
        made = ZeroGuardTrainerCallback(sinks=[])
        ds = {"zeroguard": {"guards": [{"name": "retained_graph", "action": "detect"}], "sinks": []}}
        running = trainer_of(folder, Sequential, stage, [made], ds=ds)
        running.train()
        answer = lab.record(made.session)
        lab.release(running.model_wrapped)
    return answer


def kept(stage: int, guarded: bool = True) -> dict[str, Any]:
    """What is still there when only the callback is held."""
    with fresh() as folder, _quiet():
        made = callback(True)
        running = trainer_of(folder, Sequential, stage, [made] if guarded else [])
        running.train()
        engine, trainer = weakref.ref(running.model_wrapped), weakref.ref(running)
        lab.release(running.model_wrapped)
        del running
        _reset()
        gc.collect()
        return {"trainer": trainer() is not None, "engine": engine() is not None, "summary": made.summary()}


def versions() -> dict[str, str]:
    """What the worker imports."""
    import accelerate
    import transformers

    return {module.__name__: module.__version__ for module in (accelerate, deepspeed, transformers)}


def exported() -> dict[str, Any]:
    """state() through JSON and back, as the Trainer does it."""
    config = zeroguard.load_config({"guards": [{"name": "retained_graph", "action": "detect"}], "sinks": []})
    out = {}
    with fresh() as folder:
        file = folder / "guard.json"
        file.write_text(json.dumps({"on_violation": "warn"}))
        for name, made in {
            "model": ZeroGuardTrainerCallback(
                config, grad_norm=True, grad_norms="module", grad_norms_every_n_steps=5, missing="raise"
            ),
            "dict": ZeroGuardTrainerCallback({"on_violation": "warn"}),
            "overrides": ZeroGuardTrainerCallback(agree=False, guards=({"name": "host_read"},)),
            "path": ZeroGuardTrainerCallback(file),
        }.items():
            state = json.loads(json.dumps(made.state()))
            made_again = ZeroGuardTrainerCallback.from_state(state)
            out[name] = {"state": state, "same": json.loads(json.dumps(made_again.state())) == state}
    return out


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The Trainer prints its logs."""
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        yield


# -- Accelerate without the Trainer ------------------------------------------------------------------------------------


def accelerated(
    stage: int, gas: int = 1, offload: bool = False, clip: float = 0.0
) -> tuple[Accelerator, Any, Any, Any]:
    """An Accelerator with a prepared model, its optimizer and its batches."""
    config = lab.ds_config(stage, offload, gas=gas, gradient_clipping=clip)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=lab.LR)
    batches = torch.utils.data.DataLoader(rows(BATCH * gas * 3), batch_size=BATCH)
    return accelerator, *accelerator.prepare(model, optimizer, batches)


def _backwards(accelerator: Accelerator, model: Any, pattern: str, out: Any, micro: dict[str, Any]) -> None:
    one, two = out.loss, second_loss(out.logits)
    if pattern == "one":
        accelerator.backward(one)
    elif pattern == "summed":
        accelerator.backward(one + two)
    elif pattern == "two":
        accelerator.backward(one, retain_graph=True)
        accelerator.backward(two)
    elif pattern == "two_forwards":
        accelerator.backward(one)
        accelerator.backward(second_loss(model(**micro).logits))
    elif pattern == "accumulate_each":  # gradient_accumulation_steps counts the losses of a batch
        with accelerator.accumulate(model):
            accelerator.backward(one, retain_graph=True)
        with accelerator.accumulate(model):
            accelerator.backward(two)
    elif pattern == "engine":
        model.backward(one, retain_graph=True)
        model.backward(two)
        model.step()


def accelerate(
    stage: int,
    pattern: str = "one",
    gas: int = 1,
    offload: bool = False,
    clip: float = 0.0,
    guarded: Any = True,
    by: str = "accelerator",
    read_late: bool = False,
    fail: bool = False,
    teardown: str = "",
) -> dict[str, Any]:
    """Three steps of an Accelerate loop, compared with plain PyTorch after each."""
    watch = Watch()
    answer: dict[str, Any] = {"status": "exact", "error": ""}
    with fresh(watch) as folder:
        accelerator, model, optimizer, batches = accelerated(stage, gas, offload, clip)
        engine = watch.engines[-1]
        session = None
        try:
            with lab.guard_of({"accelerator": accelerator, "model": model}[by], guarded) as session:
                for number, micro in enumerate(batches):
                    if fail and number == 1:
                        raise RuntimeError("boom")
                    if pattern == "accumulate_each":
                        _backwards(accelerator, model, pattern, model(**micro), micro)
                    else:
                        with accelerator.accumulate(model):
                            _backwards(accelerator, model, pattern, model(**micro), micro)
                    if read_late:
                        watch.reads.append(raised(lambda: safe_get_full_grad(next(engine.module.parameters()))))
                    optimizer.step()
                    optimizer.zero_grad()
                    if (number + 1) % (1 if pattern == "accumulate_each" else gas) == 0:
                        watch.weights.append([lab.full(p) for p in engine.module.parameters()])
                if teardown == "save":
                    accelerator.save_state(str(folder / "state"))
                    accelerator.load_state(str(folder / "state"))
                if teardown == "free":
                    accelerator.free_memory()
        except Exception as error:
            answer["status"], answer["error"] = "crash", f"{type(error).__name__}: {error}"
            answer["trace_back"] = traceback.format_exc()
        answer.update(lab.record(session))
        if teardown != "free":
            answer["left"] = unwrapped(watch)
        answer["marks"] = wrappers(engine)
        answer["steps"], answer["reads"], answer["trace"] = engine.global_steps, watch.reads, watch.trace
        kind = "Sequential" if pattern == "one" else "Summed"
        count = 1 if pattern == "accumulate_each" else gas
        expected, _ = reference(kind, 3, count, OPTIMIZERS["sgd"], clip)
        answer["differences"] = compare(watch.weights, expected)
        if answer["status"] == "exact" and not all(d <= 1e-6 for d in answer["differences"]):
            answer["status"] = "wrong"
        lab.release(engine)
    return answer


def candidates(stage: int) -> dict[str, Any]:
    """What zeroguard.guard takes, and what it says of the rest."""
    answer: dict[str, Any] = {}
    with fresh() as folder, _quiet():
        accelerator, model, _, _ = accelerated(stage)
        for name, one in {"accelerator": accelerator, "model": model}.items():
            with zeroguard.guard(one, {"sinks": []}) as session:
                answer[name] = session._backend.engine is model
        answer["plain_model"] = raised(lambda: zeroguard.guard(tiny()))
        answer["inner_model"] = raised(lambda: zeroguard.guard(accelerator.unwrap_model(model)))
        lab.release(model)
        _reset()
        answer["no_deepspeed"] = raised(lambda: zeroguard.guard(Accelerator(cpu=True)))
        _reset()
        running = trainer_of(folder, Sequential, stage, [])
        answer["before_train"] = raised(lambda: zeroguard.guard(running))
        running.train()
        for name, one in {"trainer": running, "wrapped": running.model_wrapped}.items():
            with zeroguard.guard(one, {"sinks": []}) as session:
                answer[name] = session._backend.engine is running.model_wrapped
        answer["trainer_model"] = raised(lambda: zeroguard.guard(running.model))
        lab.release(running.model_wrapped)
    return answer


def ended(stage: int) -> dict[str, Any]:
    """Teardown in the wrong order while guarded. Takes the process group down: for a worker of its own."""
    accelerator, model, optimizer, batches = accelerated(stage)
    answer: dict[str, Any] = {}
    with zeroguard.guard(accelerator, {"sinks": []}) as session:
        for micro in batches:
            accelerator.backward(model(**micro).loss)
            optimizer.step()
        answer["errors"] = {"end": raised(accelerator.end_training), "free": raised(accelerator.free_memory)}
    answer["closed"], answer["left"], answer["steps"] = session.closed, wrappers(model), model.global_steps
    return answer
