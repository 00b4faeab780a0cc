"""Windows, steps, updates, settings and ranks under the guard ``accumulation``: each fault on a real engine, what it
does to the weights, and the nearest healthy loop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.group import Lab

CONFIGURATIONS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
EACH = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
ZERO = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])
#: largest difference of an exact run: one rounding of a weight
EXACT = 3e-8
ALONE = {"guards": [{"name": "accumulation"}], "on_violation": "record"}
REPAIRED = {"guards": [{"name": "retained_graph"}, {"name": "accumulator_reset"}, {"name": "accumulation"}]}
Found = list[tuple[str, str, int]]


def run(lab: Lab, name: str, ranks: int = 1, **case: Any) -> dict[str, Any]:
    answer = lab.run(ranks, {"call": f"windows.{name}", **case})[0]
    assert "findings" in answer, answer
    return answer


def kinds(answer: dict[str, Any]) -> Found:
    return [(f["kind"], f["severity"], f["step"]) for f in answer["findings"]]


def repaired(stage: int) -> dict[str, Any]:
    """At stage 0 nothing has to be repaired."""
    return {**REPAIRED, "on_violation": "record"} if stage else ALONE


def exact(answer: dict[str, Any]) -> bool:
    assert answer["differences"], answer
    return max(answer["differences"]) <= EXACT


# -- windows and steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gas", [1, 2])
@EACH
def test_several_backwards_at_a_boundary(lab: Lab, stage: int, offload: bool, gas: int) -> None:
    wrong = stage == 1 or (stage == 2 and not (offload and gas > 1))
    answer = run(lab, "one_step_of_many", stage=stage, offload=offload, gas=gas, guarded=ALONE)
    assert exact(answer) is not wrong
    assert kinds(answer) == ([("overwritten_gradient", "error", 0)] if wrong else [])
    answer = run(lab, "one_step_of_many", stage=stage, offload=offload, gas=gas, guarded=repaired(stage))
    assert exact(answer)
    assert kinds(answer) == []


@pytest.mark.parametrize(("forward", "kind"), [(False, "second_step"), (True, "step_without_backward")])
@EACH
def test_a_step_without_a_backward(lab: Lab, stage: int, offload: bool, forward: bool, kind: str) -> None:
    case = {"stage": stage, "offload": offload, "forward": forward}
    answer = run(lab, "step_again", guarded=ALONE, **case)
    assert kinds(answer) == [(kind, "error" if stage else "warning", 2)], answer["texts"]
    if offload:
        assert not exact(answer), "the gradient is applied again"
    elif stage:
        assert "'NoneType' object is not iterable" in answer["error"]
        assert "'NoneType' object is not iterable" in answer["findings"][0]["effect"]
    if offload:
        answer = run(lab, "step_again", guarded=repaired(stage), **case)
        assert kinds(answer) == [(kind, "warning", 2)], answer["texts"]
        assert exact(answer), "without momentum nothing moves"


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, True), (2, True), (3, True)])
def test_a_step_after_zero_grad(lab: Lab, stage: int, offload: bool) -> None:
    for forward in (False, True):
        case = {"stage": stage, "offload": offload, "clear": True, "forward": forward}
        answer = run(lab, "step_again", guarded=repaired(stage), **case)
        assert kinds(answer) == [], answer["texts"]
        assert exact(answer)


@EACH
def test_a_window_left_open(lab: Lab, stage: int, offload: bool) -> None:
    case = {"stage": stage, "offload": offload, "guarded": repaired(stage)}
    for told, step in ((True, 1), (False, 2)):  # by an integration; or only when the session closes
        answer = run(lab, "epochs", length=5, say=told, **case)
        assert kinds(answer) == [("open_window", "warning", step)], answer["texts"]
        assert not exact(answer)
    for healthy in ({"length": 4}, {"length": 5, "drop": True}):
        answer = run(lab, "epochs", say=True, **healthy, **case)
        assert kinds(answer) == [], answer["texts"]
        assert exact(answer), "the remedy drops what is left"


@EACH
def test_zero_grad_inside_a_window(lab: Lab, stage: int, offload: bool) -> None:
    for guarded in (ALONE, repaired(stage)):
        case = {"stage": stage, "offload": offload, "guarded": guarded}
        answer = run(lab, "clear_inside", **case)
        assert kinds(answer) == [("cleared_every_micro_batch", "warning", 1)], answer["texts"]
        ignored = guarded is ALONE and stage > 1
        assert exact(answer) is ignored
        assert ("none so far" in answer["findings"][0]["effect"]) is ignored
        for gas in (2, 4):
            assert kinds(run(lab, "clear_inside", every=False, gas=gas, **case)) == []


@EACH
def test_a_loop_that_never_steps(lab: Lab, stage: int, offload: bool) -> None:
    case = {"stage": stage, "offload": offload, "guarded": repaired(stage)}
    answer = run(lab, "never_step", **case)
    assert kinds(answer) == ([("engine_step_never_called", "warning", 0)] if stage else [])
    for healthy in ({"how": "read"}, {"how": "clear"}, {"backwards": 3}):
        assert kinds(run(lab, "never_step", **healthy, **case)) == []


# -- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@EACH
def test_a_skipped_update(lab: Lab, stage: int, offload: bool, dtype: str) -> None:
    answer = run(lab, "non_finite", stage=stage, offload=offload, dtype=dtype, guarded=ALONE)
    if stage == 0 and dtype == "fp32":
        assert kinds(answer) == [("weights_not_finite", "error", 3)], answer["texts"]
        assert answer["seen"][2] == [None, True, False], "it is applied, and the weights are not finite any more"
        return
    assert kinds(answer) == [("skipped_update", "warning", 3)], answer["texts"]
    assert answer["skipped"] == 1
    case = {"stage": stage, "offload": offload, "dtype": dtype, "guarded": ALONE, "bad": list(range(2, 13))}
    answer = run(lab, "non_finite", steps=14, **case)
    assert kinds(answer)[1:] == [("updates_keep_being_skipped", "error", 12)], answer["texts"]


@EACH
def test_the_search_for_a_loss_scale(lab: Lab, stage: int, offload: bool) -> None:
    dynamic = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 1}}
    case = {"stage": stage, "offload": offload, "dtype": "fp16", "guarded": ALONE}
    answer = run(lab, "non_finite", bad=[30], steps=32, **case, **dynamic)
    assert answer["skipped"] > (10 if stage else 0), "in search of the scale"
    assert kinds(answer) == [], answer["texts"]


def test_a_skipped_update_of_bf16_optimizer(lab: Lab) -> None:
    extra = {"data_types": {"grad_accum_dtype": "fp32"}}
    answer = run(lab, "non_finite", stage=1, offload=False, dtype="bf16", guarded=ALONE, **extra)
    assert kinds(answer) == [("skipped_update", "warning", 3)]


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["engine", "module", "late"])
@EACH
def test_a_clip_by_hand(lab: Lab, stage: int, offload: bool, how: str) -> None:
    answer = run(lab, "clip_by_hand", stage=stage, offload=offload, how=how, guarded=ALONE)
    assert kinds(answer) == ([("clipped_nothing", "warning", int(how == "late"))] if stage else []), answer["texts"]
    assert (max(answer["norms"]) == 0.0) is (stage > 0 or how == "late")
    if stage:
        assert exact(answer), "nothing was clipped"
        assert '"gradient_clipping": 0.1 ' in answer["findings"][0]["remedy"]


@EACH
def test_clipping_that_nobody_asked_for(lab: Lab, stage: int, offload: bool) -> None:
    case = {"stage": stage, "offload": offload, "guarded": ALONE}
    answer = run(lab, "default_clip", **case)
    assert answer["clip"] == 1.0, "DeepSpeed's default, from 0.19.6 on"
    assert not exact(answer)
    # At stage 0 in fp32 DeepSpeed keeps no norm.
    assert kinds(answer) == ([("unconfigured_clipping", "warning", 1)] if stage else []), answer["texts"]
    for healthy in ({"scale": 1.0}, {"configured": True}):
        assert kinds(run(lab, "default_clip", **healthy, **case)) == []


@EACH
def test_a_parameter_frozen_after_initialize(lab: Lab, stage: int, offload: bool) -> None:
    case = {"stage": stage, "offload": offload}
    for guarded in (ALONE, repaired(stage)):
        for at, step in ((0, 0), (2, 2)):
            answer = run(lab, "switched", at=at, guarded=guarded, **case)
            assert exact(answer) is (stage == 0)
            assert kinds(answer) == ([("frozen_parameter_moves", "warning", step)] if stage else []), answer["texts"]
            if stage:
                assert answer["findings"][0]["subject"] == ["l.1.weight", "l.1.bias"]
    # Plain SGD has nothing to move it by, where no old gradient is left.
    answer = run(lab, "switched", optimizer="sgd", guarded=ALONE, **case)
    assert kinds(answer) == ([("frozen_parameter_moves", "warning", 2)] if offload else [])
    assert exact(answer) is not offload
    for what in ("freeze", "toggle"):
        answer = run(lab, "switched", what=what, optimizer="sgd", guarded=repaired(stage), **case)
        assert kinds(answer) == []
        assert exact(answer)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_parameter_switched_after_initialize_at_stage_0(lab: Lab, dtype: str) -> None:
    """In low precision DeepSpeed flattens parameters there too."""
    case = {"stage": 0, "offload": False, "dtype": dtype, "guarded": ALONE}
    assert kinds(run(lab, "switched", **case)) == [("frozen_parameter_moves", "warning", 10)]
    assert kinds(run(lab, "switched", what="unfreeze", **case)) == [("unfrozen_parameter_stays", "warning", 10)]
    assert kinds(run(lab, "switched", what="none", **case)) == []


@ZERO
def test_a_frozen_parameter_that_is_left_untouched(lab: Lab, stage: int, offload: bool) -> None:
    """The remedy."""
    guards = [{"name": "retained_graph"}, {"name": "accumulator_reset", "idle": "untouched"}, {"name": "accumulation"}]
    answer = run(lab, "switched", stage=stage, offload=offload, guarded={"guards": guards})
    assert kinds(answer) == []
    assert exact(answer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@EACH
def test_a_parameter_unfrozen_after_initialize(lab: Lab, stage: int, offload: bool, optimizer: str) -> None:
    case = {"stage": stage, "offload": offload, "optimizer": optimizer, "guarded": repaired(stage)}
    answer = run(lab, "switched", what="unfreeze", **case)
    assert kinds(answer) == ([("unfrozen_parameter_stays", "warning", 10)] if stage else []), answer["texts"]
    assert exact(answer) is (stage == 0)
    answer = run(lab, "switched", what="none", **case)
    assert kinds(answer) == []
    assert exact(answer)


# -- ranks -----------------------------------------------------------------------------------------------------------


def ranks(lab: Lab, name: str, **case: Any) -> list[dict[str, Any]]:
    answers = lab.run(2, {"call": f"ranks.{name}", **case}, timeout=30)
    assert all("findings" in a for a in answers), answers
    return answers


def stopped(answers: list[dict[str, Any]], kind: str) -> None:
    """Both ranks, after the first step."""
    for answer in answers:
        assert kinds(answer)[-1] == (kind, "error", 1), answer["texts"]
        assert answer["error"].startswith("GuardViolation"), answer
        assert answer["differences"] == []


RAISES = {"guards": ALONE["guards"]}
HOOKED = {"overlap_comm": True}


def test_ranks_in_different_orders_at_stage_0(lab: Lab) -> None:
    """DeepSpeed makes up for gradients that a rank does not have, and reduces in the order of its parameters."""
    for how in ("flip", "branch", "less"):
        for answer in ranks(lab, "orders", how=how, stage=0, offload=False, guarded=RAISES):
            assert (answer["error"], kinds(answer)) == ("", []), answer
            assert exact(answer)


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (1, True), (2, False), (2, True)])
def test_ranks_reduce_in_different_orders(lab: Lab, stage: int, offload: bool) -> None:
    case = {"stage": stage, "offload": offload}
    for zero in (None, HOOKED, {"reduce_bucket_size": 64}):
        for how in ("flip", "branch"):
            # ZeRO-1 without overlap reduces in the order of its parameters, whatever the backward's was.
            wrong = stage == 2 or how == "branch" or zero is HOOKED
            unguarded = ranks(lab, "orders", how=how, zero=zero, **case)[0]
            assert (max(unguarded["differences"]) > EXACT) is wrong
            for guarded in (RAISES, REPAIRED):
                answers = ranks(lab, "orders", how=how, zero=zero, guarded=guarded, **case)
                if wrong:
                    stopped(answers, "rank_order")
                else:
                    assert [kinds(a) for a in answers] == [[], []]


@pytest.mark.parametrize("gas", [1, 3])
@ZERO
def test_ranks_reduce_in_one_order(lab: Lab, stage: int, offload: bool, gas: int) -> None:
    for zero in (None, HOOKED):
        for guarded in (RAISES, REPAIRED):
            case = {"stage": stage, "offload": offload, "gas": gas, "zero": zero, "guarded": guarded}
            for answer in ranks(lab, "orders", how="same", **case):
                assert (answer["error"], kinds(answer)) == ("", []), answer
                assert exact(answer)


@pytest.mark.parametrize(("stage", "offload"), [(2, False), (2, True), (3, False), (3, True)])
def test_ranks_with_different_boundaries(lab: Lab, stage: int, offload: bool) -> None:
    """On stages 0 and 1 the ranks wait for each other for good."""
    case = {"stage": stage, "offload": offload}
    unguarded = ranks(lab, "boundaries", **case)[0]
    assert exact(unguarded) is (stage == 3)
    answers = ranks(lab, "boundaries", guarded=RAISES, **case)
    if stage == 2:
        stopped(answers, "rank_boundaries")
    for guarded, differ in ((REPAIRED, True), (RAISES, False), (REPAIRED, False)):
        for answer in ranks(lab, "boundaries", differ=differ, guarded=guarded, **case):
            assert (answer["error"], kinds(answer)) == ("", []), answer
            assert exact(answer)
