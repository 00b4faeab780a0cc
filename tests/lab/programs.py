"""Training programs on a real DeepSpeed engine beside the same program in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import zeroguard

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR = 0.1
DEVICE = os.environ.get("LAB_DEVICE", "cpu")
#: set by tests.lab.loop while a program runs with a LoopCallback
LOOP = ""


class TwoHeads(nn.Module):
    """One trunk, two heads: each loss reaches its own head only."""

    def __init__(self, h: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.a(x).relu()
        return self.b(z), self.c(z)


def ds_config(
    stage: int, offload: bool, dtype: str = "fp32", gas: int = 1, zero: dict | None = None, **kw: Any
) -> dict:
    zo: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zo["stage3_param_persistence_threshold"] = 0
    if offload:
        zo["offload_optimizer"] = {"device": "cpu"}
    zo.update(zero or {})
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "zero_optimization": zo,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        out["bf16"] = {"enabled": True}
    if dtype == "fp16":
        out["fp16"] = {"enabled": True, "loss_scale": 64.0}
    out.update(kw)
    return out


def build(model: nn.Module, config: dict, optimizer: Any = None) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """An engine, and the same model with the same optimizer in plain PyTorch."""
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=LR))
    model = model.to(DEVICE)
    reference = copy.deepcopy(model)
    if config["zero_optimization"].get("round_robin_gradients"):
        for param in model.parameters():
            param._lab_plain = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=make(list(model.parameters())), config=config)
    return engine, reference, make(list(reference.parameters()))


def full(param: Any) -> torch.Tensor:
    """The whole fp32 value of a parameter, however it is partitioned. COLLECTIVE."""
    from deepspeed.utils import safe_get_full_fp32_param

    value = None
    round_robin = getattr(getattr(param, "_zero_optimizer", None), "round_robin_gradients", False)
    if round_robin or getattr(param, "_lab_plain", False):
        return param.detach().float().clone()  # safe_get_full_fp32_param returns other parameters' values there
    if hasattr(param, "_hp_mapping") or hasattr(param, "_z3_optimizer"):
        with contextlib.suppress(KeyError):
            value = safe_get_full_fp32_param(param)
    if value is None and hasattr(param, "ds_id"):
        with deepspeed.zero.GatheredParameters([param]):
            return param.detach().float().clone()
    return (param.detach() if value is None else value).float().clone()


def weights(engine: Any) -> list[torch.Tensor]:
    return [full(p) for p in engine.module.parameters()]


def difference(engine: Any, reference: nn.Module) -> float:
    """The largest difference of any parameter, over all ranks."""
    pairs = list(zip(weights(engine), (p.detach().float() for p in reference.parameters()), strict=True))
    if engine.zero_optimization_stage() == 0:  # only the low-precision weights can be read there
        kind = next(engine.module.parameters()).dtype
        pairs = [(a, b.to(kind).float()) for a, b in pairs]
    worst = torch.tensor(max((a - b).abs().max().item() for a, b in pairs), device=DEVICE)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def batches(seed: int, h: int = 8, n: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' data, and this rank's."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(dist.get_world_size(), n, h, generator=generator).to(DEVICE)
    return xs, xs[dist.get_rank()]


class Reference:
    """Plain PyTorch in the precision in which DeepSpeed works: low-precision gradients, fp32 master weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self.master, self.optimizer, self.dtype = model, optimizer, dtype
        self.ranks = dist.get_world_size()
        self.work = [copy.deepcopy(model).to(dtype) for _ in range(self.ranks)]
        with torch.no_grad():  # DeepSpeed's master weights start from the low-precision ones
            for low, master in zip(self.work[0].parameters(), model.parameters(), strict=True):
                master.copy_(low)

    def zero_grad(self) -> None:
        for model in self.work:
            model.zero_grad(set_to_none=True)

    def step(self) -> None:
        groups = [list(model.parameters()) for model in self.work]
        for index, master in enumerate(self.master.parameters()):
            grads = [params[index].grad for params in groups]
            have = [g for g in grads if g is not None]
            master.grad = None if not have else sum(g.float() for g in have) / self.ranks
        self.optimizer.step()
        with torch.no_grad():
            for model in self.work:
                for low, master in zip(model.parameters(), self.master.parameters(), strict=True):
                    low.copy_(master)
        self.zero_grad()


