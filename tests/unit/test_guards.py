"""Each guard as a state machine: the fault gives exactly its finding, the nearest healthy loop gives silence."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from zeroguard import events as ev
from zeroguard.backends.base import Action, BackwardState, Done, Engine, EngineFacts, ParamStatus
from zeroguard.config import GUARDS
from zeroguard.errors import GuardUnavailableError, GuardViolation
from zeroguard.session import Session
from zeroguard.testing import Script, ScriptedEngine, assert_finding, assert_silent, facts, replay

OLD = {"own_copy_events": False, "deepspeed_version": "0.19.6"}


def run(script: Script, engine: ScriptedEngine | None = None, **options: Any) -> tuple[Session, ScriptedEngine]:
    """Replay with one guard and its options."""
    engine = engine or ScriptedEngine()
    return replay(script, guards=[options], engine=engine), engine


def verdict(session: Session, guard: str) -> str:
    return {row.guard: row.verdict for row in session.rows}[guard]


# -- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guard", "overrides", "status"),
    [
        ("host_read", {}, "selected"),
        ("host_read", {"pin_memory": False}, "selected"),
        ("host_read", {"stage": 3}, "selected"),
        ("host_read", {"offload_optimizer": "none"}, "not_applicable"),
        ("host_read", {"offload_optimizer": "nvme", "stage": 3}, "not_applicable"),
        ("host_read", {"stage": 0, "offload_optimizer": "none"}, "not_applicable"),
        ("host_read", {"accelerator": "cpu", "resolves_data_dependency": True}, "not_needed"),
        ("retained_graph", {}, "selected"),
        ("retained_graph", {"stage": 3}, "selected"),
        ("retained_graph", {"stage": 0}, "selected"),
        ("retained_graph", {"stage": 0, "dtype": "float16"}, "not_applicable"),
        ("retained_graph", {"stage": 0, "output_hooks": False}, "not_applicable"),
        ("accumulator_reset", {}, "selected"),
        ("accumulator_reset", {"stage": 1, "offload_optimizer": "none"}, "selected"),
        ("accumulator_reset", {"stage": 0}, "not_applicable"),
        ("accumulator_reset", {"stage": 3, "offload_optimizer": "nvme"}, "not_applicable"),
        ("param_status", {"stage": 3}, "selected"),
        ("param_status", {}, "not_applicable"),
    ],
)
def test_choice(guard: str, overrides: dict[str, Any], status: str) -> None:
    cls = GUARDS[guard]
    choice = cls.choose(facts(**overrides), cls.Config())
    assert choice.status == status
    assert choice.reason


def test_a_named_guard_without_work_is_refused() -> None:
    with pytest.raises(GuardUnavailableError, match="param_status"):
        replay([], guards=["param_status"])


def test_a_guard_that_is_not_needed_may_be_named() -> None:
    session = replay([], guards=["host_read"], engine=ScriptedEngine(facts(resolves_data_dependency=True)))
    assert session.selection.selected == []
    assert verdict(session, "host_read") == "not needed"
    assert "resolves data dependencies" in session.selection["host_read"]


def test_automatic_choice() -> None:
    assert replay([]).selection.selected == [
        "host_read",
        "retained_graph",
        "accumulator_reset",
        "accumulation",
        "gradient_audit",
    ]
    stage3 = replay([], engine=ScriptedEngine(facts(stage=3)))
    assert stage3.selection.selected == list(GUARDS)


# -- host_read -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["event", "stream", "device"])
def test_host_read_waits_as_configured(wait: str) -> None:
    session, engine = run(Script().forward().backward(boundary=False).host_read(), name="host_read", wait=wait)
    assert engine.requests == [("wait_copies", ((), wait))]
    assert_silent(session)
    assert session.repairs == []
    assert verdict(session, "host_read") == "passed"


def test_host_read_does_nothing_without_a_read() -> None:
    session, engine = run(Script().forward().backward().step().close(), name="host_read")
    assert engine.requests == []
    assert verdict(session, "host_read") == "never exercised"


def test_host_read_waits_before_the_step_of_older_releases() -> None:
    _, engine = run(Script().forward().backward().step(), ScriptedEngine(facts(**OLD)), name="host_read", wait="stream")
    assert engine.requests == [("wait_copies", ((), "stream"))]


def test_session_host_read_as_call_and_as_block() -> None:
    session, engine = run(Script().forward().backward(), name="host_read", mode="explicit")
    session.host_read()
    assert engine.asked == ["wait_copies"]
    with session.host_read():
        assert engine.asked == ["wait_copies"] * 2
    assert engine.asked == ["wait_copies"] * 2


# -- retained_graph --------------------------------------------------------------------------------------------------

TWICE = {
    "engine": lambda s: s.forward().backward().backward(),
    "manual": lambda s: s.forward().backward("loss.backward").backward("loss.backward"),
    "boundary": lambda s: s.forward().backward(boundary=False).backward(),
    "cleared": lambda s: s.forward().backward().zero_grad().backward(),
}


@pytest.mark.parametrize("how", ["engine", "manual"])
def test_a_second_backward_is_detected(how: str) -> None:
    script = TWICE[how](Script(repairing=False)).step()
    session, engine = run(script, name="retained_graph", action="detect")
    (found,) = assert_finding(
        session,
        guard="retained_graph",
        kind="second_backward",
        severity="error",
        seen="backward 2 over the graph of forward 1",
    )
    assert ("loss.backward" if how == "manual" else "engine.backward") in found.seen
    assert len(session.findings) == 1
    assert engine.requests == []


@pytest.mark.parametrize("how", sorted(TWICE))
def test_a_second_backward_is_repaired(how: str) -> None:
    session, engine = run(TWICE[how](Script()).step(), name="retained_graph")
    assert_silent(session)
    assert engine.requests == [("rearm_backward", ()), ("restore_counters", (1,)), ("rest_backward", ())]
    assert [r.kind for r in session.repairs] == ["backward_rearmed"]


def test_stage_3_gets_its_counters_back() -> None:
    session, _ = run(TWICE["engine"](Script()).step(), ScriptedEngine(facts(stage=3)), name="retained_graph")
    assert [r.kind for r in session.repairs] == ["backward_rearmed", "module_counters_restored"]


def test_three_backwards_are_reported_once_a_session() -> None:
    script = Script(repairing=False)
    for _ in range(2):
        script.forward().backward().backward().backward().step()
    session, _ = run(script, name="retained_graph", action="detect")
    assert_finding(session, guard="retained_graph", kind="second_backward", step=0, seen="backward 2")


@pytest.mark.parametrize("action", ["repair", "detect"])
@pytest.mark.parametrize(
    "script",
    [
        lambda s: s.forward().backward().step().forward().backward().step(),
        lambda s: s.forward().backward(boundary=False).forward().backward().step(),
        lambda s: s.forward().forward().backward(over=[2, 1]).step(),  # one loss of two forwards
        lambda s: s.forward(training=False, grad=False).forward().backward().step(),
    ],
    ids=["steps", "accumulation", "two forwards", "evaluation"],
)
def test_one_backward_a_forward_is_silent(script: Any, action: str) -> None:
    session, engine = run(script(Script(repairing=action == "repair")).close(), name="retained_graph", action=action)
    assert_silent(session)
    assert session.repairs == []
    assert set(engine.asked) <= {"rest_backward"}
    if action == "detect":
        assert engine.requests == []
    assert verdict(session, "retained_graph") == "passed"


def test_two_forwards_then_two_backwards_get_a_preprocess_each() -> None:
    """DeepSpeed reset its state at the second forward; the second backward finds the first one's."""
    session, engine = run(Script().forward().forward().backward(over=1).backward(over=2).step(), name="retained_graph")
    assert_silent(session)
    assert engine.requests == [("rearm_backward", ()), ("rest_backward", ())]


