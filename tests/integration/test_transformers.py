"""Hugging Face's Trainer on a real DeepSpeed engine, beside plain PyTorch. One rank: accelerate's gather fails with two
on a CPU.

``LAB_PYTHON_PATH`` is put first on the workers' path, to run these tests on other releases of transformers and
accelerate.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.group import Lab

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers and accelerate are not installed",
)
PYTHON_PATH = os.environ.get("LAB_PYTHON_PATH", "")
ROOT = Path(__file__).resolve().parents[2]
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
METRICS = {"zeroguard/findings", "zeroguard/repairs", "zeroguard/host_wait_ms"}


def run(lab: Lab, call: str, *, python_path: str = PYTHON_PATH, **case: Any) -> dict[str, Any]:
    answer = lab.run(1, {"call": f"hf_programs.{call}", **case}, python_path=python_path, timeout=240)[0]
    assert "trace" not in answer or isinstance(answer["trace"], list), answer["trace"]  # the program itself failed
    assert answer.get("status") != "dead", answer
    return answer


def kinds(answer: dict[str, Any]) -> list[tuple[str, int]]:
    return [(finding["kind"], finding["step"]) for finding in answer["findings"]]


# -- parity with plain PyTorch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"gas": 2, "how": "list"},
        {"optim": "adamw_torch", "clip": 1.0, "how": "add"},
        {"trainer": "Summed", "clip": 0.5},
        {"offload": True, "gas": 2},
        {"guarded": False},
    ],
    ids=str,
)
@STAGES
def test_a_healthy_training_is_exact_and_silent(lab: Lab, stage: int, case: dict[str, Any]) -> None:
    answer = run(lab, "train", stage=stage, **case)
    assert answer["status"] == "exact", (answer["differences"], answer["error"])
    assert len(answer["differences"]) == answer["engine_steps"] == answer["global_step"] == 3
    assert answer["left"] == []
    if case.get("guarded", True):
        assert answer["findings"] == [], answer["texts"]
        assert answer["repairs"] == []
        assert answer["closed"]
        assert answer["verdicts"]["trainer_steps"] == answer["verdicts"]["accumulation"] == "passed"


@pytest.mark.parametrize("gas", [1, 2])
@STAGES
def test_guards_act_before_the_step_and_every_callback_after_it(lab: Lab, stage: int, gas: int) -> None:
    """Two losses, two backwards and a read, by the engine's own methods: the way out that the findings name."""
    answer = run(lab, "train", stage=stage, trainer="ByHand", gas=gas)
    assert answer["status"] == "exact", (answer["differences"], answer["error"])
    assert answer["findings"] == [], answer["texts"]
    repair = "module_counters_restored" if stage == 3 else "gradients_added"
    rearmed = ["backward_rearmed", *(["module_counters_restored"] if stage == 3 else [])] * gas
    once = [*rearmed, *([] if stage == 3 else [repair]), "optimizer.step"]
    assert answer["trace"] == [*once, "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"] * 3
    assert answer["by_hand"] == pytest.approx(answer["true"], rel=1e-5)


# -- faults ------------------------------------------------------------------------------------------------------------


@STAGES
def test_two_backwards_step_twice_a_batch(lab: Lab, stage: int) -> None:
    """Unguarded: six steps for three batches and no word (ZeRO-1 and 2), or a crash after a step (ZeRO-3)."""
    plain = run(lab, "train", stage=stage, trainer="Twice", guarded=False)
    if stage == 3:
        assert plain["status"] == "crash"
        assert "shape [0]" in plain["error"]
        assert (plain["engine_steps"], plain["global_step"]) == (1, 0)
    else:
        assert plain["status"] == "wrong"
        assert plain["error"] == ""
        assert (plain["engine_steps"], plain["global_step"]) == (6, 3)
    seen = run(lab, "train", stage=stage, trainer="Twice", guarded={"on_violation": "record"})
    assert kinds(seen) == [("step_between_backwards", 1)]
    # Seen in the second backward, before the step that it leads to.
    assert [line for line in seen["trace"] if "restored" not in line][:3] == [
        "optimizer.step",
        "step_between_backwards",
        "optimizer.step",
    ]
    text = seen["texts"][0]
    assert "calls engine.step inside the backward" in text
    assert "call backward once" in text
    assert "accelerator.backward(loss_a + loss_b)" in text


@STAGES
def test_a_violation_ends_the_training_and_leaves_the_engine_unwrapped(lab: Lab, stage: int) -> None:
    answer = run(lab, "train", stage=stage, trainer="Twice")
    assert answer["status"] == "crash"
    assert answer["error"].startswith("GuardViolation: zeroguard stopped training: 1 error")
    assert "add the losses and call backward once" in answer["error"]
    assert (answer["engine_steps"], answer["global_step"]) == (2, 0)
    assert answer["left"] == []
    assert answer["closed"]


