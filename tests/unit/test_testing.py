"""The helpers that other tests rest on."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import zeroguard.testing
from zeroguard import events as ev
from zeroguard.backends.base import Action, BackwardState, Done, Engine, ParamStatus
from zeroguard.config import GuardConfig
from zeroguard.errors import SessionClosedError
from zeroguard.testing import (
    Script,
    ScriptedEngine,
    assert_finding,
    assert_silent,
    facts,
    replay,
    scripted_accelerator,
)


def test_import_is_light() -> None:
    heavy = ("deepspeed", "lightning", "transformers")
    code = f"import sys, zeroguard.testing; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_names_are_sorted_and_there() -> None:
    names = zeroguard.testing.__all__
    assert names == sorted(names)
    assert all(hasattr(zeroguard.testing, name) for name in names)


def test_facts() -> None:
    assert (facts().stage, facts().accelerator, facts().own_copy_events) == (2, "cuda", True)
    assert facts(stage=3, rank=1).rank == 1
    with pytest.raises(TypeError):
        facts(stag=3)


# -- ScriptedEngine --------------------------------------------------------------------------------------------------


def test_the_engine_has_the_whole_protocol() -> None:
    methods = [n for n, v in vars(Engine).items() if inspect.isfunction(v) and not n.startswith("_")]
    assert {a.value for a in Action} <= set(methods)
    for name in methods:
        theirs = inspect.signature(getattr(Engine, name)).parameters
        ours = inspect.signature(getattr(ScriptedEngine, name)).parameters
        assert list(ours) == list(theirs), name


def test_repairs_change_the_state_unless_sticky() -> None:
    for sticky in (False, True):
        engine = ScriptedEngine(state=BackwardState(depth=2, unfinished=True), stale=("a",), lost=("b",), sticky=sticky)
        engine.status = ParamStatus(in_flight=("w",), registry=1, active=("w",))
        for action in (engine.rest_backward, engine.drop_idle, engine.release_in_flight):
            action()
        engine.settle(True)
        assert engine.backward_state().at_rest is not sticky
        assert engine.stale_parameters() == (("a",) if sticky else ())
        assert engine.lost_parameters() == (("b",) if sticky else ())
        assert bool(engine.param_status().in_flight) is sticky
        assert engine.asked == ["rest_backward", "drop_idle", "release_in_flight", "settle"]


def test_settle_recovers_at_a_boundary_only() -> None:
    engine = ScriptedEngine(lost=("b",))
    assert engine.settle(False) == []
    assert engine.lost_parameters() == ("b",)
    assert [d.kind for d in engine.settle(True)] == ["gradient_recovered"]


def test_release_leaves_what_nobody_can_wait_for() -> None:
    engine = ScriptedEngine(status=ParamStatus(in_flight=("a", "b"), registry=1, orphans=("b",)))
    (done,) = engine.release_in_flight()
    assert done.parameters == ("a",)
    assert engine.param_status() == ParamStatus(in_flight=("b",), orphans=("b",))


def test_done_can_be_given() -> None:
    engine = ScriptedEngine(done={"carry": [Done("mine")]})
    assert [d.kind for d in engine.carry()] == ["mine"]
    assert engine.wait_copies((), wait="event") == []
    assert engine.requests == [("carry", ()), ("wait_copies", ((), "event"))]


# -- Script ----------------------------------------------------------------------------------------------------------


def test_events_of_one_step() -> None:
    assert Script().forward().backward().step().events == [
        ev.ForwardBegin(1, True, True),
        ev.ForwardEnd(1, True),
        ev.BackwardBegin(1, "engine.backward", 0, False, True),
        ev.GraphReached(1, 1, 0),
        ev.BackwardReduce(1, True),
        ev.BackwardEnd(1, True),
        ev.StepBegin(0, 1),
        ev.StepEnd(1, True, False),
    ]


def begins(script: Script) -> list[tuple[int, int, bool]]:
    return [(e.backward, e.again, e.after_boundary) for e in script.events if isinstance(e, ev.BackwardBegin)]


def reached(script: Script) -> list[tuple[int, int, int]]:
    return [(e.backward, e.forward, e.again) for e in script.events if isinstance(e, ev.GraphReached)]


def test_numbers_of_several_backwards() -> None:
    script = (
        Script(repairing=False).forward().backward(boundary=False).backward().backward().forward().backward().step()
    )
    assert begins(script) == [(1, 0, False), (2, 1, False), (3, 2, True), (4, 0, True)]
    assert reached(script) == [(1, 1, 0), (2, 1, 1), (3, 1, 2), (4, 2, 0)]
    assert begins(Script().forward().backward().backward().backward()) == [(1, 0, False), (2, 1, True), (3, 1, True)]


def test_a_step_begins_a_new_window() -> None:
    assert begins(Script().forward().backward().step().forward().backward()) == [(1, 0, False), (2, 0, False)]
    # Over the graph of the step before: with the state at rest it is the first again.
    assert begins(Script().forward().backward().step().backward())[1] == (2, 0, False)
    assert begins(Script(repairing=False).forward().backward().step().backward())[1] == (2, 1, False)


def test_zero_grad_speaks_only_when_there_is_something() -> None:
    assert Script().zero_grad().events == []
    script = Script().forward().backward().zero_grad("module").zero_grad()
    assert [e for e in script.events if isinstance(e, ev.ZeroGrad)] == [ev.ZeroGrad("module", 1)]
    assert begins(script.backward())[1] == (2, 1, False)
    kept = Script(repairing=False).forward().backward().zero_grad().zero_grad()
    assert len([e for e in kept.events if isinstance(e, ev.ZeroGrad)]) == 2
    assert begins(kept.backward())[1] == (2, 1, True)


def test_over() -> None:
    script = Script().forward().forward(grad=False).forward().backward(over=1).backward(over=[1, 3])
    assert reached(script) == [(1, 1, 0), (2, 1, 1), (2, 3, 0)]
    assert reached(Script().forward().forward(grad=False).backward()) == [(1, 1, 0)]
    with pytest.raises(ValueError, match="no forward 2"):
        Script().forward().forward(grad=False).backward(over=2)


def test_abort() -> None:
    script = Script().forward().abort(KeyError("x"))
    assert script.events[-2:] == [ev.BackwardAborted(1, "KeyError: 'x'"), ev.Raised(ev.Phase.BACKWARD, "KeyError: 'x'")]
    assert isinstance(Script().forward().abort(None).events[-1], ev.BackwardAborted)
    assert isinstance(script.zero_grad().events[-1], ev.ZeroGrad)


def test_the_rest_of_the_vocabulary() -> None:
    script = (
        Script().mode(False).host_read("x").checkpoint().raised(ev.Phase.STEP, "E: e").forward().step(False).close(True)
    )
    kinds = [type(e) for e in script.events]
    assert kinds[:4] == [ev.ModeChange, ev.HostRead, ev.CheckpointBegin, ev.Raised]
    assert script.events[-2:] == [ev.StepEnd(1, False, True), ev.Close(True)]


# -- replay and the assertions ---------------------------------------------------------------------------------------


def test_replay_leaves_open_or_closes() -> None:
    assert not replay(Script().forward()).closed
    session = replay(Script().forward().close())
    assert session.closed
    with pytest.raises(SessionClosedError):
        session.host_read()
    with pytest.raises(ValueError, match="after Close"):
        replay(Script().close().forward())


def test_replay_takes_every_form_of_guards_and_config() -> None:
    one = GuardConfig(guards=({"name": "host_read", "wait": "device"},), sinks=(), on_violation="record")
    for kwargs in (
        {"guards": ["host_read"]},
        {"guards": [{"name": "host_read"}]},
        {"guards": list(one.guards or ())},
        {"config": one},
        {"config": {"guards": [{"name": "host_read"}]}},
    ):
        assert replay([], **kwargs).selection.selected == ["host_read"], kwargs  # type: ignore[arg-type]
    assert replay([]).config.on_violation == "record"
    assert replay([], config={"on_violation": "warn"}).config.on_violation == "warn"


def faulty() -> Any:
    script = Script(repairing=False).forward().backward().backward().step()
    return replay(script, guards=[{"name": "retained_graph", "action": "detect"}])


def test_assert_finding() -> None:
    session = faulty()
    (found,) = assert_finding(
        session, guard="retained_graph", kind="second_backward", severity="error", step=0, seen="forward 1"
    )
    assert found is session.findings[0]
    assert_finding(session, guard="retained_graph", kind="unfinished_backward", count=0)
    with pytest.raises(AssertionError, match="what to do"):  # the text of what is there
        assert_finding(session, guard="retained_graph", kind="other")
    with pytest.raises(AssertionError, match="severity"):
        assert_finding(session, guard="retained_graph", kind="second_backward", severity="warning")
    with pytest.raises(AssertionError, match="seen"):
        assert_finding(session, guard="retained_graph", kind="second_backward", seen="forward 7")
    with pytest.raises(AssertionError, match="expected 2"):
        assert_finding(session, guard="retained_graph", kind="second_backward", count=2)
    with pytest.raises(TypeError, match="no field colour"):
        assert_finding(session, guard="retained_graph", kind="second_backward", colour=1)


def test_assert_silent() -> None:
    assert_silent(replay(Script().forward().backward().step()))
    with pytest.raises(AssertionError, match=r"1 finding[\s\S]*second backward"):
        assert_silent(faulty())
    with pytest.raises(AssertionError, match="no findings"):
        assert_finding(replay([]), guard="host_read", kind="x")


# -- the scripted accelerator ----------------------------------------------------------------------------------------


class Inner:
    """What is needed of DeepSpeed's accelerator of the CPU."""

    def __init__(self) -> None:
        self._name = "cpu"

    def device_name(self) -> str:
        return self._name

    def resolves_data_dependency(self) -> bool:
        return True