def test_state_left_over_after_a_step() -> None:
    for action, severity in (("detect", "error"), ("repair", "warning")):
        engine = ScriptedEngine(state=BackwardState(depth=1, hooks=3))
        session, _ = run(Script().forward().backward().step(), engine, name="retained_graph", action=action)
        assert_finding(
            session,
            guard="retained_graph",
            kind="backward_state_left_over",
            severity=severity,
            seen="after 1 backward(s) DeepSpeed still counts 1 as running and expects 3 more parameter gradients",
            repaired=action == "repair",
        )
        assert len(session.findings) == 1
        assert engine.asked == (["rest_backward"] if action == "repair" else [])


def test_a_repair_that_does_not_stick_is_reported_every_step() -> None:
    script = Script().forward().backward().step().forward().backward().step()
    engine = ScriptedEngine(state=BackwardState(depth=1), sticky=True)
    session, _ = run(script, engine, name="retained_graph")
    assert_finding(session, guard="retained_graph", kind="backward_state_left_over", count=2)


def test_an_aborted_backward_without_zero_grad() -> None:
    script = Script().forward().abort("ValueError: boom").forward().backward().step()
    session, engine = run(script, name="retained_graph")
    assert_finding(
        session,
        guard="retained_graph",
        kind="unfinished_backward",
        severity="warning",
        seen="ValueError: boom",
        repaired=True,
    )
    assert len(session.findings) == 1
    assert engine.asked == ["drop_unfinished", "rest_backward"]


