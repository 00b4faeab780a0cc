"""What tests/gpu/measure.py runs on a GPU. On a CPU the same programs run on the scripted accelerator, to see that they
run at all: their figures mean nothing there."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.lab import host_read as scripted
from tests.lab import programs as lab
from zeroguard.backends.deepspeed.arena import Arena
from zeroguard.stress import hardware
from zeroguard.stress.scenarios import misread

GPU = lab.DEVICE != "cpu"


def environment() -> dict[str, Any]:
    """Where this process runs."""
    from zeroguard.stress.environment import environment

    return environment()


def scenario(name: str, guarded: bool, **job: Any) -> dict[str, Any]:
    """Three iterations of one of ``zeroguard stress``'s own programs, in this process."""
    from zeroguard.stress.jobs import SCENARIOS, Job
    from zeroguard.stress.scenarios import PROGRAMS
    from zeroguard.stress.worker import Watched

    usual, watched = SCENARIOS[name], Watched(guarded)
    one = Job(name, guarded, iterations=3, size=usual.small, offload=usual.offload, **job)
    return {"messages": list(PROGRAMS[name](one, Arena(), watched)), "findings": watched.findings}


@contextlib.contextmanager
def device() -> Iterator[Any]:
    """The accelerator that copies behind Python's back: the GPU's, or the scripted one."""
    torch.set_num_threads(8 if GPU else 1)
    with scripted.on("plain" if GPU else "scripted") as accelerator:
        yield accelerator


def _engine(hidden: int, layers: int, stage: int, gas: int, zero: dict[str, Any], lr: float = 1e-3) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(layers)))
    pinned = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    config = lab.ds_config(stage, True, "bf16", gas, {**pinned, **zero})
    return lab.build(model, config, lambda params: torch.optim.SGD(params, lr=lr))[0]


def _into(store: list[torch.Tensor], read: list[torch.Tensor], pin: Callable[..., Any]) -> None:
    for k, buffer in enumerate(read):
        if k == len(store):
            store.append(pin(torch.empty_like(buffer)))
        store[k].copy_(buffer)


# -- (a), (b): reads right after a backward --------------------------------------------------------------------------


def race(
    guarded: Any = False,
    stage: int = 2,
    overlap_comm: bool = False,
    hidden: int = 2048,
    layers: int = 3,
    iterations: int = 500,
    seconds: float = 60.0,
    orders: tuple[str, ...] = ("newest", "oldest"),
    explicit: bool = False,
    delayed: bool = False,
    gas: int = 4,
) -> dict[str, Any]:
    """Read all gradients in host memory right after a backward, whole, in one order, and compare with the same memory
    after a device synchronization. The orders take turns. Stops early after ``seconds``, never below 20 iterations.

    Stage 2 reads after the ``gas`` - 1 backwards of a window that are no boundary. Stages 1 and 3 read boundaries,
    without a step between: what is copied is the same, and the optimizer on the CPU would take most of the time.
    """
    answer = {order: {"iterations": 0, "failures": 0, "messages": {}} for order in orders}
    with device() as accelerator:
        gas = gas if stage == 2 else 1
        engine = _engine(hidden, layers, stage, gas, {"overlap_comm": overlap_comm})
        if delayed:
            list(engine.module.parameters())[-1].register_hook(lambda grad: hardware.delay())
        early: list[torch.Tensor] = []
        settled: list[torch.Tensor] = []
        began = time.monotonic()
        with lab.guard_of(engine, guarded) as session:
            count = 0
            while min(arm["iterations"] for arm in answer.values()) < iterations:
                if time.monotonic() - began > seconds and count > 20 * len(orders):
                    break
                order = orders[count % len(orders)]
                count += 1
                torch.manual_seed(count)
                x = torch.randn(64, hidden, device=lab.DEVICE, dtype=torch.bfloat16)
                engine.backward(engine(x).float().pow(2).mean() * (1 + count % 5))
                if explicit:
                    session.host_read()
                read = Arena.host_gradients(engine)
                _into_in(order, early, read, accelerator.pin_memory)
                accelerator.synchronize()
                now = Arena.host_gradients(engine)
                message = misread(early, now, settled)
                if gas > 1:
                    engine.step()
                    if count % (gas - 1) == 0:
                        engine.backward(engine(x).float().pow(2).mean())
                        accelerator.synchronize()
                        now = Arena.host_gradients(engine)
                        engine.step()
                _into(settled, now, accelerator.pin_memory)
                arm = answer[order]
                arm["iterations"] += 1
                arm["failures"] += bool(message)
                if message:
                    arm["messages"][message] = arm["messages"].get(message, 0) + 1
        kinds = [f["kind"] for f in lab.record(session)["findings"]]
        lab.release(engine)
    return {"arms": answer, "findings": kinds, "seconds": round(time.monotonic() - began, 1)}


def _into_in(order: str, store: list[torch.Tensor], read: list[torch.Tensor], pin: Callable[..., Any]) -> None:
    """As _into, in the order newest or oldest; the places stay those of newest first."""
    if not store:
        _into(store, read, pin)  # the first read allocates, and is not in the order
        return
    places = range(len(read)) if order == "newest" else reversed(range(len(read)))
    for k in places:
        store[k].copy_(read[k])


