"""One program of tests/fuzz/grammar.py on a guarded engine and, in step with it, in plain PyTorch."""

from __future__ import annotations

import contextlib
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
from tests.lab import identity, idle
from tests.lab import programs as lab
from tests.lab.fuzz_plain import OPTIMIZERS, Plain, loss_of

AUDIT = {"name": "gradient_audit", "elements_per_parameter": "all", "every_n_steps": 1, "action": "raise"}
UNTOUCHED = {"name": "accumulator_reset", "idle": "untouched"}
DETECT = [{"name": "retained_graph", "action": "detect"}, {"name": "accumulator_reset", "action": "detect"}]
#: how each dtype is configured; a dynamic scale starts where the first steps overflow, and is halved by each
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "fp16-dynamic": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 1000}},
}
#: what DeepSpeed itself replaces on its objects, beyond identity.MOVING
MOVING = {"param_dict", "trace_mode"}

NOT_FINITE = "it stepped where autograd delivered gradients that are not finite"

_ready = False


class Stop(Exception):
    """Raised inside a forward."""


class Heads(nn.Module):
    """A trunk and three heads of odd sizes; a forward runs some of the heads, and raises between trunk and heads when
    it is told to. ``boom``: its backward raises between heads and ``trunk``, or above the ``heads``."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 3), nn.Linear(6, 7, bias=False)])

    def forward(
        self, x: torch.Tensor, heads: list[int], stop: bool = False, boom: str = ""
    ) -> tuple[torch.Tensor, ...]:
        z = idle.Boom.apply(torch.tanh(self.trunk(x)), boom == "trunk")
        if stop:
            raise Stop
        return tuple(idle.Boom.apply(self.heads[head](z), boom == "heads") for head in heads)


class Twin:
    """An engine and plain PyTorch, which do the same."""

    def __init__(self, config: dict[str, Any], store: str) -> None:
        self.config, self.store = config, store
        self.gas = config["gas"]
        self.dtype = config.get("dtype", "fp32")
        zero = dict(config["zero"])
        extra = {**PRECISION[self.dtype], "gradient_clipping": config.get("clip", 0.0)}
        if not config["managed"]:
            extra["managed_gradient_accumulation"] = False
        torch.manual_seed(0)
        settings = lab.ds_config(config["stage"], config["offload"], "fp32", self.gas, zero, **extra)
        self.engine, model, optimizer = lab.build(Heads(), settings, OPTIMIZERS[config["optimizer"]])
        self.plain = Plain(model, optimizer, config, dist.get_world_size())
        self.outs: dict[int, dict[int, torch.Tensor]] = {}
        self.saves = 0
        self.scale = self._scale()
        self.odd = ""  # what the engine did to its loss scale
        self.loaded = False
        self.unused: set[int] = set()  # graphs over which no backward has run
        self.abandoned = False  # one of these is gone, and DeepSpeed goes on waiting for its backward
        self.saved: Any = None
        self.cleared = False
        self.ours = False  # the reference is running: what is raised now is the fuzzer's own mistake

    def _scale(self) -> float:
        return float(self.engine.optimizer.cur_scale) if self.dtype.startswith("fp16") else 1.0

    def _x(self, at: int) -> torch.Tensor:
        return lab.batches(at)[1].to(self.plain.dtype)

    # -- the two sides of each operation, by name ----------------------------------------------------------------------

    def forward(self, at: int, slot: int, heads: list[int]) -> None:
        self._drop(slot)
        self.outs[slot] = dict(zip(heads, self.engine(self._x(at), heads), strict=True))
        self.unused.add(slot)
        self.ours = True
        self.plain.forward(slot, heads, lab.batches(at)[0])

    def _drop(self, *slots: int) -> None:
        for slot in slots or list(self.outs):
            self.outs.pop(slot, None)
            self.plain.outs.pop(slot, None)
            self.abandoned = self.abandoned or slot in self.unused
            self.unused.discard(slot)

    def backward(self, at: int, terms: list[list[int]], by: str, retain: bool) -> None:
        loss = sum(loss_of(head, self.outs[slot][head]) for slot, head in terms)
        lab._run(self.engine, loss, by, retain)
        self.ours = True
        self.plain.backward(terms, retain, self.scale / self.gas)
        self.cleared = False
        self.unused -= {slot for slot, _ in terms}
        if not retain:
            self._drop(*{slot for slot, _ in terms})

    def zero_grad(self, at: int, by: str) -> None:
        {"engine": self.engine, "optimizer": self.engine.optimizer, "module": self.engine.module}[by].zero_grad()
        self.plain.zero_grad()
        self.cleared = True

    def boom(self, at: int, heads: list[int], by: str, place: str) -> None:
        """A backward that raises half way. What it has delivered is for zero_grad to take away, which follows."""
        out = self.engine(self._x(at), heads, False, place)
        try:
            lab._run(self.engine, sum(loss_of(head, y) for head, y in zip(heads, out, strict=True)), by, False)
        except ValueError:
            self._drop()
            return
        raise AssertionError("the backward did not raise")

    def boundary(self, at: int, value: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(value)

    def step(self, at: int, applies: bool) -> None:
        self.engine.step()
        if applies:
            self.ours = True
            self._drop()
            self._plain_step()
            self.cleared = False

    def eval(self, at: int, mode: bool, heads: list[int]) -> None:
        if mode:
            self.engine.eval()
        with torch.no_grad():
            self.engine(self._x(at), heads)
        if mode:
            self.engine.train()

    def stop(self, at: int, heads: list[int]) -> None:
        try:
            self.engine(self._x(at), heads, True)
        except Stop:
            self.abandoned = True
            return
        raise AssertionError("the forward did not raise")

    def freeze(self, at: int, head: int, on: bool) -> None:
        self._drop()
        for model in (self.engine.module, *self.plain.models):
            model.heads[head].requires_grad_(not on)

    def save(self, at: int) -> None:
        self.saves += 1
        self.engine.save_checkpoint(self.store, tag=f"save{self.saves}")
        self.saved = (self.plain.state(), self.scale)

    def load(self, at: int) -> None:
        self._drop()
        self.loaded = True
        path, _ = self.engine.load_checkpoint(self.store, tag=f"save{self.saves}")
        assert path is not None
        self.ours = True
        state, self.scale = self.saved
        self.plain.load(state)

    # -- plain PyTorch's step --------------------------------------------------------------------------------------

    def _plain_step(self) -> None:
        config = self.config
        fill = False
        if config["stage"] == 0:
            # DeepSpeed gives those that may have one a zero where it reduces: at a boundary backward, or in an
            # unmanaged step (engine.py, _get_gradients_for_reduction).
            fill = not self.cleared or not config["managed"]
        elif config["optimizer"] == "momentum":
            fill = config["idle"] == "zero_gradient"
        certain, possible = self.plain.overflow() if self.dtype.startswith("fp16") else (False, False)
        skipped = possible and bool(self.engine.optimizer.overflow)
        if certain and not skipped:
            self.odd = NOT_FINITE
        if certain or skipped:
            self.plain.skip()
        else:
            self.plain.step(self.scale, fill)
        if self.dtype == "fp16-dynamic" and skipped:
            self.scale /= 2
        if self._scale() != self.scale:
            self.odd = f"its loss scale is {self._scale():g} and not {self.scale:g}"

    def compare(self) -> tuple[float, float]:
        """The largest difference, and how large it may be; then the reference goes on from the engine's weights, so
        that each step is judged alone. COLLECTIVE."""
        ours = self._masters()
        difference, limit = self.plain.compare(ours)
        worst = torch.tensor([difference / limit, difference])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if self.odd or not worst[0] <= 1:
            return float("inf") if self.odd else worst[1].item(), limit
        self.plain.set_weights(ours)
        return difference, limit

    def _masters(self) -> list[torch.Tensor]:
        if self.config["stage"] == 0 and self.dtype != "fp32":  # of no interest to DeepSpeed's safe_get_full_fp32_param
            low, high = self.engine.optimizer.fp16_groups, self.engine.optimizer.fp32_groups
            pairs = zip([p for g in low for p in g], [p for g in high for p in g], strict=True)
            masters = {id(p): q for p, q in pairs}
            return [masters[id(p)].detach().clone() for p in self.engine.module.parameters()]
        if self.config["stage"] < 3 or self.dtype == "fp32":
            return lab.weights(self.engine)
        masters = []
        for param in self.engine.module.parameters():  # DeepSpeed reads no master of a frozen one
            frozen = not param.requires_grad
            param.requires_grad_(True)
            masters.append(lab.full(param))
            param.requires_grad_(not frozen)
        return masters

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
        before = identity.snapshot(twin.engine)
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
            if twin.odd == NOT_FINITE and twin.config["mode"] == "audit":
                return  # such a window is not judged (docs/audit.md)
            said = 0 if session is None else sum(f.severity != "info" for f in session.findings)
            answer["steps"].append({"at": at, "difference": difference, "limit": limit, "said": said})
            if difference > limit:
                answer.update(status="wrong", at=at, error=twin.odd)
                return


def _at_rest(twin: Twin, before: dict[str, Any], answer: dict[str, Any]) -> None:
    engine = twin.engine
    after = identity.snapshot(engine)
    for part, names in before.items():  # what DeepSpeed makes when it is first needed is no change
        after[part] = {name: after[part][name] for name in names if name in after[part]}
    if twin.loaded:  # DeepSpeed links parameters anew, and PyTorch makes new dicts
        for part in ("params", "mappings", *(() if twin.config["stage"] else ("optimizer",))):
            before.pop(part)
    answer["changed"] = [n for n in identity.changed(before, after) if n.split(".")[-1] not in MOVING]
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
