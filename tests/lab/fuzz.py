"""One program of tests/fuzz/grammar.py on a guarded engine and, in step with it, in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import shutil
import traceback
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroguard
from tests.lab import giveback
from tests.lab import programs as lab

LR = 0.1
AUDIT = {"name": "gradient_audit", "elements_per_parameter": "all", "every_n_steps": 1, "action": "raise"}
UNTOUCHED = {"name": "accumulator_reset", "idle": "untouched"}
DETECT = [{"name": "retained_graph", "action": "detect"}, {"name": "accumulator_reset", "action": "detect"}]
#: eps is large, so that Adam does not blow the rounding of a small gradient up to a step of its own
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LR),
    "momentum": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-2, weight_decay=0.1),
}
#: what DeepSpeed itself replaces on its objects, beyond giveback.MOVING
MOVING = {"param_dict", "trace_mode"}

_ready = False


class Stop(Exception):
    """Raised inside a forward."""


class Heads(nn.Module):
    """A trunk and three heads of odd sizes; a forward runs some of the heads, and raises between trunk and heads when
    it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 3), nn.Linear(6, 7, bias=False)])

    def forward(self, x: torch.Tensor, heads: list[int], stop: bool = False) -> tuple[torch.Tensor, ...]:
        z = torch.tanh(self.trunk(x))
        if stop:
            raise Stop
        return tuple(self.heads[head](z) for head in heads)


def loss_of(head: int, out: torch.Tensor) -> torch.Tensor:
    """Each head has a loss of its own; none of them has a gradient that vanishes at the start."""
    return (out - 0.5 * head).pow(2).mean()