def losses(model: Any, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    one, two = model(x.to(dtype))
    return one.float().pow(2).mean(), two.float().pow(2).mean()


def guard_of(engine: Any, guarded: Any) -> Any:
    """None: unguarded. True: automatic. A dict: that configuration."""
    if not guarded:
        return contextlib.nullcontext()
    config = {"sinks": []} if guarded is True else {"sinks": [], **guarded}
    if LOOP:
        from tests.lab.loop import loop_of

        return loop_of(engine, config, LOOP)
    return zeroguard.guard(engine, config)


def record(session: Any) -> dict[str, Any]:
    """What a session saw, for the test to judge."""
    if session is None:
        return {"findings": [], "repairs": []}
    return {
        "findings": [f.to_dict() for f in session.findings],
        "texts": [f.text() for f in session.findings],
        "repairs": [r.to_dict() for r in session.repairs],
        "selected": list(session.selection.selected),
        "summary": str(session.summary()),
        "verdicts": {row.guard: row.verdict for row in session.rows},
    }


def release(engine: Any) -> None:
    with contextlib.suppress(Exception):
        engine.destroy()
    gc.collect()


# -- the five patterns of one forward and two losses
# ----------------------------------------------------------------------


def _run(engine: Any, loss: torch.Tensor, by: str, retain: bool) -> None:
    if by == "engine":
        engine.backward(loss, retain_graph=retain)
    else:
        scaled = engine.scale(loss) if engine.fp16_enabled() else loss
        scaled.backward(retain_graph=retain)


def micro_step(engine: Any, pattern: str, x: torch.Tensor, dtype: torch.dtype, last: bool) -> None:
    """One micro-batch of a pattern on the engine; the names are ``<what>_<engine|manual>``."""
    what, by = pattern.rsplit("_", 1)
    one, two = losses(engine, x, dtype)
    if what == "clear":
        engine.zero_grad()
        _run(engine, one, by, True)
        engine.zero_grad()
        _run(engine, two, by, False)
    elif what == "boundary":
        engine.set_gradient_accumulation_boundary(False)
        _run(engine, one, by, True)
        engine.set_gradient_accumulation_boundary(last)
        _run(engine, two, by, False)
    else:
        _run(engine, one, by, True)
        _run(engine, two, by, False)
    engine.step()


def reference_micro_step(reference: Reference, pattern: str, xs: torch.Tensor, gas: int) -> None:
    what = pattern.rsplit("_", 1)[0]
    if what == "clear":
        reference.zero_grad()
    for model, x in zip(reference.work, xs, strict=True):
        one, two = losses(model, x, reference.dtype)
        ((two if what == "clear" else one + two) / gas).backward()


def two_losses(
    pattern: str,
    stage: int,
    offload: bool = False,
    dtype: str = "fp32",
    gas: int = 1,
    guarded: Any = True,
    steps: int = 3,
    zero: dict | None = None,
    extra: dict | None = None,
) -> dict[str, Any]:
    """Run a pattern and compare the parameters with plain PyTorch after every step."""
    torch.manual_seed(0)
    kind = DTYPES[dtype]
    engine, ref_model, ref_opt = build(TwoHeads(), ds_config(stage, offload, dtype, gas, zero, **(extra or {})))
    reference = Reference(ref_model, ref_opt, kind)
    start = [p.detach().clone() for p in ref_model.parameters()]
    answer: dict[str, Any] = {"status": "exact", "differences": [], "update": 0.0, "error": ""}
    session = None
    try:
        with guard_of(engine, guarded) as session:
            for step in range(steps):
                for micro in range(gas):
                    xs, x = batches(100 * step + micro)
                    reference_micro_step(reference, pattern, xs, gas)
                    micro_step(engine, pattern, x, kind, micro == gas - 1)
                reference.step()
                answer["differences"].append(difference(engine, ref_model))
    except Exception as error:
        answer["status"], answer["error"] = "crash", f"{type(error).__name__}: {error}"
        import traceback

        answer["trace"] = traceback.format_exc()
    moved = max((p.detach() - s).abs().max().item() for p, s in zip(ref_model.parameters(), start, strict=True))
    answer["update"] = moved
    # fp32: 1e-6 of the update, or one rounding of a weight; lower precision: the rounding of the gradients.
    floor = {"fp32": 3e-8, "bf16": 2e-3 if stage == 0 else 0.0, "fp16": 0.0}[dtype]
    limit = max({"fp32": 1e-6, "bf16": 2e-2, "fp16": 4e-3}[dtype] * moved, floor)
    if answer["status"] == "exact" and not all(d <= limit for d in answer["differences"]):
        answer["status"] = "wrong"
    answer["depth"] = getattr(engine.optimizer, "_backward_active_depth", 0)
    answer.update(record(session))
    release(engine)
    return answer