def test_it_stays_what_it_was_and_gives_torch_back() -> None:
    inner = Inner()
    accelerator = scripted_accelerator(inner)
    assert isinstance(accelerator, Inner)
    assert accelerator.device_name() == "cpu"
    assert not accelerator.resolves_data_dependency()
    assert inner.resolves_data_dependency()
    before = torch.Tensor.copy_
    with contextlib.suppress(RuntimeError), accelerator:
        assert torch.Tensor.copy_ is not before
        raise RuntimeError("an error of the loop")
    assert torch.Tensor.copy_ is before
    assert not {"copy_", "record_stream"} & set(vars(torch.Tensor))


def test_a_copy_to_host_memory_lands_when_waited_for() -> None:
    with scripted_accelerator(Inner()) as accelerator:
        host = accelerator.pin_memory(torch.zeros(4))
        assert accelerator.is_pinned(host)
        assert accelerator.is_pinned(host[1:])
        assert not accelerator.is_pinned(torch.zeros(4))
        source = torch.ones(4)
        host.copy_(source, non_blocking=True)
        source.zero_()  # later work of the stream: the copy keeps what it was given
        event = accelerator.Event()
        event.record()
        host[:2].copy_(torch.full((2,), 2.0), non_blocking=True)
        assert (host.sum().item(), accelerator.pending, event.query()) == (0.0, 2, False)
        event.synchronize()
        assert (host.tolist(), accelerator.pending, event.query()) == ([1.0] * 4, 1, True)
        accelerator.current_stream().synchronize()
        assert host.tolist() == [2.0, 2.0, 1.0, 1.0]
        accelerator.synchronize()
        assert accelerator.waits == ["event", "stream", "device"]