class Twin:
    """An engine and plain PyTorch, which do the same."""

    def __init__(self, config: dict[str, Any], store: str) -> None:
        self.config, self.store = config, store
        self.gas = config["gas"]
        zero = dict(config["zero"])
        extra = {} if config["managed"] else {"managed_gradient_accumulation": False}
        torch.manual_seed(0)
        settings = lab.ds_config(config["stage"], config["offload"], "fp32", self.gas, zero, **extra)
        self.engine, model, optimizer = lab.build(Heads(), settings, OPTIMIZERS[config["optimizer"]])
        self.reference = lab.Reference(model, optimizer, torch.float32)
        self.outs: dict[int, dict[int, torch.Tensor]] = {}
        self.ref_outs: dict[int, list[dict[int, torch.Tensor]]] = {}
        self.steps = self.saves = 0
        self.loaded = False
        self.unused: set[int] = set()  # graphs over which no backward has run
        self.abandoned = False  # one of these is gone, and DeepSpeed goes on waiting for its backward
        self.saved: Any = None
        self.cleared = False
        self.ours = False  # the reference is running: what is raised now is the fuzzer's own mistake

    # -- the two sides of each operation, by name ----------------------------------------------------------------------

    def forward(self, at: int, slot: int, heads: list[int]) -> None:
        self._drop(slot)
        xs, x = lab.batches(at)
        self.outs[slot] = dict(zip(heads, self.engine(x, heads), strict=True))
        self.unused.add(slot)
        self.ours = True
        self.ref_outs[slot] = [
            dict(zip(heads, work(data, heads), strict=True)) for work, data in zip(self.reference.work, xs, strict=True)
        ]

    def _drop(self, *slots: int) -> None:
        for slot in slots or list(self.outs):
            self.outs.pop(slot, None)
            self.ref_outs.pop(slot, None)
            self.abandoned = self.abandoned or slot in self.unused
            self.unused.discard(slot)

    def backward(self, at: int, terms: list[list[int]], by: str, retain: bool) -> None:
        loss = sum(loss_of(head, self.outs[slot][head]) for slot, head in terms)
        lab._run(self.engine, loss, by, retain)
        self.ours = True
        for rank in range(self.reference.ranks):
            loss = sum(loss_of(head, self.ref_outs[slot][rank][head]) for slot, head in terms)
            (loss / self.gas).backward(retain_graph=retain)
        self.cleared = False
        self.unused -= {slot for slot, _ in terms}
        if not retain:
            self._drop(*{slot for slot, _ in terms})

    def zero_grad(self, at: int, by: str) -> None:
        {"engine": self.engine, "optimizer": self.engine.optimizer, "module": self.engine.module}[by].zero_grad()
        self.reference.zero_grad()
        self.cleared = True

    def boundary(self, at: int, value: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(value)

    def step(self, at: int, applies: bool) -> None:
        self.engine.step()
        if applies:
            self.ours = True
            self._drop()
            self._reference_step()
            self.cleared = False

    def eval(self, at: int, mode: bool, heads: list[int]) -> None:
        if mode:
            self.engine.eval()
        with torch.no_grad():
            self.engine(lab.batches(at)[1], heads)
        if mode:
            self.engine.train()

    def stop(self, at: int, heads: list[int]) -> None:
        try:
            self.engine(lab.batches(at)[1], heads, True)
        except Stop:
            self.abandoned = True
            return
        raise AssertionError("the forward did not raise")

    def freeze(self, at: int, head: int, on: bool) -> None:
        self._drop()
        for model in (self.engine.module, self.reference.master, *self.reference.work):
            model.heads[head].requires_grad_(not on)

    def save(self, at: int) -> None:
        self.saves += 1
        self.engine.save_checkpoint(self.store, tag=f"save{self.saves}")
        master, optimizer = self.reference.master.state_dict(), self.reference.optimizer.state_dict()
        self.saved = copy.deepcopy((master, optimizer, self.steps))

    def load(self, at: int) -> None:
        self._drop()
        self.loaded = True
        path, _ = self.engine.load_checkpoint(self.store, tag=f"save{self.saves}")
        assert path is not None
        self.ours = True
        master, optimizer, self.steps = copy.deepcopy(self.saved)
        self.reference.master.load_state_dict(master)
        self.reference.optimizer.load_state_dict(optimizer)
        self.reference.zero_grad()
        for work in self.reference.work:
            work.load_state_dict(self.reference.master.state_dict())

    # -- plain PyTorch's step --------------------------------------------------------------------------------------

    def _reference_step(self) -> None:
        """Plain PyTorch, but for what the documentation says of parameters without a gradient."""
        reference, config = self.reference, self.config
        self.before = [p.detach().clone() for p in reference.master.parameters()]
        fill = False
        if config["stage"] == 0:
            # DeepSpeed gives those that may have one a zero where it reduces: at a boundary backward, or in an
            # unmanaged step (engine.py, _get_gradients_for_reduction).
            fill = not self.cleared or not config["managed"]
        elif config["optimizer"] == "momentum":
            fill = config["idle"] == "zero_gradient"
        for params in zip(*(work.parameters() for work in reference.work), strict=True):
            if fill and params[0].grad is None and (params[0].requires_grad or config["stage"]):
                for param in params:
                    param.grad = torch.zeros_like(param)
        if config["optimizer"] == "adamw" and config["stage"]:
            # One step counter a flat partition: it counts for all parameters in it.
            for param in reference.master.parameters():
                state = reference.optimizer.state[param]
                state["step"] = torch.tensor(float(self.steps))
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
        reference.step()
        self.steps += 1

    def compare(self) -> tuple[float, float]:
        """The largest difference, and how large it may be; then the reference goes on from the engine's weights, so
        that each step is judged alone. COLLECTIVE."""
        masters = list(self.reference.master.parameters())
        ours = lab.weights(self.engine)
        pairs = list(zip(ours, masters, strict=True))
        worst = torch.tensor(max((a - b.detach()).abs().max().item() for a, b in pairs))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        moved = max((b.detach() - a).abs().max().item() for a, b in zip(self.before, masters, strict=True))
        largest = max(b.detach().abs().max().item() for b in masters)
        limit = max(1e-6 * moved, torch.finfo(torch.float32).eps * largest)
        if worst.item() <= limit:
            with torch.no_grad():
                for index, (value, master) in enumerate(pairs):
                    for target in (master, *(list(work.parameters())[index] for work in self.reference.work)):
                        target.copy_(value)
        return worst.item(), limit

    def window(self, at: int) -> None:
        """A whole window that reaches everything, as a healthy loop has it."""
        for head in range(3):
            self.freeze(at, head, False)
        micros = self.gas - self.engine.micro_steps % self.gas
        if self.engine._is_gradient_accumulation_boundary is not None:
            self.boundary(at, True)
            micros = 1
        elif not self.config["managed"]:
            micros = 1
        for micro in range(micros):
            self.forward(at + micro, 0, [0, 1, 2])
            self.backward(at, [[0, 0], [0, 1], [0, 2]], "engine", False)
            self.step(at, micro == micros - 1)


def guards_of(config: dict[str, Any]) -> dict[str, Any]:
    mode = config["mode"]
    if mode == "audit":
        guards: list[Any] = [AUDIT]
    elif mode == "detect":
        guards = DETECT if config["stage"] else DETECT[:1]
    else:
        own = [UNTOUCHED] if config["idle"] == "untouched" and config["stage"] else []
        guards = [{"name": "automatic"}, *own, AUDIT]
    return {"sinks": [], "guards": guards, "on_violation": "record"}


def run(config: dict[str, Any], program: list[dict[str, Any]], guarded: bool = True) -> dict[str, Any]:
    """Run a legal program. The answer's ``status`` is exact, wrong, crash or reference (which is our own mistake)."""
    global _ready
    if not _ready:
        # What the first engine imports would be walked by every collection.
        Twin({**config, "stage": 3}, "")
        gc.collect()
        gc.freeze()
        _ready = True
    store = f"{os.environ['LAB_STORE']}-saved"
    answer: dict[str, Any] = {"status": "exact", "steps": [], "error": "", "at": -1}
    twin = Twin(config, store)
    session = None
    try:
        if config["warm"]:
            for number in range(2):
                twin.window(1000 + 10 * number)
                twin.compare()
        before = giveback._snapshot(twin.engine)
        if guarded:
            session = zeroguard.guard(twin.engine, guards_of(config))
        try:
            _operate(twin, program, session, answer)
        finally:
            if session is not None:
                session.close()
                answer.update(lab.record(session))
                answer["severe"] = [f.kind for f in session.findings if f.severity != "info"]
        if answer["status"] == "exact" and guarded:
            _at_rest(twin, before, answer)
        if answer["status"] == "exact" and config["mode"] == "repair":
            _afterwards(twin, answer)
    finally:
        _release(twin, session, answer)
        if dist.get_rank() == 0:
            shutil.rmtree(store, ignore_errors=True)
    return answer


def _operate(twin: Twin, program: list[dict[str, Any]], session: Any, answer: dict[str, Any]) -> None:
    for at, entry in enumerate(program):
        operation = dict(entry)
        name = operation.pop("op")
        twin.ours = False
        try:
            getattr(twin, name)(at, **operation)
        except Exception as error:
            answer.update(status="reference" if twin.ours else "crash", at=at, error=f"{type(error).__name__}: {error}")
            answer["trace"] = traceback.format_exc()
            return
        if name == "step" and operation["applies"]:
            difference, limit = twin.compare()
            said = 0 if session is None else sum(f.severity != "info" for f in session.findings)
            answer["steps"].append({"at": at, "difference": difference, "limit": limit, "said": said})
            if difference > limit:
                answer.update(status="wrong", at=at)
                return


def _at_rest(twin: Twin, before: dict[str, Any], answer: dict[str, Any]) -> None:
    engine = twin.engine
    after = giveback._snapshot(engine)
    for part, names in before.items():  # what DeepSpeed makes when it is first needed is no change
        after[part] = {name: after[part][name] for name in names if name in after[part]}
    if twin.loaded:  # DeepSpeed links parameters anew, and PyTorch makes new dicts
        for part in ("params", "mappings", *(() if twin.config["stage"] else ("optimizer",))):
            before.pop(part)
    answer["changed"] = [n for n in giveback._changed(before, after) if n.split(".")[-1] not in MOVING]
    objects = [engine, engine.optimizer, engine.module, *engine.module.modules(), *engine.module.parameters()]
    for thing in objects:
        for name, value in vars(thing).items():
            home = getattr(getattr(value, "func", value), "__module__", None) or type(value).__module__
            if str(home).startswith("zeroguard"):
                answer["changed"].append(f"{type(thing).__name__}.{name} is zeroguard's")
    state = getattr(engine.optimizer, "_backward_hook_state", None)
    rest = {}
    if state is not None:
        rest = {"depth": state.backward_active_depth, "hooks": state.remaining_grad_acc_hooks}
    if twin.config["stage"] == 3:
        rest["flying"] = sum(p.ds_status.name == "INFLIGHT" for p in engine.module.parameters())
        if not (twin.abandoned or twin.unused):
            counted = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
            rest["counters"] = sum(max(0, vars(m).get(c, 0)) for m in engine.module.modules() for c in counted)
    answer["left"] = {name: value for name, value in rest.items() if value}


def _afterwards(twin: Twin, answer: dict[str, Any]) -> None:
    """Without a guard a healthy loop goes on as if there had been none."""
    try:
        for number in range(2):
            twin.window(2000 + 10 * number)
            difference, limit = twin.compare()
            if difference > limit:
                answer["afterwards"] = f"window {number} after close: {difference:.2e} > {limit:.2e}"
                return
    except Exception:
        answer["afterwards"] = traceback.format_exc()


def _release(twin: Twin, session: Any, answer: dict[str, Any]) -> None:
    held = None if session is None else weakref.ref(session)
    engine = weakref.ref(twin.engine)
    module = weakref.ref(twin.engine.module)
    with contextlib.suppress(Exception):
        twin.engine.destroy()
    stage = twin.config["stage"]
    vars(twin).clear()
    del session
    if answer["status"] == "exact":
        answer["alive"] = (held, engine, module, stage)


def answer_alive(answer: dict[str, Any]) -> None:
    """What still lives when the case's frames are gone."""
    refs = answer.pop("alive", None)
    if refs is None:
        return
    gc.collect()
    held, engine, module, stage = refs
    alive = [] if held is None or held() is None else ["session"]
    if stage < 3:
        alive += [name for name, ref in (("engine", engine), ("module", module)) if ref() is not None]
    else:  # DeepSpeed itself keeps such an engine alive for ever; every later collection would walk it
        gc.freeze()
    if alive:
        answer["leaked"] = alive


def case(config: dict[str, Any], program: list[dict[str, Any]], guarded: bool = True) -> dict[str, Any]:
    """:func:`run`, and what it leaves in memory."""
    answer = run(config, program, guarded)
    answer_alive(answer)
    return answer