def detect(form: str, use: str = "norm", waited: bool = False, offload: bool = False) -> dict[str, Any]:
    """Findings of ``detect`` for a copy of the user's own, behind a delay kernel, that is read at once or waited for.

    ``form``: ``copy_`` into page-locked memory, or ``to``; ``use`` as in ``tests.lab.host_read``.
    """
    guarded = {"guards": [{"name": "host_read", "detect": True}], "on_violation": "record"}
    with device() as accelerator:
        zero = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offload else {}
        torch.manual_seed(0)
        engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(2, offload, zero=zero))
        source = torch.ones(2**20, device=lab.DEVICE)
        with lab.guard_of(engine, guarded) as session:
            hardware.delay()
            if form == "to":
                host = source.to("cpu", non_blocking=True)
            else:
                host = accelerator.pin_memory(torch.zeros(2**20))
                accelerator.synchronize()
                hardware.delay()
                host.copy_(source, non_blocking=True)
            if waited:
                session.host_read(host)
            value = scripted.USES[use](host)
        kinds = [f["kind"] for f in lab.record(session)["findings"]]
        accelerator.synchronize()
        right = float(host.sum()) == 2**20
        lab.release(engine)
    return {"findings": kinds, "right": right, "value": float(value) if use == "norm" else None}


# -- (c): the copy back to the device --------------------------------------------------------------------------------


def copy_back_raw(
    mib: int, order: str, pinned: bool, delayed: bool, iterations: int = 200, seconds: float = 8.0
) -> dict[str, Any]:
    """Device to host on one stream, then the same host memory to the device again, without DeepSpeed.

    ``order``: ``same stream``, ``other stream``, or ``other stream, event`` (the second one waits for the first's
    event). A failure is an element on the device that is not what was copied to the host last. ``mib``: of the buffer.
    """
    failures, done, began = 0, 0, time.monotonic()
    with device() as accelerator:
        host = torch.zeros(mib * 2**18)
        host = accelerator.pin_memory(host) if pinned else host
        back = torch.zeros(mib * 2**18, device=lab.DEVICE)
        out, into = accelerator.Stream(), accelerator.Stream()
        while done < iterations and (time.monotonic() - began < seconds or done < 20):
            done += 1
            source = torch.full_like(back, float(done))
            accelerator.synchronize()
            with accelerator.stream(out):
                if delayed:
                    hardware.delay()
                host.copy_(source, non_blocking=True)
                landed = accelerator.Event()
                landed.record(out)
            with accelerator.stream(out if order == "same stream" else into):
                if order.endswith("event"):
                    into.wait_event(landed)
                back.copy_(host, non_blocking=True)
            accelerator.synchronize()
            failures += not bool((back == done).all())
    return {"iterations": done, "failures": failures}


def copy_back_engine(
    hidden: int,
    overlap_comm: bool,
    pinned: bool,
    delayed: bool,
    guarded: Any = False,
    windows: int = 25,
    stage: int = 2,
) -> dict[str, Any]:
    """The sum over 4 micro-batches that reaches the optimizer, against fp32 sums of the same micro-batches' gradients.

    A window fails where the two are further apart than 5 percent of the sum's norm (bf16 rounding gives about 1).
    """
    failures, worst = 0, 0.0
    with device() as accelerator:
        zero = {"overlap_comm": overlap_comm, "offload_optimizer": {"device": "cpu", "pin_memory": pinned}}
        engine = _engine(hidden, 3, stage, 4, zero, lr=0.0)
        params = list(engine.module.parameters())
        plain = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(3))).to(lab.DEVICE, torch.bfloat16)
        for low, param in zip(plain.parameters(), params, strict=True):
            low.data.copy_(param.data)
        if delayed:
            params[-1].register_hook(lambda grad: hardware.delay())
        with lab.guard_of(engine, guarded):
            for window in range(windows):
                sums = [torch.zeros_like(p, dtype=torch.float32) for p in plain.parameters()]
                for micro in range(4):
                    torch.manual_seed(4 * window + micro)
                    x = torch.randn(64, hidden, device=lab.DEVICE, dtype=torch.bfloat16)
                    scale = 1 + micro
                    engine.backward(engine(x).float().pow(2).mean() * scale)
                    plain.zero_grad()
                    (plain(x).float().pow(2).mean() * scale / 4).backward()
                    for total, p in zip(sums, plain.parameters(), strict=True):
                        total += p.grad.float()
                    if micro < 3:
                        engine.step()
                accelerator.synchronize()
                # At a boundary the accumulators do not hold the sum: the fp32 gradient does.
                got = engine.optimizer.single_partition_of_fp32_groups[0].grad.view(-1)
                right = torch.cat([total.flatten() for total in sums]).to(got.device)
                apart = float((got[: right.numel()] - right).norm() / right.norm())
                worst = max(worst, apart)
                failures += apart > 0.05
                engine.step()
        lab.release(engine)
    return {"iterations": windows, "failures": failures, "worst": worst}


# -- (e): parameters in flight ---------------------------------------------------------------------------------------