def test_an_aborted_backward_right_before_the_step() -> None:
    session, engine = run(Script().forward().backward().forward().abort(None).step(), name="retained_graph")
    assert_finding(session, guard="retained_graph", kind="unfinished_backward", seen="never reached its epilogue")
    assert engine.asked == ["rest_backward"]


def test_an_aborted_backward_is_only_reported_by_detect() -> None:
    script = Script(repairing=False).forward().abort("ValueError: boom").forward().backward().step()
    session, engine = run(script, name="retained_graph", action="detect")
    assert_finding(session, guard="retained_graph", kind="unfinished_backward", severity="warning", repaired=False)
    assert engine.requests == []


@pytest.mark.parametrize("action", ["repair", "detect"])
def test_zero_grad_after_an_exception_is_silent(action: str) -> None:
    script = Script(repairing=action == "repair").forward().abort().zero_grad().forward().backward().step()
    session, engine = run(script, name="retained_graph", action=action)
    assert_silent(session)
    assert engine.asked == (["drop_unfinished", "rest_backward"] if action == "repair" else [])


# -- accumulator_reset -----------------------------------------------------------------------------------------------

ONE = [("flush_pending", (True,)), ("settle", (True,))]


def test_a_normal_step_only_looks() -> None:
    session, engine = run(Script().forward().backward().step().close(), name="accumulator_reset")
    assert engine.requests == [*ONE, ("drop_idle", ())]
    assert_silent(session)
    assert session.repairs == []
    assert verdict(session, "accumulator_reset") == "passed"


def test_accumulation_settles_after_each_backward() -> None:
    script = Script().forward().backward(boundary=False).forward().backward().step()
    _, engine = run(script, name="accumulator_reset")
    assert engine.requests == [("flush_pending", (False,)), ("settle", (False,)), *ONE, ("drop_idle", ())]


def test_a_boundary_backward_after_a_boundary_is_carried() -> None:
    _, engine = run(Script().forward().backward().backward().step(), name="accumulator_reset")
    assert engine.requests == [*ONE, ("carry", ()), *ONE, ("drop_idle", ())]


def test_zero_grad_clears() -> None:
    session, engine = run(Script().forward().backward().zero_grad().backward().step(), name="accumulator_reset")
    assert engine.requests == [*ONE, ("clear", ()), *ONE, ("drop_idle", ())]
    assert_silent(session)
    assert [r.kind for r in session.repairs] == ["accumulators_cleared"]


def test_stale_and_lost_are_repaired() -> None:
    engine = ScriptedEngine(stale=("old",), lost=("gone",))
    session, _ = run(Script().forward().backward().step(), engine, name="accumulator_reset")
    assert_silent(session)
    assert [(r.kind, r.parameters) for r in session.repairs] == [
        ("gradient_recovered", ("gone",)),
        ("stale_gradient_dropped", ("old",)),
    ]