@STAGES
def test_two_forwards_with_a_backward_each_step_twice_a_batch(lab: Lab, stage: int) -> None:
    """Only the Trainer's own steps give this one away."""
    answer = run(lab, "train", stage=stage, trainer="TwoForwards")
    assert (answer["status"], answer["engine_steps"], answer["global_step"]) == ("wrong", 6, 3)
    assert kinds(answer) == [("several_steps_a_batch", 2)]
    assert answer["findings"][0]["severity"] == "warning"
    assert "add the losses and call backward once" in answer["texts"][0]
    assert answer["verdicts"]["trainer_steps"] == "findings"


@pytest.mark.parametrize("place", ["on_pre_optimizer_step", "on_optimizer_step"])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_a_gradient_read_in_a_callback_comes_after_the_step(lab: Lab, stage: int, offload: bool, place: str) -> None:
    answer = run(lab, "train", stage=stage, offload=offload, read_at=place, clip=1.0)
    assert kinds(answer) == [("late_gradient_read", 1)]
    assert answer["findings"][0]["severity"] == "warning"
    text = answer["texts"][0]
    assert "on_pre_optimizer_step and on_optimizer_step it is over" in text
    assert "read between backward and step" in text
    assert "grad_norm=True" in text
    assert answer["status"] == "exact"  # a read changes nothing
    if offload:
        # A number, of the gradient after clipping.
        seen = [float(read) for read in answer["reads"]]
        assert all(0 < read < 0.8 * true for read, true in zip(seen, answer["true"], strict=True)), answer
    elif stage == 3:
        assert [float(read) for read in answer["reads"]] == pytest.approx(answer["true"], rel=1e-5)
    else:
        assert all(read.startswith("ValueError: Gradients are only available") for read in answer["reads"])


# -- finding the engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_each_of_two_trainers_gets_its_own_engine(lab: Lab, stage: int) -> None:
    answer = run(lab, "two_trainers", stage=stage)
    assert answer == {"own": [True, True], "different": True, "first": [True, True]}


def test_one_callback_in_two_trainers_and_what_attach_refuses(lab: Lab) -> None:
    answer = run(lab, "one_callback_two_trainers", stage=2)
    assert answer["own"] == [True, True]
    assert answer["counts"] == [3, 6]
    assert answer["listed"] == 1
    assert "With earlier engines" in answer["summary"]
    assert answer["second"].startswith("AlreadyGuardedError: this Sequential already has a ZeroGuardTrainerCallback")
    assert "GPT2LMHeadModel" in answer["no_trainer"]
    assert "zeroguard.guard(...)" in answer["no_trainer"]
    assert answer["missing"] == "ConfigError: missing: 'ignore' is not allowed; allowed: 'warn', 'raise'"
    assert "did you mean 'on_violation'" in answer["config"]


def test_the_end_of_an_earlier_trainer_does_not_end_the_session_of_the_next(lab: Lab) -> None:
    assert run(lab, "folds", stage=2) == {"first_gone": True, "checks": 6}


def test_a_second_train_of_one_trainer(lab: Lab) -> None:
    """Without model_init the Trainer goes on with an engine that accelerate has destroyed; the user hears why."""
    answer = run(lab, "again", stage=2)
    assert "'NoneType' object has no attribute 'backward'" in answer["error"]
    assert "has destroyed the engine" in answer["logged"][0]
    assert "make a new Trainer for each train()" in answer["logged"][0]
    assert answer["left"] == []
    answer = run(lab, "again", stage=3, model_init=True)
    assert answer["error"] == ""
    assert answer["new"]
    assert answer["own"]
    assert answer["checks"] == 6
    assert answer["left"] == answer["logged"] == answer["warned"] == []


def test_a_second_engine_in_one_train(lab: Lab) -> None:
    answer = run(lab, "two_engines", stage=2)
    assert answer["error"] == ""
    assert (answer["engines"], answer["last"], answer["steps"]) == (2, True, 3)
    assert answer["left"] == [[], []]
    assert answer["findings"] == []


def test_the_deepspeed_configuration_may_hold_zeroguards(lab: Lab) -> None:
    answer = run(lab, "from_json", stage=2)
    assert answer["selected"] == ["retained_graph", "trainer_steps"]
    assert answer["findings"] == answer["repairs"] == []


# -- no engine: the user must hear it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["list", "attach"])
def test_without_deepspeed_the_user_hears_it(lab: Lab, how: str) -> None:
    answer = run(lab, "no_engine", stage=None, how=how)
    assert answer["error"] == ""
    (logged,), (warned,) = answer["logged"], answer["warned"]
    assert logged.startswith("ERROR: ZeroGuardTrainerCallback guards nothing in this training")
    assert "trainer.accelerator.deepspeed_engine_wrapped (None)" in logged
    assert "TrainingArguments has no deepspeed=..." in logged
    assert "what to do: give TrainingArguments(deepspeed=...)" in logged
    assert warned.startswith("UserWarning: zeroguard guards nothing in this training: TrainingArguments has no")
    assert not any(METRICS & row.keys() for row in answer["history"])
    assert answer["summary"] == "zeroguard: no DeepSpeed engine was guarded."