def test_ordinary_copies_are_ordinary() -> None:
    with scripted_accelerator(Inner()) as accelerator:
        plain, host = torch.zeros(2), accelerator.pin_memory(torch.zeros(2))
        plain.copy_(torch.ones(2), non_blocking=True)
        assert plain.tolist() == [1.0, 1.0]
        host.copy_(plain)  # blocking
        assert host.tolist() == [1.0, 1.0]
        plain.record_stream(accelerator.current_stream())
        assert accelerator.pending == 0
        assert accelerator.waits == []


def test_the_device_reads_in_the_order_of_its_stream() -> None:
    with scripted_accelerator(Inner()) as accelerator:
        first, second = (accelerator.pin_memory(torch.zeros(1)) for _ in range(2))
        first.copy_(torch.ones(1), non_blocking=True)
        second.copy_(torch.ones(1), non_blocking=True)
        back = torch.zeros(1)
        back.copy_(second, non_blocking=True)
        assert (back.item(), first.item(), accelerator.pending) == (1.0, 0.0, 1)
        other = accelerator.Stream()
        with accelerator.stream(other):
            back.copy_(first, non_blocking=True)  # races with the other stream
            assert back.item() == 0.0
            other.wait_stream(accelerator.default_stream())
            back.copy_(first, non_blocking=True)
            assert back.item() == 1.0
        assert accelerator.current_stream() is accelerator.default_stream()
        assert accelerator.waits == []


def test_waiting_for_one_stream_includes_what_it_waits_for() -> None:
    with scripted_accelerator(Inner()) as accelerator:
        host = accelerator.pin_memory(torch.zeros(1))
        one, two = accelerator.Stream(), accelerator.Stream()
        with accelerator.stream(one):
            host.copy_(torch.ones(1), non_blocking=True)
        two.wait_event(one.record_event())
        assert not two.query()
        accelerator.default_stream().synchronize()
        assert host.item() == 0.0
        two.synchronize()
        assert host.item() == 1.0


def test_copies_in_autograd_hooks_are_seen() -> None:
    with scripted_accelerator(Inner()) as accelerator:
        host = accelerator.pin_memory(torch.zeros(3))
        weight = torch.ones(3, requires_grad=True)

        def to_host(param: torch.Tensor) -> None:
            host.copy_(param.grad, non_blocking=True)

        weight.register_post_accumulate_grad_hook(to_host)
        weight.sum().backward()
        assert (host.sum().item(), accelerator.pending) == (0.0, 1)
        accelerator.synchronize()
        assert host.sum().item() == 3.0


def test_unpinned_memory_is_ordinary_again() -> None:
    with scripted_accelerator(Inner()) as accelerator:
        host = accelerator.pin_empty_like(torch.zeros(2))
        assert accelerator.pin_empty(2, 3, dtype=torch.float16).shape == (2, 3)
        assert accelerator.pin_memory(torch.zeros(2, 2), make_copy=False, match_shape=False).shape == (4,)
        accelerator.unpin_memory(host)
        host.copy_(torch.ones(2), non_blocking=True)
        assert host.tolist() == [1.0, 1.0]