def test_untouched_shelves_before_and_unshelves_after() -> None:
    script = Script().forward().backward().step()
    _, engine = run(script, name="accumulator_reset", idle="untouched")
    assert engine.asked == ["flush_pending", "settle", "drop_idle", "shelve_idle", "unshelve_idle"]
    _, engine = run(script, name="accumulator_reset", idle="untouched", action="detect")
    assert engine.asked == []


def detect(script: Script, **engine: Any) -> Session:
    session, scripted = run(script, ScriptedEngine(**engine), name="accumulator_reset", action="detect")
    assert scripted.requests == []
    return session


@pytest.mark.parametrize(
    ("kind", "field"), [("stale_gradient", "stale"), ("lost_gradient", "lost")], ids=["stale", "lost"]
)
def test_stale_and_lost_are_detected_once(kind: str, field: str) -> None:
    script = Script(repairing=False).forward().backward().step().forward().backward().step()
    session = detect(script, **{field: ("a.weight", "a.bias")})
    assert_finding(
        session, guard="accumulator_reset", kind=kind, severity="error", subject=("a.weight", "a.bias"), step=0
    )
    assert len(session.findings) == 1


def test_idle_alone_is_no_fault() -> None:
    assert_silent(detect(Script(repairing=False).forward().backward().step(), idle=("a.weight",)))


def test_overwritten_is_detected() -> None:
    session = detect(Script(repairing=False).forward().backward().backward().step().forward().backward().step())
    assert_finding(
        session,
        guard="accumulator_reset",
        kind="overwritten_gradient",
        severity="error",
        seen="2 backwards at an accumulation boundary",
    )
    assert len(session.findings) == 1


def test_accumulation_is_not_overwriting() -> None:
    script = Script(repairing=False)
    for _ in range(2):
        script.forward().backward(boundary=False).forward().backward(boundary=False).forward().backward().step()
    assert_silent(detect(script.close()))


@pytest.mark.parametrize("by", ["engine", "optimizer", "module"])
def test_an_incomplete_zero_grad_is_detected(by: Any) -> None:
    engine = ScriptedEngine(stale=("old", "mine"))
    engine.uncleared = ("mine",)
    script = Script(repairing=False).forward().backward(boundary=False).zero_grad(by).forward().backward().step()
    session, _ = run(script, engine, name="accumulator_reset", action="detect")
    assert_finding(
        session,
        guard="accumulator_reset",
        kind="zero_grad_incomplete",
        severity="error",
        subject=("mine",),
        expected=f"{by}.zero_grad()",
    )
    assert_finding(session, guard="accumulator_reset", kind="stale_gradient", subject=("old",))
    assert len(session.findings) == 2


@pytest.mark.parametrize(
    "script",
    [
        lambda s: s.zero_grad().forward().backward().step(),  # before the first backward
        lambda s: s.forward().backward().step().zero_grad().forward().backward().step(),  # after the step
        lambda s: s.forward().abort().zero_grad().forward().backward().step(),  # nothing had been accumulated
    ],
    ids=["before", "after", "aborted"],
)
def test_a_zero_grad_with_nothing_to_clear_is_silent(script: Any) -> None:
    assert_silent(detect(script(Script(repairing=False))))


# -- param_status ----------------------------------------------------------------------------------------------------

FLYING = ParamStatus(in_flight=("w1", "w2"), registry=2)
POINTS = {
    "after_step": (lambda s: s.step(), "after a step"),
    "before_forward": (lambda s: s.forward(), "before a forward"),
    "mode_change": (lambda s: s.mode(True), "at a change of train/eval mode"),
    "close": (lambda s: s.close(), "at the end of the session"),
    "host_read": (lambda s: s.host_read(), "before a host read"),
    "before_checkpoint": (lambda s: s.checkpoint(), "before a checkpoint"),
}


def stage3(**kwargs: Any) -> ScriptedEngine:
    return ScriptedEngine(facts(stage=3), **kwargs)


