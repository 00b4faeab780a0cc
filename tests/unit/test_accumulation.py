"""The guard ``accumulation``: windows, steps, updates, settings and ranks. The fault gives exactly its finding, the
nearest healthy loop gives silence. What concerns trainers stands in test_guards.py."""

from __future__ import annotations

from typing import Any

import pytest

from zeroguard import events as ev
from zeroguard import session as session_module
from zeroguard.backends.base import Switched
from zeroguard.collective import Votes, vote
from zeroguard.errors import GuardViolation
from zeroguard.findings import Finding
from zeroguard.guards.rhythm import SKIPS
from zeroguard.guards.rhythm_texts import TEXTS
from zeroguard.guards.weights import LOOK
from zeroguard.guards.windows import FORGOTTEN, FORGOTTEN_AT_CLOSE
from zeroguard.session import Session
from zeroguard.testing import Script, ScriptedEngine, assert_finding, assert_silent, facts, replay

NAME = "accumulation"
ALONE = [{"name": NAME}]
REPAIRED = [{"name": "accumulator_reset"}, {"name": NAME}]
DETECTED = [{"name": "accumulator_reset", "action": "detect"}, {"name": NAME}]


def run(script: Script, guards: list[dict[str, Any]] = ALONE, engine: ScriptedEngine | None = None, **options: Any):
    """Replay on an engine with these facts."""
    return replay(script, guards=guards, engine=engine or ScriptedEngine(facts(**options)))


def only(session: Session, kind: str, severity: str) -> Finding:
    """The one finding of the session."""
    assert [f.kind for f in session.findings] == [kind], [f.text() for f in session.findings]
    return assert_finding(session, guard=NAME, kind=kind, severity=severity)[0]  # type: ignore[arg-type]


def micro_batches(script: Script, gas: int = 4, *, clear: bool = False) -> Script:
    """One window of ``gas`` micro-batches, each with its engine.step()."""
    for number in range(gas):
        if clear:
            script.zero_grad()
        last = number == gas - 1
        script.forward().backward(boundary=last)
        script.step() if last else script.counted(number + 1)
    return script


def steps(count: int, script: Script | None = None) -> Script:
    script = script or Script()
    for _ in range(count):
        script.forward().backward().step()
    return script


def test_every_text_can_be_filled_in() -> None:
    for kind, text in TEXTS.items():
        assert all(text), kind
        assert "\n" in text.remedy or len(text.remedy) < 160, f"{kind}: a remedy is a few lines of code"


# -- several backwards at a boundary ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"stage": 1}, True),
        ({"stage": 2}, True),
        ({"stage": 2, "accumulation_steps": 2}, False),
        ({"stage": 2, "accumulation_steps": 2, "offload_optimizer": "none"}, True),
        ({"stage": 3}, False),
        ({"stage": 0, "offload_optimizer": "none"}, False),
    ],
)
def test_overwritten_gradients_where_nobody_adds_them_up(options: dict[str, Any], wrong: bool) -> None:
    script = Script(repairing=False).forward().backward().forward().backward().forward().backward().step()
    session = run(script, **options)
    if not wrong:
        assert_silent(session)
        return
    finding = only(session, "overwritten_gradient", "error")
    assert "3 backwards" in finding.seen
    assert '"gradient_accumulation_steps": 3' in finding.remedy


def test_overwritten_gradients_are_accumulator_resets_business_where_it_acts() -> None:
    assert_silent(run(Script().forward().backward().forward().backward().step(), REPAIRED))
    session = run(Script(repairing=False).forward().backward().forward().backward().step(), DETECTED)
    assert [(f.guard, f.kind) for f in session.findings] == [("accumulator_reset", "overwritten_gradient")]


def test_a_cleared_gradient_is_not_overwritten() -> None:
    assert_silent(run(Script(repairing=False).forward().backward().zero_grad().forward().backward().step()))


# -- steps without a backward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guards", "options", "severity"),
    [
        (ALONE, {}, "error"),
        (REPAIRED, {}, "warning"),
        (REPAIRED, {"offload_optimizer": "none"}, "error"),
        (ALONE, {"stage": 3, "offload_optimizer": "none"}, "error"),
        (ALONE, {"stage": 0, "offload_optimizer": "none"}, "warning"),
    ],
)
def test_two_steps_for_one_backward(guards: list[dict[str, Any]], options: dict[str, Any], severity: str) -> None:
    finding = only(run(steps(2).step(), guards, **options), "second_step", severity)
    assert finding.step == 2
    crash = options.get("stage", 2) and options.get("offload_optimizer") == "none"
    assert ("NoneType" in finding.effect) is bool(crash)


