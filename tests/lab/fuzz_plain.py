"""The plain PyTorch side of tests/lab/fuzz.py, in the engine's precision, and how far the engine may be from it.

In bf16 and fp16 the reference runs the same low-precision forward and backward, adds what each backward delivered in
fp32, and steps fp32 masters. DeepSpeed adds and averages in the low precision, so the two differ by rounding, for which
:meth:`Plain.step` keeps a bound of each gradient's element: every addition and every division by the ranks may be
wrong by half a unit in the last place of at most the sum of the absolute contributions. One backward on one rank has
neither, and its gradient has to be the same to the bit.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.lab import programs as lab

LR = 0.1
ADAM_LR, ADAM_EPS = 0.01, 1e-2
#: eps is large, so that Adam does not blow the rounding of a small gradient up to a step of its own
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LR),
    "momentum": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=ADAM_LR, eps=ADAM_EPS, weight_decay=0.1),
}
#: |m / (sqrt(v) + eps)| of AdamW is at most about 3.2 with these betas, and so a gradient that is off by t moves an
#: update by at most lr * (t + 3.2 t) / eps.
ADAM_GAIN = 4.2 * ADAM_LR / ADAM_EPS
FP32 = torch.finfo(torch.float32).eps


def loss_of(head: int, out: torch.Tensor) -> torch.Tensor:
    """Each head has a loss of its own; none of them has a gradient that vanishes at the start."""
    return (out.float() - 0.5 * head).pow(2).mean()


class Plain:
    """A model on each rank's data, fp32 masters, and what each backward delivered."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], ranks: int) -> None:
        self.config, self.ranks = config, ranks
        self.dtype = lab.DTYPES[config.get("dtype", "fp32").partition("-")[0]]
        self.clip = config.get("clip", 0.0)
        self.master, self.optimizer = model, optimizer
        self.params = list(model.parameters())
        self.work = [copy.deepcopy(model).to(self.dtype) for _ in range(ranks)]
        self.lows = [list(work.parameters()) for work in self.work]
        with torch.no_grad():  # DeepSpeed's master weights start from the low-precision ones
            for low, master in zip(self.lows[0], self.params, strict=True):
                master.copy_(low)
        self.outs: dict[int, list[dict[int, torch.Tensor]]] = {}
        self.steps = 0
        self.slack = [torch.zeros_like(p) for p in self.params]  # of what the optimizer remembers
        self.before = [p.detach().clone() for p in self.params]
        self.zero_grad()
        #: DeepSpeed's optimizer for low precision without ZeRO; it gives every parameter a gradient, frozen ones too,
        #: and begins with a step of zeros, in which weight decay and step counters already count
        self.unfused = not config["stage"] and self.dtype != torch.float32
        if self.unfused:
            for param in self.params:
                param.grad = torch.zeros_like(param)
            optimizer.step()

    @property
    def models(self) -> list[nn.Module]:
        return [self.master, *self.work]

    def forward(self, slot: int, heads: list[int], xs: torch.Tensor) -> None:
        pairs = zip(self.work, xs.to(self.dtype), strict=True)
        self.outs[slot] = [dict(zip(heads, work(data, heads), strict=True)) for work, data in pairs]

    def backward(self, terms: list[list[int]], retain: bool, factor: float) -> None:
        """Of the sum of these losses times ``factor``, in which the loss scale is."""
        self.backwards += 1
        for rank, low in enumerate(self.lows):
            loss = sum(loss_of(head, self.outs[slot][rank][head]) for slot, head in terms)
            (loss * factor).backward(retain_graph=retain)
            for index, param in enumerate(low):
                if param.grad is None:
                    continue
                grad, param.grad = param.grad.float(), None
                sums = self.sums[rank]
                sums[index] = sums[index] + grad if index in sums else grad
                self.sizes[index] = self.sizes.get(index, 0.0) + grad.abs()

    def zero_grad(self) -> None:
        self.sums: list[dict[int, torch.Tensor]] = [{} for _ in range(self.ranks)]
        self.sizes: dict[int, Any] = {}  # sums of absolute values, over backwards and ranks
        self.backwards = 0

    # -- the step ----------------------------------------------------------------------------------------------------

    def overflow(self) -> tuple[bool, bool]:
        """Whether fp16 gradients are certainly, and may be, too large. DeepSpeed may add in fp16 or in fp32."""
        certain = any(not g.isfinite().all() for sums in self.sums for g in sums.values())
        largest = max((float(size.max()) for size in self.sizes.values()), default=0.0)
        return certain, certain or largest > 0.9 * torch.finfo(torch.float16).max

    def skip(self) -> None:
        """A step that DeepSpeed leaves out."""
        self.before = [p.detach().clone() for p in self.params]
        self.limits: list[torch.Tensor] = [torch.zeros_like(p) for p in self.params]
        self.zero_grad()

    def step(self, scale: float, fill: bool) -> None:
        """Plain PyTorch, but for what the documentation says of parameters without a gradient: with ``fill`` they have
        one of zeros."""
        self.before = [p.detach().clone() for p in self.params]
        off = []
        for index, param in enumerate(self.params):
            grads = [sums[index] for sums in self.sums if index in sums]
            param.grad = None if not grads else sum(grads) / self.ranks / scale
            off.append(self._rounding(index, scale) if grads else torch.zeros_like(param))
            if not grads and (self.unfused or (fill and (param.requires_grad or self.config["stage"]))):
                param.grad = torch.zeros_like(param)
        if self.clip:
            off = self._clip(off)
        if self.config["optimizer"] == "adamw" and self.config["stage"]:
            # One step counter a flat partition: it counts for all parameters in it.
            for param in self.params:
                state = self.optimizer.state[param]
                state["step"] = torch.tensor(float(self.steps))
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
        self.optimizer.step()
        self.limits = [self._moves(index, t) for index, t in enumerate(off)]
        self.steps += 1
        self.set_weights(self.params)
        self.zero_grad()

    def _rounding(self, index: int, scale: float) -> torch.Tensor:
        """How much the averaged gradient may be off; nothing in fp32, which has a limit of its own."""
        roundings = (2 * self.backwards - 2) + (self.ranks if self.ranks > 1 else 0)
        if self.dtype == torch.float32 or not roundings:
            return torch.zeros_like(self.params[index])
        info = torch.finfo(self.dtype)
        return roundings * (info.eps / 2 * self.sizes[index] / self.ranks + info.smallest_normal * info.eps) / scale

    def _clip(self, off: list[torch.Tensor]) -> list[torch.Tensor]:
        grads = [p.grad for p in self.params if p.grad is not None]
        norm = torch.stack([g.double().norm() for g in grads]).norm().item() if grads else 0.0
        factor = min(1.0, self.clip / (norm + 1e-6))
        # The norm is off, too, and with it the factor.
        wrong = torch.stack([t.double().norm() for t in off]).norm().item() / norm if norm else 0.0
        with torch.no_grad():
            for index, param in enumerate(self.params):
                if param.grad is not None:
                    param.grad.mul_(factor)
                    off[index] = 1.1 * (factor * off[index] + wrong * param.grad.abs())
        return off

    def _moves(self, index: int, off: torch.Tensor) -> torch.Tensor:
        """What a gradient that may be ``off`` this much means for the weight, now and by what the optimizer keeps."""
        slack = self.slack[index]
        if self.config["optimizer"] == "adamw":
            slack.copy_(torch.maximum(slack, off))
            return ADAM_GAIN * slack
        if self.config["optimizer"] == "momentum":
            off = slack.mul_(0.9).add_(off)
        return LR * off

    # -- compared with the engine ------------------------------------------------------------------------------------

    def set_weights(self, values: list[Any]) -> None:
        with torch.no_grad():
            for index, value in enumerate(values):
                for params in (self.params, *self.lows):
                    params[index].copy_(value)

    def compare(self, ours: list[torch.Tensor]) -> tuple[float, float]:
        """The largest difference, and how large it may be there."""
        moved = max((b.detach() - a).abs().max().item() for a, b in zip(self.before, self.params, strict=True))
        largest = max(p.detach().abs().max().item() for p in self.params)
        floor = max(1e-6 * moved, FP32 * largest)
        worst = (0.0, floor)
        for mine, param, limit in zip(ours, self.params, self.limits, strict=True):
            difference, allowed = (mine - param.detach()).abs().flatten(), (limit + floor).flatten()
            if self.dtype == torch.float32:
                allowed = torch.full_like(allowed, floor)
            at = int((difference / allowed).nan_to_num(torch.inf).argmax())
            if not difference[at] / allowed[at] <= worst[0] / worst[1]:
                worst = (difference[at].item(), allowed[at].item())
        return worst

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> Any:
        return copy.deepcopy((self.master.state_dict(), self.optimizer.state_dict(), self.steps, self.slack))

    def load(self, state: Any) -> None:
        master, optimizer, self.steps, self.slack = copy.deepcopy(state)
        self.master.load_state_dict(master)
        self.optimizer.load_state_dict(optimizer)
        self.zero_grad()
        self.set_weights(self.params)