def in_flight(case: str, guarded: Any = False, hidden: int = 64, layers: int = 8) -> dict[str, Any]:
    """What a case leaves in flight on ZeRO-3, and what a read of such a parameter gives.

    ``case``: ``eval``, ``early_exit``, ``early_exit_eval``, ``exception``, ``forward_only`` or ``conditional`` (a layer
    that is left out). ``reads`` has, for each parameter in flight, what ``param.data`` shows at once and after a device
    synchronization: ``right``, ``wrong`` or ``empty``.
    """
    from tests.lab.status import Deep

    torch.manual_seed(0)
    zero = {"stage3_prefetch_bucket_size": hidden * hidden * 3, "stage3_max_reuse_distance": 0}
    model = _Conditional(Deep(layers)) if case == "conditional" else Deep(layers)
    engine, _, _ = lab.build(model, lab.ds_config(3, False, zero=zero))
    answer: dict[str, Any] = {"error": ""}
    with lab.guard_of(engine, guarded) as session:
        for _ in range(3):
            _, x = lab.batches(0, h=64)
            engine.backward(engine(x))
            engine.step()
        values = [lab.full(p) for p in engine.module.parameters()]
        _leave(engine, x, case)
        names = set(Arena.in_flight(engine))
        answer["in_flight"], answer["of"] = len(names), len(values)
        answer["registry"] = len(engine.module.ds_inflight_param_registry)
        pairs = [(p, v) for (n, p), v in zip(engine.module.named_parameters(), values, strict=True) if n in names]
        answer["at_once"] = _seen(pairs)
        if GPU:
            torch.cuda.synchronize()
        answer["after_synchronize"] = _seen(pairs)
        engine.eval()
        engine.train()
        answer["after_train"] = len(Arena.in_flight(engine))
        try:
            engine.backward(engine(x))
            engine.step()
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["after_next_step"] = len(Arena.in_flight(engine))
    answer["findings"] = [f["kind"] for f in lab.record(session)["findings"]]
    lab.release(engine)
    return answer


class _Conditional(nn.Module):
    """Leaves a layer out when it is told to."""

    def __init__(self, deep: nn.Module) -> None:
        super().__init__()
        self.deep, self.without = deep, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.deep.l):
            if i != self.without:
                x = layer(x).relu()
        return self.deep.head(x).pow(2).mean()


def _leave(engine: Any, x: torch.Tensor, case: str) -> None:
    if case in ("eval", "early_exit_eval"):
        engine.eval()
        with torch.no_grad():
            engine(x, **({"until": 3} if case == "early_exit_eval" else {}))
    elif case == "forward_only":
        engine(x)
    elif case == "exception":
        with contextlib.suppress(ValueError):
            engine(x, boom=4)
    elif case == "early_exit":
        engine.backward(engine(x, until=3))
        engine.step()
    else:
        engine.module.without = 3
        engine.backward(engine(x))
        engine.step()
        engine.module.without = -1


def _seen(pairs: list[tuple[Any, torch.Tensor]]) -> dict[str, int]:
    seen = {"right": 0, "wrong": 0, "empty": 0}
    for param, value in pairs:
        data = param.data
        kind = "empty" if data.numel() != value.numel() else "wrong"
        if kind == "wrong" and torch.equal(data.float().view(-1), value.view(-1)):
            kind = "right"
        seen[kind] += 1
    return seen


# -- (f): what a wait costs ------------------------------------------------------------------------------------------


def wait_cost(
    how: str, mib: int = 64, busy: bool = True, repeats: int = 21, cycles: int = 100_000_000
) -> dict[str, Any]:
    """Milliseconds until the host may read a copy of ``mib`` MiB, while a kernel of ``cycles`` runs on another stream.

    ``how``: ``event``, ``stream`` or ``device``. ``copy_ms`` is the copy itself by the device's clock; ``work_ms`` the
    time until the other stream was done, by the host's, from the start of the copy; medians over ``repeats``.
    """
    waits, copies, work = [], [], []
    with device() as accelerator:
        source = torch.ones(mib * 2**18, device=lab.DEVICE)
        host = accelerator.pin_memory(torch.zeros(mib * 2**18))
        copying, other = accelerator.Stream(), accelerator.Stream()
        for _ in range(repeats):
            accelerator.synchronize()
            if busy:
                with accelerator.stream(other):
                    hardware.delay(cycles)
            began = time.perf_counter()
            with accelerator.stream(copying):
                first = accelerator.Event(enable_timing=True)
                first.record(copying)
                host.copy_(source, non_blocking=True)
                last = accelerator.Event(enable_timing=True)
                last.record(copying)
            if how == "event":
                last.synchronize()
            elif how == "stream":
                copying.synchronize()
            else:
                accelerator.synchronize()
            waits.append((time.perf_counter() - began) * 1e3)
            accelerator.synchronize()
            work.append((time.perf_counter() - began) * 1e3)
            copies.append(first.elapsed_time(last))
    middle = {"wait_ms": waits, "copy_ms": copies, "work_ms": work}
    return {"repeats": repeats, **{name: round(statistics.median(values), 3) for name, values in middle.items()}}
