"""ZeRO-3 parameter status in loops that leave gathers in flight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lab import programs as lab

H = 64


class Deep(nn.Module):
    """Nine layers that may be left early, skipped or blown up."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.l, self.head = nn.ModuleList(nn.Linear(H, H) for _ in range(n)), nn.Linear(H, 4)

    def forward(self, x: torch.Tensor, boom: int = -1, until: int = -1) -> torch.Tensor:
        for i, layer in enumerate(self.l):
            if i == boom:
                raise ValueError("boom")
            x = layer(x).relu()
            if i == until:
                return x.pow(2).mean()
        return self.head(x).pow(2).mean()


def _status(engine: Any) -> dict[str, int]:
    count = {"INFLIGHT": 0, "registry": len(engine.module.ds_inflight_param_registry)}
    for p in engine.module.parameters():
        count[p.ds_status.name] = count.get(p.ds_status.name, 0) + 1
    return count


def _engine(zero: dict[str, Any] | None = None) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    settings = {"stage3_prefetch_bucket_size": H * H * 3, "stage3_max_reuse_distance": 0, **(zero or {})}
    engine, _, _ = lab.build(Deep(), lab.ds_config(3, False, zero=settings))
    return engine, lab.batches(0, h=H)[1]


def _train(engine: Any, x: torch.Tensor, **kw: Any) -> None:
    engine.backward(engine(x, **kw))
    engine.step()


def left_behind(case: str, guarded: Any = True) -> dict[str, Any]:
    """What a case leaves in flight, looked at right after it and after the next point where the guard acts."""
    engine, x = _engine()
    seen: dict[str, Any] = {}
    with lab.guard_of(engine, guarded) as session:
        for _ in range(3):
            _train(engine, x)
        seen["warm"] = _status(engine)
        if case == "eval":
            engine.eval()
            with torch.no_grad():
                engine(x)
            seen["after"] = _status(engine)
            engine.train()
        elif case == "exception":
            try:
                _train(engine, x, boom=4)
            except ValueError:
                seen["after"] = _status(engine)
            engine.eval()
            engine.train()
        elif case == "early_exit_eval":
            engine.eval()
            with torch.no_grad():
                engine(x, until=3)
            seen["after"] = _status(engine)
            engine.train()
        elif case == "forward_only":
            engine(x)
            seen["after"] = _status(engine)
            engine.eval()
            engine.train()
        seen["at_boundary"] = _status(engine)
        _train(engine, x)
        seen["end"] = _status(engine)
    answer = {"seen": seen, **lab.record(session)}
    lab.release(engine)
    return answer


def contradiction(guarded: Any) -> dict[str, Any]:
    """A parameter that claims to be in flight although no gather runs, and a gather of a parameter that is not."""
    engine, x = _engine()
    answer: dict[str, Any] = {"raised": ""}
    with lab.guard_of(engine, guarded) as session:
        _train(engine, x)
        param = engine.module.l[2].weight
        status = type(param.ds_status)
        try:
            param.ds_status = status.INFLIGHT
            engine.eval()
            session.decide()
        except Exception as error:
            answer["raised"] = f"{type(error).__name__}: {error}"
        finally:
            param.ds_status = status.NOT_AVAILABLE
    answer |= lab.record(session)
    lab.release(engine)
    return answer


def stays_gathered() -> dict[str, Any]:
    """A parameter that the user gathers again after every step."""
    engine, x = _engine()
    with lab.guard_of(engine, {"guards": [{"name": "param_status", "gathered_boundaries": 2}]}) as session:
        for _ in range(4):
            _train(engine, x)
            engine.module.head.weight.all_gather()
        engine.module.head.weight.partition()
    answer = lab.record(session)
    lab.release(engine)
    return answer


def checkpoint(folder: str) -> dict[str, Any]:
    """Evaluation, then a checkpoint: nothing may be in flight when it is written."""
    engine, x = _engine()
    with lab.guard_of(engine, True) as session:
        for _ in range(3):
            _train(engine, x)
        engine.eval()
        with torch.no_grad():
            engine(x)
        before = _status(engine)
        engine.save_checkpoint(folder)
        after = _status(engine)
        engine.train()
    answer = {"before": before, "after": after, **lab.record(session)}
    lab.release(engine)
    return answer


def one_rank() -> dict[str, Any]:
    """Rank 0 alone sees a contradiction in the middle of step 2; both ranks must stop at the end of that step."""
    import torch.distributed as dist

    engine, x = _engine()
    answer: dict[str, Any] = {"raised": "", "steps": 0}
    try:
        with lab.guard_of(engine, True) as session:
            for step in range(5):
                if step == 2 and dist.get_rank() == 0:
                    param = engine.module.l[2].weight
                    kept, param.ds_status = param.ds_status, type(param.ds_status).INFLIGHT
                    engine.eval()
                    param.ds_status = kept
                    engine.train()
                _train(engine, x)
                answer["steps"] += 1
    except Exception as error:
        answer["raised"] = f"{type(error).__name__}: {error}"
        answer["global_steps"] = int(engine.global_steps)
    answer |= lab.record(session)
    lab.release(engine)
    return answer