@pytest.mark.parametrize(("guards", "severity"), [(ALONE, "error"), (REPAIRED, "warning")])
def test_a_step_after_a_forward_alone(guards: list[dict[str, Any]], severity: str) -> None:
    only(run(steps(1).forward().step(), guards), "step_without_backward", severity)


def test_an_evaluation_before_a_second_step_is_no_forward_of_it() -> None:
    only(run(steps(1).forward(training=False, grad=False).step()), "second_step", "error")


@pytest.mark.parametrize(
    "script",
    [
        steps(3),
        Script().step().step(),  # a loop whose backwards are not seen
        Script().step().forward().backward().step().step(),
        steps(1).forward().abort().step(),
        steps(1).forward().backward().zero_grad().step(),
    ],
    ids=["steps", "unseen", "unseen at first", "aborted", "cleared"],
)
def test_steps_that_nobody_can_blame(script: Script) -> None:
    session = run(script, REPAIRED)
    assert [f for f in session.findings if f.guard == NAME] == []


def test_a_step_after_zero_grad_is_legal_where_zero_grad_clears() -> None:
    assert_silent(run(steps(1).zero_grad().step(), REPAIRED))
    assert_silent(run(steps(1).zero_grad().step(), stage=0, offload_optimizer="none"))
    only(run(steps(1, Script(repairing=False)).zero_grad().step()), "second_step", "error")


# -- windows ---------------------------------------------------------------------------------------------------------


def test_a_window_left_open_at_the_end_of_an_epoch() -> None:
    script = micro_batches(Script()).forward().backward(boundary=False).counted(1)
    script.forward().backward(boundary=False).counted(2).epoch_end()
    finding = only(run(script, accumulation_steps=4), "open_window", "warning")
    assert "2 of 4 micro-batches" in finding.seen
    assert "end of an epoch" in finding.seen
    assert "engine.micro_steps % 4" in finding.remedy


def test_a_window_left_open_at_close() -> None:
    script = micro_batches(Script()).forward().backward(boundary=False).counted(1)
    finding = only(run(script.close(), accumulation_steps=4), "open_window", "warning")
    assert "session closes" in finding.seen


@pytest.mark.parametrize(
    "script",
    [
        micro_batches(Script()).epoch_end().close(),
        micro_batches(Script()).forward().backward(boundary=False).counted(1).mode(False).mode(True),
        micro_batches(Script()).forward().backward(boundary=False).counted(1).checkpoint(),
        micro_batches(Script()).forward().backward(boundary=False).counted(1).close(failed=True),
        micro_batches(Script()).forward().backward(boundary=False).counted(1).zero_grad().epoch_end().close(),
        micro_batches(Script()).forward().backward(boundary=False).counted(0).epoch_end().close(),
        Script().forward().backward(boundary=False).counted(1).close(),
    ],
    ids=["complete", "evaluation", "checkpoint", "failed", "dropped", "the loop sets boundaries", "a look"],
)
def test_windows_that_may_be_open(script: Script) -> None:
    assert_silent(run(script, REPAIRED, accumulation_steps=4))


@pytest.mark.parametrize("guards", [ALONE, REPAIRED])
@pytest.mark.parametrize(("gas", "windows"), [(2, 3), (4, 2)])
def test_zero_grad_before_every_micro_batch(guards: list[dict[str, Any]], gas: int, windows: int) -> None:
    script = Script(repairing=guards is REPAIRED)
    for _ in range(windows - 1):
        micro_batches(script, gas, clear=True)
    early = run(script, guards, accumulation_steps=gas)
    assert [f for f in early.findings if f.guard == NAME] == []
    session = run(micro_batches(script, gas, clear=True), guards, accumulation_steps=gas)
    finding = only(session, "cleared_every_micro_batch", "warning")
    assert ("none so far" in finding.effect) is (guards is ALONE)


def test_zero_grad_before_a_window_and_for_a_bad_batch_are_healthy() -> None:
    script = Script()
    for window in range(6):
        script.zero_grad("engine").zero_grad("optimizer")
        for number in range(4):
            if window % 2 and number in (1, 2):
                script.zero_grad()
            script.forward().backward(boundary=number == 3)
            script.step() if number == 3 else script.counted(number + 1)
    assert_silent(run(script, REPAIRED, accumulation_steps=4))