@pytest.mark.parametrize("point", sorted(POINTS))
@pytest.mark.parametrize("action", ["raise", "warn", "repair"])
def test_in_flight_at_each_point(point: str, action: str) -> None:
    make, where = POINTS[point]
    session, engine = run(make(Script()), stage3(status=FLYING), name="param_status", action=action, check_at=[point])
    if action == "repair":
        assert_silent(session)
        assert engine.requests == [("release_in_flight", ())]
        assert [(r.kind, r.parameters) for r in session.repairs] == [("gather_released", ("w1", "w2"))]
        return
    severity = "error" if action == "raise" else "warning"
    assert_finding(
        session,
        guard="param_status",
        kind="in_flight",
        severity=severity,
        subject=("w1", "w2"),
        seen=f"{where}: 2 INFLIGHT",
    )
    assert engine.requests == []


@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_point_that_is_not_listed_is_not_checked(point: str) -> None:
    others = [p for p in POINTS if p != point]
    session, engine = run(POINTS[point][0](Script()), stage3(status=FLYING), name="param_status", check_at=others)
    assert_silent(session)
    assert engine.requests == []


@pytest.mark.parametrize("action", ["raise", "warn", "repair"])
def test_partitioned_or_gathered_at_rest_is_silent(action: str) -> None:
    script = Script().mode(True).forward().backward().step().mode(False).forward(grad=False).checkpoint().close()
    for status in (ParamStatus(), ParamStatus(gathered=(("w1", 1024),))):
        session, engine = run(script, stage3(status=status), name="param_status", action=action)
        assert_silent(session)
        assert engine.requests == []
        assert verdict(session, "param_status") == "passed"


@pytest.mark.parametrize(
    "status",
    [ParamStatus(registry=1), ParamStatus(in_flight=("w1",), registry=1)],
    ids=["registry", "in flight"],
)
def test_each_sign_of_flight_counts(status: ParamStatus) -> None:
    session, _ = run(Script().mode(False), stage3(status=status), name="param_status", action="raise")
    assert_finding(session, guard="param_status", kind="in_flight", severity="error")
    session, engine = run(Script().mode(False), stage3(status=status), name="param_status")
    assert_silent(session)
    assert engine.asked == ["release_in_flight"]


@pytest.mark.parametrize(
    "status",
    [
        ParamStatus(in_flight=("w1",), orphans=("w1",)),
        ParamStatus(registry=1, contradictions=("w1",)),
    ],
    ids=["orphan", "contradiction"],
)
@pytest.mark.parametrize("action", ["raise", "warn", "repair"])
def test_a_contradiction_is_reported_in_every_mode(status: ParamStatus, action: str) -> None:
    session, _ = run(Script().mode(False), stage3(status=status), name="param_status", action=action)
    assert_finding(
        session,
        guard="param_status",
        kind="status_contradiction",
        severity="warning" if action == "warn" else "error",
        subject=("w1",),
    )
    assert len(session.findings) == 1


def test_an_exception_is_never_waited_for() -> None:
    script = Script().raised(ev.Phase.FORWARD)
    session, engine = run(script, stage3(status=FLYING), name="param_status")
    assert engine.requests == []
    assert_silent(session)
    session, engine = run(script, stage3(status=FLYING), name="param_status", action="raise")
    assert_finding(session, guard="param_status", kind="in_flight", seen="after an exception in forward")


def test_the_point_after_an_exception_repairs() -> None:
    script = Script().raised(ev.Phase.FORWARD).forward().backward().step()
    session, engine = run(script, stage3(status=FLYING), name="param_status")
    assert_silent(session)
    assert engine.asked == ["release_in_flight"]


def test_close_after_a_failure_touches_nothing() -> None:
    session, engine = run(Script().close(failed=True), stage3(status=FLYING), name="param_status", action="repair")
    assert_silent(session)
    assert engine.requests == []


def test_a_nested_forward_is_in_its_rights() -> None:
    script = Script().forward(nested=True)
    session, engine = run(script, stage3(status=FLYING), name="param_status", action="raise")
    assert_silent(session)
    assert engine.requests == []