def test_missing_raise_ends_the_training(lab: Lab) -> None:
    answer = run(lab, "no_engine", stage=None, missing="raise")
    assert answer["error"].startswith("EngineNotFoundError: ZeroGuardTrainerCallback guards nothing")
    assert answer["logged"] == answer["warned"] == answer["history"] == []


def test_accelerate_use_cpu_is_named() -> None:
    """In an environment of its own: Accelerate drops DeepSpeed there without a word."""
    lab = Lab(env={"ACCELERATE_USE_CPU": "true"})
    try:
        answer = run(lab, "no_engine", stage=2)
    finally:
        lab.close()
    assert answer["error"] == ""
    (logged,) = answer["logged"]
    assert "TrainingArguments.deepspeed (set), ACCELERATE_USE_CPU (true)" in logged
    assert "Accelerate drops DeepSpeed without a word" in logged
    assert "what to do: unset ACCELERATE_USE_CPU" in logged
    assert len(answer["warned"]) == 1


# -- logs, evaluation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["list", "attach", "add"])
def test_logs_reach_the_history_and_earlier_callbacks(lab: Lab, how: str) -> None:
    """The watching callback stands before zeroguard's in callbacks=[...], as those of report_to do."""
    answer = run(lab, "train", stage=2, trainer="Twice", guarded={"on_violation": "record"}, how=how)
    *steps, last = answer["history"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row.keys() >= METRICS and "loss" in row for row in steps)
    assert [row["zeroguard/findings"] for row in answer["history"]] == [1.0, 1.0, 1.0, 1.0]
    assert "train_runtime" in last
    assert last["zeroguard/findings"] == 1.0
    assert all(set(logs) >= METRICS for logs in answer["logs"])
    assert len(answer["logs"]) == 4


def same_norms(answer: dict[str, Any], *steps: int) -> None:
    """Rows with norms at these steps, from 1, in the history and as an earlier callback sees them."""
    assert [step for step, _ in answer["rows"]] == list(steps)
    for step, norms in answer["rows"]:
        assert norms == pytest.approx(answer["true"][step - 1], rel=1e-5)
    assert [count for count in answer["logged"] if count] == [len(norms) for _, norms in answer["rows"]]


@pytest.mark.parametrize(
    ("stage", "offload", "gas", "per"),
    [(1, False, 1, "total"), (2, False, 2, "parameter"), (2, True, 1, "module"), (3, False, 2, "total")],
)
def test_norms_by_name_are_logged_once_a_step(lab: Lab, stage: int, offload: bool, gas: int, per: str) -> None:
    answer = run(lab, "norms", stage=stage, offload=offload, gas=gas, grad_norms=per)
    same_norms(answer, 1, 2, 3, 4)
    assert answer["losses"] == [1, 2, 3, 4]
    assert answer["findings"] == []


@pytest.mark.parametrize(
    ("options", "steps", "losses"),
    [
        ({"logging_steps": 3}, [3, 6], [3, 6]),
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4], [1, 4]),
        ({"logging_steps": 0.5}, [3, 6], [3, 6]),
        ({"logging_strategy": "no"}, [], []),
        ({"logging_strategy": "epoch"}, [6], [6]),
        ({"logging_steps": 3, "grad_norms_every_n_steps": 2}, [2, 4, 6], [3, 6]),
    ],
    ids=str,
)
def test_norms_are_read_in_the_rhythm_of_the_log(
    lab: Lab, options: dict[str, Any], steps: list[int], losses: list[int]
) -> None:
    answer = run(lab, "norms", stage=2, steps=6, **options)
    same_norms(answer, *steps)
    assert answer["losses"] == losses


def test_no_norms_are_logged_where_there_are_none(lab: Lab) -> None:
    answer = run(lab, "norms", stage=2, trainer="Cleared")
    assert [step for step, _ in answer["rows"]] == [1, 3, 4]
    assert answer["losses"] == [1, 2, 3, 4]
    assert len(answer["warnings"]) == 1
    assert "no gradient norms before step 1" in answer["warnings"][0]


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation(lab: Lab, stage: int) -> None:
    answer = run(lab, "evaluation", stage=stage)
    if stage == 3:
        assert answer["alone"] == ["", ""]
    else:  # transformers' own rule
        assert all("ZeRO inference only makes sense with ZeRO Stage 3" in text for text in answer["alone"])
    assert answer["no_session"]
    assert answer["findings"] == [], answer["texts"]
    assert answer["logged"] == answer["warned"] == []
    evaluated = [row for row in answer["history"] if "eval_loss" in row]
    assert len(evaluated) == 3
    assert not any(METRICS & row.keys() for row in evaluated)