def test_zero_grad_between_backwards_at_a_boundary_is_healthy() -> None:
    script = Script()
    for _ in range(5):
        script.zero_grad().forward().backward().zero_grad().backward().step()
    assert_silent(run(script, REPAIRED))


def test_three_zero_grads_in_a_row_clear_once() -> None:
    script = Script(repairing=False)
    for _ in range(4):
        script.forward().backward(boundary=False).counted(1)
        script.zero_grad("engine").zero_grad("optimizer").zero_grad("module")
        script.forward().backward(boundary=False).counted(2).forward().backward(boundary=False).counted(3)
        script.forward().backward().step()
    assert_silent(run(script, accumulation_steps=4))


def backwards(count: int, script: Script | None = None) -> Script:
    script = script or Script()
    for _ in range(count):
        script.forward().backward()
    return script


def test_engine_step_is_never_called() -> None:
    session = run(backwards(FORGOTTEN_AT_CLOSE).close(), REPAIRED)
    finding = only(session, "engine_step_never_called", "warning")
    assert f"{FORGOTTEN_AT_CLOSE} backwards" in finding.seen
    only(run(backwards(FORGOTTEN), REPAIRED), "engine_step_never_called", "warning")


@pytest.mark.parametrize(
    "script",
    [
        backwards(FORGOTTEN_AT_CLOSE - 1).close(),
        backwards(FORGOTTEN - 1),
        backwards(FORGOTTEN + 1).counted(1).close(failed=True),
        backwards(6).zero_grad().forward().backward().close(),
        backwards(FORGOTTEN_AT_CLOSE + 5).step().close(),
        backwards(FORGOTTEN_AT_CLOSE + 5, steps(1)).close(),
        backwards(12, Script().forward().backward(boundary=False).counted(0)).close(),
    ],
    ids=["few", "many, and more to come", "failed", "cleared", "added up", "after a step", "counted"],
)
def test_loops_that_step_or_only_look(script: Script) -> None:
    session = run(script, REPAIRED)
    if "failed" in repr(script.events[-1]) and script.events[-1] == ev.Close(True):
        assert [f.kind for f in session.findings] == ["engine_step_never_called"], "1000 backwards are no look"
        return
    assert_silent(session)


def test_a_look_at_gradients_needs_no_step() -> None:
    script = Script()
    for _ in range(2 * FORGOTTEN_AT_CLOSE):
        script.forward().backward()
        script.events.append(ev.GradientRead("safe_get_full_grad", 1))
    assert_silent(run(script.close(), REPAIRED))
    assert_silent(run(backwards(2 * FORGOTTEN_AT_CLOSE).close(), stage=0, offload_optimizer="none"))


# -- updates ---------------------------------------------------------------------------------------------------------


def skipped(count: int, script: Script | None = None) -> Script:
    script = script or Script()
    for _ in range(count):
        script.forward().backward().step(applied=False)
    return script


@pytest.mark.parametrize("scale", ["none", "static"])
def test_a_skipped_update_without_a_search_for_a_loss_scale(scale: str) -> None:
    finding = only(run(steps(3, skipped(1, steps(2))), loss_scale=scale), "skipped_update", "warning")
    assert finding.step == 3
    assert "was_step_applied" in finding.remedy
    assert ("loss scale" in finding.cause) is (scale == "static")


def test_updates_that_keep_being_skipped() -> None:
    session = run(skipped(SKIPS + 3, steps(2)))
    assert [(f.kind, f.severity) for f in session.findings] == [
        ("skipped_update", "warning"),
        ("updates_keep_being_skipped", "error"),
    ]
    only(run(skipped(SKIPS, steps(1)), loss_scale="dynamic"), "updates_keep_being_skipped", "warning")


@pytest.mark.parametrize(
    "script",
    [skipped(34), steps(3, skipped(SKIPS - 1, steps(1))), skipped(1, steps(1000, skipped(1, steps(1000))))],
    ids=["search from 2^32", "a burst", "scale windows"],
)
def test_the_search_for_a_loss_scale_is_healthy(script: Script) -> None:
    assert_silent(run(script, loss_scale="dynamic"))


# -- settings --------------------------------------------------------------------------------------------------------


def test_a_clip_that_has_nothing_to_clip() -> None:
    finding = only(run(Script().forward().backward().clip(limit=0.5).step()), "clipped_nothing", "warning")
    assert '"gradient_clipping": 0.5' in finding.remedy
    only(run(steps(1).clip(limit=None)), "clipped_nothing", "warning")