def test_gathered_for_long() -> None:
    def loop(steps: int) -> Script:
        script = Script()
        for _ in range(steps):
            script.forward().backward().step()
        return script

    status = ParamStatus(gathered=(("w1", 2**20), ("w2", 2**20)))
    session, engine = run(loop(2), stage3(status=status), name="param_status", gathered_boundaries=3)
    assert_silent(session)
    session, engine = run(loop(6), stage3(status=status), name="param_status", gathered_boundaries=3)
    assert_finding(
        session,
        guard="param_status",
        kind="stays_gathered",
        severity="warning",
        subject=("w1", "w2"),
        step=3,
        seen="still gathered 3 steps in a row: 2.00 MiB",
    )
    assert engine.requests == []


def test_gathered_with_a_break_is_silent() -> None:
    engine = stage3()
    session = replay([], guards=[{"name": "param_status", "gathered_boundaries": 2}], engine=engine)
    for step in range(4):
        engine.status = ParamStatus(gathered=(("w1", 8),) if step % 2 else ())
        session.emit(ev.StepEnd(step + 1, True))
    assert_silent(session)


# -- all together ----------------------------------------------------------------------------------------------------


def test_the_order_of_repairs_across_guards() -> None:
    """A backward is prepared before its gradients are touched; all is at rest before parameters are judged."""
    engine = ScriptedEngine(facts(stage=3, **OLD), status=FLYING)
    replay(Script().forward().backward().zero_grad().backward().step(), engine=engine)
    repairs = [name for name in engine.asked if "sample" not in name and "audit" not in name]
    assert repairs == [
        "release_in_flight",  # before the forward
        "flush_pending",
        "settle",
        "clear",
        "rearm_backward",
        "restore_counters",
        "flush_pending",
        "settle",
        "wait_copies",  # the step reads host memory
        "drop_idle",
        "rest_backward",
    ]


def test_requests_fit_the_protocol_and_the_backend() -> None:
    """What a guard asks for can be called, on DeepSpeed's backend as well."""
    pytest.importorskip("deepspeed")
    from zeroguard.backends.deepspeed.adapter import DeepSpeedBackend

    script = (
        Script().forward().backward(boundary=False).abort().backward().zero_grad().backward().backward().host_read()
    )
    engine = ScriptedEngine(facts(stage=3, **OLD), status=FLYING)
    guards = ["host_read", "retained_graph", {"name": "accumulator_reset", "idle": "untouched"}, "param_status"]
    guards += [{"name": "accumulation", "action": "repair"}, "gradient_audit"]
    divided = [ev.LossDivided("Lightning", 2), ev.BackwardBegin(9, "engine.backward", divisor=2)]
    replay([*script.step().events, *divided, ev.Close(False)], guards=guards, engine=engine)
    assert set(engine.asked) - {"audit_gradients"} == {action.value for action in Action}
    for name, args in engine.requests:
        for owner in (Engine, DeepSpeedBackend):
            inspect.signature(getattr(owner, name)).bind(None, *args)


def test_on_violation_raise_stops_at_the_step() -> None:
    script = Script(repairing=False).forward().backward().backward().step()
    detecting = [{"name": "retained_graph", "action": "detect"}]
    with pytest.raises(GuardViolation, match="second backward") as caught:
        replay(script, guards=detecting, config={"on_violation": "raise"})
    assert [f.kind for f in caught.value.findings] == ["second_backward"]
    assert caught.value.ranks == (0,)
    assert len(replay(script, guards=detecting, config={"on_violation": "record"}).findings) == 1


def test_warnings_and_repaired_findings_never_stop() -> None:
    script = Script().forward().abort().forward().backward().step()
    session = replay(script, guards=["retained_graph"], config={"on_violation": "raise"})
    assert_finding(session, guard="retained_graph", kind="unfinished_backward")


def test_rank_and_step_are_recorded() -> None:
    engine = ScriptedEngine(facts(rank=3, world_size=4), stale=("a",))
    script = Script().forward().backward().step()
    session = replay(script.forward().backward().step(), guards=["accumulator_reset"], engine=engine)
    assert [(r.rank, r.step) for r in session.repairs] == [(3, 0)]


