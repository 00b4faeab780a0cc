"""Guards that only detect: what they say when an exception comes first, and what they leave unsaid."""

from __future__ import annotations

from typing import Any

import pytest

from zeroguard import events as ev
from zeroguard.backends.base import BackwardState, ParamStatus
from zeroguard.session import Session
from zeroguard.testing import Script, ScriptedEngine, assert_finding, assert_silent, facts, replay

LEFT = BackwardState(half_reduced=True)


def run(script: Script, name: str, engine: ScriptedEngine | None = None, **options: Any) -> Session:
    options = {"action": "detect", **options}
    return replay(script, guards=[{"name": name, **options}], engine=engine)


def loop() -> Script:
    return Script(repairing=False)


# -- retained_graph ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["engine.backward", "loss.backward"])
def test_a_second_backward_on_stage_3_that_raises(by: Any) -> None:
    script = loop().forward().backward(by).abort("RuntimeError: size of tensor a (0)", by=by).close(failed=True)
    session = run(script, "retained_graph", ScriptedEngine(facts(stage=3)))
    assert_finding(session, guard="retained_graph", kind="second_backward", severity="error", step=0)
    assert len(session.findings) == 1


@pytest.mark.parametrize(
    "script",
    [
        loop().forward().backward(boundary=False).backward().step(),
        loop().forward().backward().zero_grad().backward().step(),
        loop().forward().backward().backward().zero_grad().forward().backward().step(),
    ],
    ids=["no boundary before", "cleared", "cleared later"],
)
def test_a_second_backward_that_is_exact_on_zero_1_and_2(script: Script) -> None:
    assert_silent(run(script, "retained_graph"))


@pytest.mark.parametrize("clear", [True, False])
def test_a_loop_goes_on_over_half_reduced_gradients(clear: bool) -> None:
    script = loop().forward().abort("ValueError: boom")
    if clear:
        script.zero_grad("engine").zero_grad("optimizer")
    script.forward().abort("AssertionError: already reduced", reducing=True, twice=["w"]).close(failed=True)
    session = run(script, "retained_graph", ScriptedEngine(state=LEFT))
    found = assert_finding(session, guard="retained_graph", kind="unfinished_backward", severity="error")
    assert "ValueError: boom" in found[0].seen
    assert len(session.findings) == 1, "the crash that follows is its consequence"


def test_an_exception_that_leaves_nothing_behind_is_the_loops_affair() -> None:
    script = loop().forward().abort("ValueError: boom").zero_grad().forward().backward().step()
    assert_silent(run(script, "retained_graph"))
    assert_silent(run(loop().forward().abort("ValueError: boom").close(failed=True), "retained_graph"))
    ended = loop().forward().abort("ValueError: boom").zero_grad().close()
    assert_silent(run(ended, "retained_graph", ScriptedEngine(state=LEFT)))


@pytest.mark.parametrize("action", ["detect", "repair"])
def test_a_gradient_in_parts(action: str) -> None:
    script = loop().forward().abort("AssertionError: ", reducing=True, twice=["enc.weight"]).close(failed=True)
    session = run(script, "retained_graph", action=action)
    assert_finding(session, guard="retained_graph", kind="gradient_in_parts", severity="error", subject=("enc.weight",))
    for other in ({"reducing": True}, {"twice": ["enc.weight"]}):
        assert_silent(run(loop().forward().abort("ValueError: ", **other).close(failed=True), "retained_graph"))


@pytest.mark.parametrize(("stage", "boundary", "said"), [(1, True, True), (1, False, False), (2, False, True)])
def test_a_backward_that_deepspeed_does_not_finish(stage: int, boundary: bool, said: bool) -> None:
    script = loop().forward().abort(None, by="loss.backward", boundary=boundary)
    session = run(script.step(), "retained_graph", ScriptedEngine(facts(stage=stage)))
    assert [(f.kind, f.severity) for f in session.findings] == [("unfinished_backward", "error")] * said


# -- accumulator_reset, accumulation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["accumulator_reset", "accumulation"])
@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"stage": 2}, True),
        ({"stage": 2, "accumulation_steps": 2}, False),
        ({"stage": 1, "accumulation_steps": 2}, True),
        ({"stage": 3}, False),
        ({"stage": 2, "offload_optimizer": "none", "adds_at_boundary": True}, False),
        ({"stage": 2, "adds_at_boundary": True}, True),
    ],
)
def test_backwards_at_a_boundary_where_they_replace_each_other(name: str, known: dict[str, Any], said: bool) -> None:
    script = loop().forward().backward().forward().backward().step()
    session = run(script, name, ScriptedEngine(facts(**known)))
    assert [f.kind for f in session.findings] == ["overwritten_gradient"] * said