def test_a_clip_that_clips() -> None:
    assert_silent(run(Script().forward().backward().clip(gradients=6).step()))
    assert_silent(run(Script().clip()))
    assert_silent(run(Script().forward().backward().clip(), stage=0, offload_optimizer="none"))


def clipping(norm: float | None, limit: float) -> Session:
    engine = ScriptedEngine(facts(unasked_clipping=limit))
    engine.norm = norm
    return run(steps(3), engine=engine)


def test_clipping_that_nobody_asked_for() -> None:
    finding = only(clipping(8.0, 1.0), "unconfigured_clipping", "warning")
    assert finding.step == 1
    assert "clips at 1" in finding.seen
    assert "norm was 8" in finding.seen


@pytest.mark.parametrize(("norm", "limit"), [(8.0, 0.0), (0.9, 1.0), (None, 1.0), (float("inf"), 1.0)])
def test_clipping_that_changes_nothing_or_was_asked_for(norm: float | None, limit: float) -> None:
    assert_silent(clipping(norm, limit))


def test_the_norm_is_read_seldom() -> None:
    """It waits for the device."""
    asked: list[int] = []
    engine = ScriptedEngine(facts(unasked_clipping=1.0))
    engine.grad_norm = lambda: asked.append(1) or 0.5  # type: ignore[method-assign,func-returns-value]
    assert_silent(run(steps(100).close(), engine=engine))
    assert len(asked) == 8, "after the steps 1, 2, 4 ... 64 and at the end"


@pytest.mark.parametrize(
    ("switched", "kind", "severity"),
    [
        (Switched(frozen=("a.weight",)), "frozen_parameter_moves", "warning"),
        (Switched(unfrozen=("a.weight",)), "unfrozen_parameter_stays", "warning"),
        (Switched(left_out=("a.weight",)), "idle_parameter_moves", "info"),
    ],
)
def test_switched_parameters(switched: Switched, kind: str, severity: str) -> None:
    engine = ScriptedEngine()
    session = replay([], guards=ALONE, engine=engine)
    for event in steps(2).events:
        session.emit(event)
    assert_silent(session)
    engine.switched = switched
    for event in steps(2).events:
        session.emit(event)
    finding = only(session, kind, severity)
    assert (finding.subject, finding.step) == (("a.weight",), 2)


def test_all_parameters_are_looked_at_seldom() -> None:
    asked: list[bool] = []
    engine = ScriptedEngine()
    engine.switched_parameters = lambda every: asked.append(every) or Switched()  # type: ignore[method-assign,func-returns-value,assignment,misc]
    run(steps(2 * LOOK), engine=engine)
    assert [number for number, every in enumerate(asked) if every] == [0, LOOK]


def test_what_moves_a_frozen_parameter() -> None:
    for guards, what in ((ALONE, "an earlier step"), (REPAIRED, "momentum and weight decay")):
        engine = ScriptedEngine()
        engine.switched = Switched(frozen=("a",))
        assert what in only(run(steps(1), guards, engine), "frozen_parameter_moves", "warning").seen


# -- weights and gradients -------------------------------------------------------------------------------------------


def spoiling(step: int, script: Script, **options: Any) -> tuple[Session, list[bool]]:
    engine = ScriptedEngine(facts(**options))
    asked: list[bool] = []
    engine.spoiled_step = lambda last=False: asked.append(last) or step * (len(asked) > 2)  # type: ignore[method-assign,func-returns-value,assignment,misc]
    return run(script, engine=engine), asked


def test_weights_that_a_step_has_spoiled() -> None:
    """The first look is before the first step; an answer may come late, and says of which step it is."""
    session, asked = spoiling(1, steps(2), checks_gradients=False)
    assert "after step 1" in only(session, "weights_not_finite", "error").seen
    assert asked == [False, False, False]
    session, asked = spoiling(1, steps(1).close(), checks_gradients=False)
    only(session, "weights_not_finite", "error")
    assert asked == [False, False, True]


@pytest.mark.parametrize(
    "options",
    [{"checks_gradients": True}, {"checks_gradients": False, "offload_optimizer": "nvme"}],
    ids=["DeepSpeed looks", "swapped out"],
)
def test_weights_that_need_no_look(options: dict[str, Any]) -> None:
    session, asked = spoiling(1, steps(3).close(), **options)
    assert_silent(session)
    assert asked == []