def test_routine_repairs_are_not_listed() -> None:
    engine = ScriptedEngine(done={"settle": [Done("seen", routine=True), Done("told")]})
    session, _ = run(Script().forward().backward(), engine, name="accumulator_reset")
    assert [r.kind for r in session.repairs] == ["told"]


def test_facts_of_stage_0_describe_themselves() -> None:
    assert EngineFacts(stage=0).describe() == "ZeRO-0, float32, 1 rank"


# -- accumulation ----------------------------------------------------------------------------------------------------


def rhythm(*events: ev.Event, steps: int = 1, **options: Any) -> tuple[Session, ScriptedEngine]:
    engine = ScriptedEngine(facts(accumulation_steps=steps))
    return replay(events, guards=[{"name": "accumulation", **options}], engine=engine), engine


def test_a_loss_that_both_divide() -> None:
    events = [ev.LossDivided("Lightning", 4), ev.BackwardBegin(1, "engine.backward", divisor=4)]
    session, engine = rhythm(*events, *events, steps=4)
    [finding] = assert_finding(session, guard="accumulation", kind="double_division", severity="warning")
    assert "1/16" in finding.effect
    assert "Lightning" in finding.seen
    assert len(session.findings) == 1, "once: it is the same at every backward"
    assert engine.requests == []


@pytest.mark.parametrize(
    "events",
    [
        [ev.BackwardBegin(1, "engine.backward", divisor=4)],
        [ev.LossDivided("Lightning", 4), ev.BackwardBegin(1, "engine.backward", divisor=1)],
        [ev.LossDivided("Lightning", 1), ev.BackwardBegin(1, "engine.backward", divisor=4)],
        [
            ev.LossDivided("Lightning", 4),
            ev.BackwardBegin(1, "engine.backward", divisor=1),
            ev.BackwardBegin(2, "engine.backward", divisor=4),
        ],
    ],
)
def test_a_loss_that_one_of_them_divides(events: list[ev.Event]) -> None:
    assert_silent(rhythm(*events, steps=4)[0])


def test_a_loss_that_both_divide_is_divided_once_on_request() -> None:
    events = [ev.LossDivided("Lightning", 4), ev.BackwardBegin(1, "engine.backward", divisor=4)]
    session, engine = rhythm(*events, steps=4, action="repair")
    assert_silent(session)
    assert engine.asked == ["divide_once"]


def test_a_step_between_two_backwards_over_one_graph() -> None:
    session, _ = rhythm(ev.GraphReached(1, 1, 0), ev.GraphReached(2, 1, 1, stepped=True))
    [finding] = assert_finding(session, guard="accumulation", kind="step_between_backwards", severity="error")
    assert "accelerator.backward(loss_a + loss_b)" in finding.remedy
    assert_silent(rhythm(ev.GraphReached(1, 1, 0), ev.GraphReached(2, 1, 1))[0])


def test_a_gradient_read_after_the_step() -> None:
    session, _ = rhythm(ev.GradientRead("safe_get_full_grad", 0))
    assert_finding(session, guard="accumulation", kind="late_gradient_read", severity="warning")
    assert_silent(rhythm(ev.GradientRead("safe_get_full_grad", 1))[0])


@pytest.mark.parametrize(("steps", "severity"), [(1, "warning"), (2, "error")])
def test_a_step_that_bypasses_the_engine(steps: int, severity: str) -> None:
    session, _ = rhythm(ev.StepBegin(0, 1, "optimizer.step"), ev.StepEnd(1, True), steps=steps)
    [finding] = assert_finding(session, guard="accumulation", kind="bypassed_engine_step", severity=severity)
    assert "engine.step()" in finding.remedy
    assert_silent(rhythm(ev.StepBegin(0, 1), ev.StepEnd(1, True), steps=steps)[0])


def test_a_step_that_bypasses_the_engine_is_right_where_each_backward_reduces() -> None:
    engine = ScriptedEngine(facts(stage=3, offload_optimizer="none", accumulation_steps=2))
    session = replay([ev.StepBegin(0, 1, "optimizer.step")], guards=["accumulation"], engine=engine)
    assert_finding(session, guard="accumulation", kind="bypassed_engine_step", severity="warning")
