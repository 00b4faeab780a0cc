"""``with zeroguard.guard(accelerator)``: an Accelerate loop on a real DeepSpeed engine, beside plain PyTorch. One rank:
accelerate's gather fails with two on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_transformers import STAGES, example, kinds, pytestmark, run
from tests.lab.group import Lab

__all__ = ["pytestmark"]  # without transformers and accelerate these tests are skipped, too


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"gas": 2, "by": "model"},
        {"pattern": "summed", "clip": 0.5},
        {"offload": True, "gas": 2},
        {"teardown": "save"},
        {"guarded": False},
    ],
    ids=str,
)
@STAGES
def test_a_healthy_loop_is_exact_and_silent(lab: Lab, stage: int, case: dict[str, Any]) -> None:
    answer = run(lab, "accelerate", stage=stage, **case)
    assert answer["status"] == "exact", (answer["differences"], answer["error"])
    assert len(answer["differences"]) == answer["steps"] == 3
    assert answer["findings"] == [], answer.get("texts")
    assert answer["repairs"] == answer["left"] == []


@STAGES
def test_two_backwards_step_twice_a_batch(lab: Lab, stage: int) -> None:
    plain = run(lab, "accelerate", stage=stage, pattern="two", guarded=False)
    if stage == 3:
        assert (plain["status"], plain["steps"]) == ("crash", 1)
        assert "shape [0]" in plain["error"]
    else:
        assert (plain["status"], plain["steps"], plain["error"]) == ("wrong", 6, "")
    seen = run(lab, "accelerate", stage=stage, pattern="two", guarded={"on_violation": "record"})
    assert kinds(seen) == [("step_between_backwards", 1)]
    assert seen["steps"] == 6
    assert "accelerator.backward(loss_a + loss_b)" in seen["texts"][0]
    stopped = run(lab, "accelerate", stage=stage, pattern="two")
    assert stopped["error"].startswith("GuardViolation: zeroguard stopped training: 1 error")
    assert "add the losses and call backward once" in stopped["error"]
    assert stopped["steps"] == 2
    assert stopped["left"] == []


@STAGES
def test_two_backwards_and_one_step_on_the_engine_are_exact(lab: Lab, stage: int) -> None:
    """The prepared model is the engine."""
    answer = run(lab, "accelerate", stage=stage, pattern="engine")
    assert answer["status"] == "exact", (answer["differences"], answer["error"])
    assert answer["findings"] == [], answer["texts"]
    assert answer["steps"] == 3


@STAGES
def test_a_gradient_read_after_the_backward_comes_after_the_step(lab: Lab, stage: int) -> None:
    answer = run(lab, "accelerate", stage=stage, read_late=True)
    assert kinds(answer) == [("late_gradient_read", 1)]
    assert "read between backward and step" in answer["texts"][0]
    assert answer["status"] == "exact"
    error = "" if stage == 3 else "ValueError: Gradients are only available immediately after backward"
    assert all(read.startswith(error) if error else read == "" for read in answer["reads"]), answer["reads"]


@STAGES
def test_an_exception_leaves_the_engine_unwrapped(lab: Lab, stage: int) -> None:
    answer = run(lab, "accelerate", stage=stage, fail=True)
    assert answer["error"] == "RuntimeError: boom"
    assert answer["left"] == []


@STAGES
def test_free_memory_while_guarded(lab: Lab, stage: int) -> None:
    """It destroys the engine; the session closes after that."""
    answer = run(lab, "accelerate", stage=stage, teardown="free")
    assert (answer["status"], answer["error"], answer["marks"]) == ("exact", "", [])


def test_end_training_while_guarded() -> None:
    """It takes the process group down, and with it this worker; closing must not call a collective then."""
    lab = Lab()
    try:
        answer = run(lab, "ended", stage=3)
    finally:
        lab.close()
    assert answer == {"errors": {"end": "", "free": answer["errors"]["free"]}, "closed": True, "left": [], "steps": 3}


@pytest.mark.parametrize("stage", [2, 3])
def test_what_guard_takes(lab: Lab, stage: int) -> None:
    answer = run(lab, "candidates", stage=stage)
    for name in ("accelerator", "model", "trainer", "wrapped"):
        assert answer[name] is True, name
    for name in ("plain_model", "inner_model", "trainer_model", "no_deepspeed", "before_train"):
        assert answer[name].startswith("EngineNotFoundError: no DeepSpeed engine in "), name
        assert "deepspeed_engine_wrapped" in answer[name], name
        assert "what deepspeed.initialize returned" in answer[name], name


def test_the_example_runs() -> None:
    done = example("accelerate_loop.py")
    assert "summed: 4 batches, 4 engine steps" in done
    assert "twice: 4 batches, 8 engine steps" in done
    assert done.count("step between backwards (error)") == 1