# -- exceptions, resumes -----------------------------------------------------------------------------------------------


@STAGES
def test_an_exception_leaves_the_engine_unwrapped(lab: Lab, stage: int) -> None:
    assert run(lab, "failing", stage=stage, how="with") == {"error": "RuntimeError: boom", "left": [], "closed": True}


def test_without_the_with_block_the_end_of_the_trainer_unwraps(lab: Lab) -> None:
    answer = run(lab, "failing", stage=2, how="list")
    assert answer == {"error": "RuntimeError: boom", "open": True, "gone": True, "left": [], "closed": True}


@pytest.mark.parametrize("how", ["list", "attach"])
@pytest.mark.parametrize("stage", [2, 3])
def test_counters_go_on_over_a_resume(lab: Lab, stage: int, how: str) -> None:
    answer = run(lab, "resume", stage=stage, restore=True, how=how)
    assert len(answer["differences"]) == 4
    assert max(answer["differences"]) <= 1e-6
    assert not answer["same"]  # the Trainer has made a callback of its own, and yet:
    assert answer["own"]
    assert answer["closed"]
    assert answer["sink"] == ["late_gradient_read"]
    assert kinds(answer) == [("late_gradient_read", 3)]
    assert (answer["listed"], answer["first"]) == (1, True)
    assert (answer["before"]["checks"], answer["after"]["checks"]) == (2, 4)
    assert "With earlier engines and the runs before a resume" in answer["totals"]
    state = answer["saved"]["ZeroGuardTrainerCallback"]
    norms = {"grad_norm": True, "grad_norms": None, "grad_norms_every_n_steps": None}
    assert state["args"] == {"config": {"sinks": []}, **norms, "missing": "warn"}
    assert state["attributes"]["counters"]["guards"]["trainer_steps"]["checks"] == 2
    for row in answer["history"][:4]:
        # Older Trainers have no norm of their own where they do not clip.
        assert row["zeroguard/grad_norm"] == pytest.approx(row.get("grad_norm", row["zeroguard/grad_norm"]))


def test_a_resume_without_restored_callbacks_counts_afresh(lab: Lab) -> None:
    answer = run(lab, "resume", stage=2, restore=False)
    assert answer["same"]
    assert answer["after"]["checks"] == 2
    assert max(answer["differences"]) <= 1e-6


@pytest.mark.parametrize("restore", [True, False])
def test_a_checkpoint_from_before_zeroguard_loads_and_the_next_one_saves(lab: Lab, restore: bool) -> None:
    """The Trainer alone raises KeyError when it saves the state of a callback that the checkpoint did not know."""
    answer = run(lab, "resume", stage=2, restore=restore, first=False)
    assert "ZeroGuardTrainerCallback" not in answer["saved"]
    assert answer["own"]
    assert answer["after"]["checks"] == 2
    again = answer["saved_again"]["stateful_callbacks"]["ZeroGuardTrainerCallback"]
    assert again["attributes"]["counters"]["guards"]["trainer_steps"]["checks"] == 2


def test_the_exported_state_makes_the_same_callback(lab: Lab) -> None:
    answer = run(lab, "exported")
    assert all(case["same"] for case in answer.values())
    args = {name: case["state"]["args"] for name, case in answer.items()}
    assert args["model"] == {
        "config": {"guards": [{"name": "retained_graph", "action": "detect"}], "sinks": []},
        "grad_norm": True,
        "grad_norms": "module",
        "grad_norms_every_n_steps": 5,
        "missing": "raise",
    }
    assert args["dict"]["config"] == {"on_violation": "warn"}
    assert args["overrides"] == {
        "config": None,
        "grad_norm": False,
        "grad_norms": None,
        "grad_norms_every_n_steps": None,
        "missing": "warn",
        "agree": False,
        "guards": [{"name": "host_read"}],
    }
    assert args["path"]["config"].endswith("guard.json")


# -- the example -------------------------------------------------------------------------------------------------------


def test_the_example_runs() -> None:
    done = example("transformers_trainer.py")
    assert "Summed: 4 steps of the Trainer, 4 of the engine" in done
    assert "Twice: 4 steps of the Trainer, 8 of the engine" in done
    assert done.count("step between backwards (error)") == 1


def example(name: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", f"examples/{name}"]
    path = os.pathsep.join(part for part in (PYTHON_PATH, os.environ.get("PYTHONPATH", "")) if part)
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_zeroguard_imports_no_trainer() -> None:
    code = "import sys, zeroguard; print([m for m in ('transformers', 'accelerate', 'deepspeed') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