def test_weights_that_stay_finite() -> None:
    session, asked = spoiling(0, steps(3).close(failed=True), checks_gradients=False)
    assert_silent(session)
    assert len(asked) == 4, "and none after an exception"
    assert len(spoiling(0, steps(1).forward().backward().step(applied=False), checks_gradients=False)[1]) == 2


def reading(early: bool, **options: Any) -> Session:
    engine = ScriptedEngine(facts(accumulation_steps=2, **options))
    return replay([ev.GradientRead("safe_get_full_grad", 1, early)], guards=ALONE, engine=engine)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"stage": 2}, "zeros, or an earlier window's gradient"),
        ({"stage": 3}, "zeros, or an earlier window's gradient"),
        ({"stage": 2, "offload_optimizer": "none"}, "an error"),
    ],
)
def test_a_gradient_read_before_its_window_is_full(options: dict[str, Any], answer: str) -> None:
    finding = only(reading(True, **options), "early_gradient_read", "warning")
    assert answer in finding.effect
    assert "2 micro-batches a step" in finding.seen
    assert_silent(reading(False, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "offload_optimizer": "none"},
        {"stage": 2, "offload_optimizer": "none", "adds_at_boundary": True},
        {"stage": 1, "offload_optimizer": "none"},
        {"stage": 2, "managed_accumulation": False},
    ],
    ids=["ZeRO-3", "before 0.17", "ZeRO-1", "unmanaged"],
)
def test_a_gradient_read_in_mid_window_that_is_right(options: dict[str, Any]) -> None:
    assert_silent(reading(True, **options))


def test_an_edit_that_is_lost() -> None:
    session = replay([ev.EditLost(("a.weight", "b"))], guards=ALONE, engine=ScriptedEngine(facts(stage=3)))
    finding = only(session, "lost_edit", "warning")
    assert finding.subject == ("a.weight", "b")
    assert "modifier_rank=0" in finding.remedy


# -- ranks -----------------------------------------------------------------------------------------------------------


def two_ranks(
    monkeypatch: pytest.MonkeyPatch, script: Script, other: int | None, guards: Any = ALONE, **options: Any
) -> tuple[Session, list[int]]:
    """Replay on rank 0 of two; ``other`` is what rank 1 says, None for the same."""
    said: list[int] = []

    def answer(flag: bool, word: int, *, groups: Any, device: str, broken: bool) -> Votes:
        said.append(word)
        words = {0: word, 1: word if other is None else other}
        return Votes([], words if all(words.values()) else {})

    monkeypatch.setattr(session_module, "vote", answer)
    engine = ScriptedEngine(facts(world_size=2, **options))
    engine.order = 77
    return replay(script, guards=guards, config={"on_violation": "raise"}, engine=engine), said


def test_ranks_with_different_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GuardViolation) as caught:
        two_ranks(monkeypatch, steps(1), 5 << 31)
    assert caught.value.ranks == (0, 1), "both stop"
    [finding] = caught.value.findings
    assert (finding.kind, finding.severity) == ("rank_order", "error")
    assert "rank(s) 0 is not that of rank(s) 1" in finding.seen


def test_ranks_with_different_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GuardViolation) as caught:
        two_ranks(monkeypatch, steps(1), 77 << 31 | 5)
    assert [f.kind for f in caught.value.findings] == ["rank_boundaries"]


def test_ranks_that_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    session, said = two_ranks(monkeypatch, steps(3), None)
    assert_silent(session)
    assert len(said) == 3
    assert len(set(said)) == 1
    assert 0 < said[0] < 1 << 62


@pytest.mark.parametrize(
    ("script", "guards", "options"),
    [
        (steps(1), ALONE, {"stage": 3}),
        (steps(1), ALONE, {"stage": 0, "offload_optimizer": "none"}),
        (Script().forward().abort().forward().backward().step(), ALONE, {}),
    ],
    ids=["stage 3", "stage 0", "aborted"],
)
def test_ranks_that_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, script: Script, guards: Any, options: dict[str, Any]
) -> None:
    session, said = two_ranks(monkeypatch, script, 5 << 31, guards, **options)
    assert said == [0]
    assert [f.kind for f in session.findings if f.kind.startswith("rank")] == []


def test_boundaries_are_not_compared_where_gradients_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for guards, options in ((REPAIRED, {}), (ALONE, {"stage": 1})):
        _, said = two_ranks(monkeypatch, steps(1), None, guards, **options)
        assert said == [77 << 31]


def test_a_vote_of_one_is_no_communication() -> None:
    assert vote(True, 5) == ([0], {}, False)
    assert vote(False, 5, groups=("none",)) == ([], {}, False)