@pytest.mark.parametrize("name", ["accumulator_reset", "accumulation"])
def test_a_release_that_trips_over_the_backward_before(name: str) -> None:
    script = loop().forward().backward().forward().abort("TypeError: NoneType", reducing=True).close(failed=True)
    session = run(script, name, ScriptedEngine(facts(stage=2, offload_optimizer="none")))
    assert_finding(session, guard=name, kind="overwritten_gradient", severity="error")
    of_the_loop = loop().forward().backward().forward().abort("ValueError: boom").close(failed=True)
    assert_silent(run(of_the_loop, name, ScriptedEngine(facts(stage=2, offload_optimizer="none"))))


def test_a_release_that_trips_over_what_zero_grad_left() -> None:
    script = loop().forward().backward().zero_grad().forward().abort("TypeError: NoneType", reducing=True)
    session = run(script.close(failed=True), "accumulator_reset", ScriptedEngine(facts(offload_optimizer="none")))
    assert_finding(session, guard="accumulator_reset", kind="zero_grad_incomplete", severity="error")


def test_zero_grad_is_forgiven_where_nothing_of_it_is_consumed() -> None:
    script = loop().forward().backward().zero_grad("engine").zero_grad("optimizer").forward().backward().step()
    assert_silent(run(script, "accumulator_reset"))


def test_a_step_right_after_zero_grad() -> None:
    script = loop().forward().backward().zero_grad().step()
    session = run(script, "accumulator_reset", ScriptedEngine(facts(stage=2, offload_optimizer="none")))
    assert_finding(session, guard="accumulator_reset", kind="zero_grad_incomplete", severity="error")


# -- windows that zero_grad cuts short ---------------------------------------------------------------------------------


def epochs(number: int, length: int, gas: int = 4) -> Script:
    script, counted = Script(), 0
    for _ in range(number):
        for _ in range(length):
            counted += 1
            last = counted % gas == 0
            script.forward().backward(boundary=last)
            script.step() if last else script.counted(counted % gas)
        script.zero_grad("engine").zero_grad("optimizer")
    return script


def accumulation(script: Script, gas: int = 4) -> Session:
    guards = [{"name": "accumulator_reset"}, {"name": "accumulation"}]
    return replay(script, guards=guards, engine=ScriptedEngine(facts(accumulation_steps=gas)))


def test_epochs_that_end_inside_a_window_with_a_zero_grad() -> None:
    (found,) = assert_finding(
        accumulation(epochs(6, 6)), guard="accumulation", kind="short_window", severity="warning", seen="2 of 4"
    )
    assert "after 6 micro-batches again and again" in found.seen
    assert_silent(accumulation(epochs(5, 6)))
    assert_silent(accumulation(epochs(8, 8)))


def test_bad_batches_that_are_left_out_come_when_they_come() -> None:
    script = Script()
    for counted in range(1, 61):
        last = counted % 4 == 0
        if counted in (7, 18, 31, 44, 59):
            script.zero_grad()
        script.forward().backward(boundary=last)
        script.step() if last else script.counted(counted % 4)
    assert_silent(accumulation(script))


# -- param_status ------------------------------------------------------------------------------------------------------

PENALTY = "RuntimeError: Function PowBackward0 returned an invalid gradient at index 0 - got [0] but expected shape "
AGAIN = (
    "CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata\n"
    "tensor at position 0:\nsaved metadata: {'shape': torch.Size([8]), 'dtype': torch.float32}\n"
    "recomputed metadata: {'shape': torch.Size([0]), 'dtype': torch.float32}"
)


@pytest.mark.parametrize("action", ["repair", "warn"])
@pytest.mark.parametrize(
    ("error", "shape", "kind"),
    [
        (PENALTY + "compatible with [8, 4]", (8, 4), "partitioned_parameter_used"),
        (AGAIN, (8,), "recomputed_without_parameter"),
    ],
)
def test_an_exception_that_a_partitioned_parameter_explains(error: str, shape: Any, kind: str, action: str) -> None:
    def of(message: str, partitioned: dict[Any, Any], phase: ev.Phase = ev.Phase.BACKWARD) -> Session:
        engine = ScriptedEngine(facts(stage=3))
        engine.partitioned = partitioned
        return run(Script().raised(phase, message), "param_status", engine, action=action)

    assert_finding(of(error, {shape: ("w",)}), guard="param_status", kind=kind, severity="error", subject=("w",))
    assert_silent(of(error, {(3,): ("w",)}))
    assert_silent(of(error.replace("[0]", "[2]").replace("Size([0])", "Size([2])"), {shape: ("w",)}))
    assert_silent(of(error, {shape: ("w",)}, ev.Phase.FORWARD))


def test_a_claim_alone_is_not_in_flight() -> None:
    engine = ScriptedEngine(facts(stage=3), status=ParamStatus(active=("w1",)))
    assert_silent(run(Script().mode(False), "param_status", engine, action="raise"))
