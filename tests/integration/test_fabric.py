"""Lightning's Fabric on a real DeepSpeed engine: it calls ``engine.optimizer.step`` and never ``engine.step``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_lightning import CONFIGURATIONS, FIRST, PACKAGES, kinds
from tests.integration.test_lightning import run as run_program
from tests.lab.group import Lab

both_packages = pytest.mark.parametrize("package", PACKAGES)


def run(lab: Lab, ranks: int, **case: Any) -> list[dict[str, Any]]:
    return run_program(lab, ranks, "fabric", **case)


CASES = [("retained", 1, *where) for where in CONFIGURATIONS]
CASES += [("forwards", 1, 1, True), ("forwards", 1, 2, False), ("forwards", 1, 3, False)]
CASES += [("retained", 2, 1, False), ("forwards", 2, 2, True), ("retained", 2, 3, False)]


@pytest.mark.parametrize(("mode", "ranks", "stage", "offload"), CASES)
def test_two_losses(lab: Lab, mode: str, ranks: int, stage: int, offload: bool) -> None:
    for answer in run(lab, ranks, package=FIRST, stage=stage, offload=offload, mode=mode):
        assert answer["status"] == "exact", answer
        assert answer["engine_steps"] == 0  # the engine's own step was never called
        assert kinds(answer) == ["bypassed_engine_step"]
        assert answer["findings"][0]["severity"] == "warning"


@pytest.mark.parametrize("package", PACKAGES[1:])
@pytest.mark.parametrize("stage", [1, 3])
def test_two_losses_in_the_other_package(lab: Lab, package: str, stage: int) -> None:
    assert run(lab, 1, package=package, stage=stage, mode="retained")[0]["status"] == "exact"


@pytest.mark.parametrize("mode", ["retained", "forwards"])
def test_unguarded_is_the_reason(lab: Lab, mode: str) -> None:
    seen = [run(lab, 1, package=FIRST, stage=s, mode=mode, by="")[0]["status"] for s in (1, 2, 3)]
    assert seen == (["wrong", "wrong", "crash"] if mode == "retained" else ["wrong"] * 3)


@both_packages
@pytest.mark.parametrize("by", ["module", "fabric"])
def test_guard_finds_the_engine(lab: Lab, package: str, by: str) -> None:
    """zeroguard.guard of what fabric.setup returned, and of the Fabric."""
    answer = run(lab, 1, package=package, stage=2, mode="retained", by=by)[0]
    assert answer["status"] == "exact", answer
    assert answer["marked"] == []


def test_the_callback_lets_go(lab: Lab) -> None:
    answer = run(lab, 1, package=FIRST, stage=2, mode="retained")[0]
    assert answer["open"]  # Fabric has no event for the end
    assert answer["marked"] == []
    assert answer["metrics"]["zeroguard/repairs"] == len(answer["repairs"])


@pytest.mark.parametrize(("stage", "offload", "error"), [(1, False, "KeyError"), (2, False, "KeyError"), (3, True, "")])
def test_accumulation_needs_the_engine_s_step(lab: Lab, stage: int, offload: bool, error: str) -> None:
    """Reported before DeepSpeed fails, with what to call instead; and that is right."""
    case = {"package": FIRST, "stage": stage, "offload": offload, "mode": "one", "gas": 2}
    answer = run(lab, 1, **case)[0]
    assert answer["status"] == "crash"
    assert answer["error"].startswith(error or "GuardViolation")
    assert kinds(answer)[0] == "bypassed_engine_step"  # others may see the gradients that are lost by it
    finding = answer["findings"][0]
    assert finding["severity"] == "error"
    assert finding["step"] == 0
    assert "_forward_module.step()" in finding["remedy"]
    assert "gradient_accumulation_steps" in finding["remedy"]
    remedy = run(lab, 1, **case, engine_step=True)[0]
    assert remedy["status"] == "exact", remedy
    assert remedy["findings"] == []


def test_accumulation_on_zero_3_needs_no_boundary(lab: Lab) -> None:
    answer = run(lab, 1, package=FIRST, stage=3, mode="one", gas=2)[0]
    assert answer["status"] == "exact", answer
    assert [finding["severity"] for finding in answer["findings"]] == ["warning"]


@pytest.mark.parametrize(("stage", "gas"), [(1, 1), (2, 1), (3, 1), (3, 2)])
def test_norms_by_name(lab: Lab, stage: int, gas: int) -> None:
    """Of the last step, for ``fabric.log_dict(callback.metrics())``."""
    answer = run(lab, 1, package=FIRST, stage=stage, mode="one", gas=gas, grad_norms="total")[0]
    name = "zeroguard/grad_norm/total"
    assert answer["metrics"][name] == pytest.approx(answer["true"][-1][name], rel=1e-5)


@both_packages
def test_several_engines_and_the_events_that_end_them(lab: Lab, package: str) -> None:
    answer = run_program(lab, 1, "fabric_engines", package=package)[0]
    assert answer["repairs"] == [4, 4]
    for end in ("on_train_end", "teardown", "on_exception", "close", "exit"):
        assert answer[end] == [True, 2], end  # closed, and a summary of each engine
    assert answer["metrics"]["zeroguard/repairs"] == 8.0


@both_packages
def test_the_variable_guards_a_loop(lab: Lab, package: str) -> None:
    found = run_program(lab, 1, "fabric_factory", package=package, explicit=False)[0]["found"]
    assert found == [["InstalledZeroGuardCallback", 4]]
    found = run_program(lab, 1, "fabric_factory", package=package, explicit=True)[0]["found"]
    assert found == [["ZeroGuardCallback", 4], ["InstalledZeroGuardCallback", None]]


def test_without_deepspeed_it_says_so_once(lab: Lab) -> None:
    warnings = run_program(lab, 1, "fabric_without_deepspeed", package=FIRST)[0]["warnings"]
    assert len(warnings) == 1
    assert "strategy='deepspeed_stage_2'" in warnings[0]
