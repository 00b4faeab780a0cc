"""Lightning's Trainer on a real DeepSpeed engine, from both packages: guarded against plain PyTorch, and the callback's
own duties."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.lab.group import ROOT, Lab

#: A folder with another release of either package, to run these tests on it.
PYTHON_PATH = os.environ.get("LAB_LIGHTNING", "")
PACKAGES = os.environ.get("LAB_LIGHTNING_PACKAGES", "lightning.pytorch pytorch_lightning").split()
FIRST = PACKAGES[0]
CLASS = "zeroguard.integrations.lightning.ZeroGuardCallback"

CONFIGURATIONS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
DETECT = {
    "guards": [{"name": "retained_graph", "action": "detect"}, {"name": "accumulator_reset", "action": "detect"}],
    "on_violation": "record",
}
DIVIDE_ONCE = {
    "guards": [
        {"name": "accumulation", "action": "repair"},
        {"name": "retained_graph"},
        {"name": "accumulator_reset"},
    ]
}

both_packages = pytest.mark.parametrize("package", PACKAGES)


def run(lab: Lab, ranks: int, call: str, **case: Any) -> list[dict[str, Any]]:
    answers = lab.run(ranks, {"call": f"lightning_programs.{call}", **case}, python_path=PYTHON_PATH)
    for answer in answers:
        assert "trace" not in answer, answer["trace"]
        assert answer.get("status") != "dead", answer
    return answers


def kinds(answer: dict[str, Any]) -> list[str]:
    return [finding["kind"] for finding in answer["findings"]]


# -- training --------------------------------------------------------------------------------------------------------


def exact(lab: Lab, ranks: int, **case: Any) -> None:
    for answer in run(lab, ranks, "fit", **case):
        assert answer["status"] == "exact", answer
        assert answer["findings"] == [], answer["texts"]
        assert answer["closed"]


CASES = [(mode, 1, *where) for mode in ("retained", "forwards") for where in CONFIGURATIONS]
CASES += [("forwards", 2, 1, False), ("retained", 2, 2, False), ("retained", 2, 2, True), ("retained", 2, 3, False)]


@pytest.mark.parametrize(("mode", "ranks", "stage", "offload"), CASES)
def test_two_losses_in_manual_optimization(lab: Lab, mode: str, ranks: int, stage: int, offload: bool) -> None:
    exact(lab, ranks, package=FIRST, stage=stage, offload=offload, mode=mode)


@pytest.mark.parametrize("package", PACKAGES[1:])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True), (3, False)])
def test_two_losses_in_the_other_package(lab: Lab, package: str, stage: int, offload: bool) -> None:
    exact(lab, 1, package=package, stage=stage, offload=offload, mode="retained")


@pytest.mark.parametrize("mode", ["auto", "one"])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True), (3, False)])
def test_one_loss(lab: Lab, stage: int, offload: bool, mode: str) -> None:
    exact(lab, 1, package=FIRST, stage=stage, offload=offload, mode=mode)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_validation_in_the_middle(lab: Lab, stage: int, ranks: int) -> None:
    """After every batch, and before the first one."""
    exact(lab, ranks, package=FIRST, stage=stage, mode="retained", validate=True)


#: What happens without zeroguard; the reason for the tests above.
E, W, C = "exact", "wrong", "crash"
UNGUARDED = {
    #            1  1 off 2  2 off 3  3 off
    "auto": (E, E, E, E, E, E),
    "retained": (W, W, W, W, C, C),
    "forwards": (W, W, W, W, W, W),
}


@pytest.mark.parametrize("mode", UNGUARDED)
def test_unguarded_is_the_reason(lab: Lab, mode: str) -> None:
    seen = [
        run(lab, 1, "fit", package=FIRST, stage=stage, offload=offload, mode=mode, guarded=False)[0]["status"]
        for stage, offload in CONFIGURATIONS
    ]
    assert tuple(seen) == UNGUARDED[mode]


@pytest.mark.parametrize(
    ("stage", "offload", "mode"), [(1, False, "retained"), (2, True, "forwards"), (3, False, "forwards")]
)
def test_detect_reports_and_changes_nothing(lab: Lab, stage: int, offload: bool, mode: str) -> None:
    case = {"package": FIRST, "stage": stage, "offload": offload, "mode": mode, "guarded": DETECT}
    answer = run(lab, 1, "fit", **case)[0]
    assert answer["status"] == "wrong"
    # On ZeRO-3 a further backward at a boundary adds to the partition; what it lacks is its own preparation.
    assert ("second_backward" if stage == 3 else "overwritten_gradient") in kinds(answer)
    assert min(finding["step"] for finding in answer["findings"]) == 0
    assert answer["repairs"] == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True), (3, False)])
def test_accumulation_divides_once(lab: Lab, stage: int, offload: bool, ranks: int) -> None:
    case = {"package": FIRST, "stage": stage, "offload": offload, "mode": "auto", "accumulate": 2}
    exact(lab, ranks, **case, guarded=DIVIDE_ONCE)


@both_packages
def test_double_division_is_found(lab: Lab, package: str) -> None:
    answer = run(lab, 1, "fit", package=package, stage=2, mode="auto", accumulate=2)[0]
    assert answer["status"] == "wrong"
    assert kinds(answer) == ["double_division"]
    finding = answer["findings"][0]
    assert finding["severity"] == "warning"
    assert finding["step"] == 0
    assert "Lightning" in finding["seen"]


def test_no_division_is_found_where_there_is_none(lab: Lab) -> None:
    """Manual optimization divides nothing."""
    for mode in ("auto", "retained"):
        assert kinds(run(lab, 1, "fit", package=FIRST, stage=2, mode=mode)[0]) == []


def test_several_optimizers_are_refused_by_lightning(lab: Lab) -> None:
    answer = run(lab, 1, "several_optimizers", package=FIRST)[0]
    assert answer["error"].startswith("MisconfigurationException: DeepSpeed currently only supports single optimizer")
    assert answer["session"] is None


# -- where guards act, and what they leave behind --------------------------------------------------------------------


@both_packages
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True), (3, False)])
def test_repairs_come_before_the_step(lab: Lab, package: str, stage: int, offload: bool) -> None:
    case = {"package": package, "stage": stage, "offload": offload, "mode": "retained"}
    trace = run(lab, 1, "order", **case)[0]["order"]
    assert trace.count("optimizer.step") >= 2
    batches = " ".join(trace).split("on_train_batch_end")[:2]
    for batch in batches:
        assert "repair backward_rearmed" in batch.split("optimizer.step")[0], trace
        assert "repair" not in batch.split("on_before_optimizer_step")[1], trace


def test_findings_come_before_the_step(lab: Lab) -> None:
    trace = run(lab, 1, "order", package=FIRST, stage=2, mode="forwards", guarded=DETECT)[0]["order"]
    assert trace.index("finding overwritten_gradient") < trace.index("optimizer.step"), trace


@pytest.mark.parametrize("kind", ["training_step", "validation_step", "ctrl_c"])
@pytest.mark.parametrize(("stage", "offload"), [(2, True), (3, False)])
def test_an_exception_leaves_the_engine_as_it_was(lab: Lab, stage: int, offload: bool, kind: str) -> None:
    """By identity: what differs afterwards also differs without zeroguard."""
    case = {"package": FIRST, "stage": stage, "offload": offload, "kind": kind}
    guarded = run(lab, 1, "interrupted", **case, guarded=True)[0]
    without = run(lab, 1, "interrupted", **case, guarded=False)[0]
    assert guarded["raised"] == without["raised"]
    assert guarded["changed"] == without["changed"]
    assert guarded["marked"] == []
    assert guarded["closed"]
    assert guarded["failed"]


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_counters_go_on_over_a_resume(lab: Lab, stage: int, ranks: int) -> None:
    for answer in run(lab, ranks, "resume", package=FIRST, stage=stage):
        assert answer["step"] == 4
        assert answer["first"]["retained_graph"] > 0
        for name in ("retained_graph", "accumulator_reset"):
            assert answer["second"][name] == 2 * answer["first"][name]
            # The callback that saved it may resume from it, too: nothing is counted twice, or turned back by a test.
            assert answer["again"][name] == answer["second"][name]
            assert stage == 3 or answer["after_test"][name] == answer["second"][name]
        assert "the runs before a resume" in answer["summary"]
        assert set(answer["state"]) == {"version", "guards"}


def test_a_checkpoint_from_before_zeroguard_loads(lab: Lab) -> None:
    answer = run(lab, 1, "resume", package=FIRST, stage=3, saved_with=False)[0]
    assert answer["step"] == 4
    assert answer["first"] == {}
    assert answer["events"]["retained_graph"] > 0


def test_a_checkpoint_loads_without_zeroguard(lab: Lab) -> None:
    assert run(lab, 1, "resume", package=FIRST, stage=2, loaded_with=False)[0]["step"] == 4


@pytest.mark.skipif(len(PACKAGES) < 2, reason="one package is tested")
def test_a_checkpoint_moves_between_the_packages(lab: Lab) -> None:
    for package, into in (PACKAGES, reversed(PACKAGES)):
        answer = run(lab, 1, "resume", package=package, into=into, stage=2)[0]
        assert answer["second"]["retained_graph"] == 2 * answer["first"]["retained_graph"]


# -- other runs of a Trainer -----------------------------------------------------------------------------------------


@both_packages
@pytest.mark.parametrize("stage", [2, 3])
def test_every_kind_of_run(lab: Lab, package: str, stage: int) -> None:
    """validate, fit, fit again, test, predict, another Trainer, a fit without an epoch: nothing stays wrapped."""
    answer = run(lab, 1, "runs", package=package, stage=stage)[0]
    assert answer["status"] == "exact"
    counts = dict(answer["counts"])
    assert counts["fit again"] > counts["fit"] > 0
    assert counts["fast_dev_run"] > counts["predict"]
    for what, _, closed, marked in answer["sessions"]:
        assert closed in (None, True), what
        assert marked == [], what
    # A fit has a session of its own each time.
    sessions = {what: number for what, number, *_ in answer["sessions"]}
    assert len({sessions[what] for what in ("fit", "fit again", "fast_dev_run", "no epoch")}) == 4


@pytest.mark.parametrize("where", ["fit", "predict", "test"])
def test_an_evaluation_leaves_nothing_in_flight(lab: Lab, where: str) -> None:
    """ZeRO-3, left after half of the layers: the engine of fit, and that of an evaluation, which has no optimizer."""
    without = run(lab, 1, "leaves_early", package=FIRST, run=where, guarded=False)[0]
    assert without["seen"]["right after"]["INFLIGHT"] > 0
    answer = run(lab, 1, "leaves_early", package=FIRST, run=where, guarded=True)[0]
    assert answer["seen"]["right after"]["INFLIGHT"] == answer["seen"]["right after"]["registry"] == 0
    assert "gather_released" in {repair["kind"] for repair in answer["repairs"]}
    assert answer["findings"] == []


@both_packages
def test_without_deepspeed_it_says_so_once(lab: Lab, package: str) -> None:
    answer = run(lab, 1, "no_deepspeed", package=package)[0]
    assert len(answer["warnings"]) == 1
    assert "SingleDeviceStrategy" in answer["warnings"][0]
    assert "strategy='deepspeed_stage_2'" in answer["warnings"][0]
    assert answer["state"] == {}


# -- what is logged --------------------------------------------------------------------------------------------------


@both_packages
def test_metrics_go_to_the_loggers(lab: Lab, package: str) -> None:
    answer = run(lab, 1, "logged", package=package, mode="retained", grad_norm=True)[0]
    keys = {"zeroguard/findings", "zeroguard/repairs", "zeroguard/host_wait_ms", "zeroguard/grad_norm"}
    rows = answer["rows"]
    assert [row["step"] for row in rows] == [1, 3], rows  # every second step, as log_every_n_steps says
    assert all(set(row) == {"step", *keys} for row in rows)
    # As of the step at which they were written: two repairs a step.
    assert [row["zeroguard/repairs"] for row in rows] == [4.0, 8.0]
    assert rows[0]["zeroguard/grad_norm"] != rows[1]["zeroguard/grad_norm"]
    assert answer["bar"] == {"zeroguard/findings": 0.0}
    assert set(answer["callback_metrics"]) == keys


def test_the_norm_is_logged_only_when_asked_for(lab: Lab) -> None:
    rows = run(lab, 1, "logged", package=FIRST, mode="one")[0]["rows"]
    assert rows
    assert not any("zeroguard/grad_norm" in row for row in rows)


def test_a_finding_reaches_the_progress_bar_at_once(lab: Lab) -> None:
    case = {"package": FIRST, "mode": "auto", "accumulate": 2, "every": 50}
    answer = run(lab, 1, "logged", **case)[0]
    assert answer["bar"] == {"zeroguard/findings": 1.0}
    assert answer["rows"] == []  # the loggers keep their own rhythm
    assert run(lab, 1, "logged", **case, progress_bar=False)[0]["bar"] == {}


def test_accumulation_logs_once_a_step(lab: Lab) -> None:
    rows = run(lab, 1, "logged", package=FIRST, mode="auto", accumulate=2, steps=8)[0]["rows"]
    assert [row["step"] for row in rows] == [1, 3]


def same_norms(rows: list[dict[str, Any]], true: list[dict[str, float]]) -> None:
    assert [row["norms"] for row in rows] == [pytest.approx(norms, rel=1e-5) for norms in true]


@both_packages
@pytest.mark.parametrize(
    ("stage", "offload", "per"),
    [(1, False, "total"), (2, True, "module"), (3, False, "parameter"), (3, True, "module")],
)
def test_norms_by_name_are_those_of_plain_pytorch(lab: Lab, package: str, stage: int, offload: bool, per: str) -> None:
    answer = run(lab, 1, "norms", package=package, stage=stage, offload=offload, per=per)[0]
    assert [row["step"] for row in answer["rows"]] == [0, 1, 2, 3]
    same_norms(answer["rows"], answer["true"])
    assert len(answer["true"][0]) == {"total": 1, "module": 3, "parameter": 6}[per]
    assert not any("grad_norm" in name for name in answer["callback_metrics"])
    assert answer["findings"] == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True), (3, False)])
def test_norms_are_logged_once_a_step_of_an_accumulation(lab: Lab, stage: int, offload: bool, ranks: int) -> None:
    case = {"package": FIRST, "stage": stage, "offload": offload, "window": 2, "steps": 8, "guarded": DIVIDE_ONCE}
    for answer in run(lab, ranks, "norms", **case):  # this logger does not mind which rank it is on
        assert [row["step"] for row in answer["rows"]] == [0, 1, 2, 3]
        same_norms(answer["rows"], answer["true"])
        assert answer["metrics"]["zeroguard/grad_norm/total"] == pytest.approx(
            answer["true"][-1]["zeroguard/grad_norm/total"], rel=1e-5
        )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_that_steps_by_itself_logs_norms_once_a_step(lab: Lab, stage: int) -> None:
    """Lightning's logs come with each of its batches; a batch without a step has no norms."""
    answer = run(lab, 1, "norms", package=FIRST, stage=stage, mode="hand", window=2, steps=8)[0]
    assert [row["step"] for row in answer["rows"]] == [1, 3, 5, 7]
    same_norms(answer["rows"], answer["true"])


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"every": 3}, [2, 5]), ({"every": 50}, []), ({"every": 50, "grad_norms_every_n_steps": 2}, [1, 3, 5])],
)
def test_norms_are_read_in_the_rhythm_of_the_log(lab: Lab, options: dict[str, int], steps: list[int]) -> None:
    answer = run(lab, 1, "norms", package=FIRST, stage=2, steps=6, **options)[0]
    assert [row["step"] for row in answer["rows"]] == steps
    same_norms(answer["rows"], [answer["true"][step] for step in steps])


def test_no_norms_are_logged_where_there_are_none(lab: Lab) -> None:
    """The loop takes the gradients away before its second step: no row, least of all an old one."""
    case = {"mode": "hand", "window": 2, "steps": 8, "clear_at": 3, "guarded": {"on_violation": "record"}}
    answer = run(lab, 1, "norms", package=FIRST, stage=2, **case)[0]
    assert [row["step"] for row in answer["rows"]] == [1, 5, 7]
    same_norms(answer["rows"][:1], answer["true"][:1])
    assert len(answer["warnings"]) == 1
    assert "no gradient norms before step 1" in answer["warnings"][0]


@both_packages
def test_rank_0_logs_a_summary_at_the_end_of_fit(lab: Lab, package: str) -> None:
    lines = run(lab, 1, "logged", package=package, mode="retained", summary=True)[0]["lines"]
    assert len(lines) == 1
    assert lines[0].startswith("zeroguard, rank 0: ZeRO-2")
    assert "retained_graph" in lines[0]


def test_the_summary_can_be_left_out_and_other_ranks_are_silent(lab: Lab) -> None:
    assert run(lab, 1, "logged", package=FIRST, mode="one", summary=False)[0]["lines"] == []
    first, second = run(lab, 2, "logged", package=FIRST, mode="retained")
    assert len(first["lines"]) == 1
    assert second["lines"] == []


# -- two packages, copies --------------------------------------------------------------------------------------------


@both_packages
def test_one_class_for_both_trainers(lab: Lab, package: str) -> None:
    """Alone and in a list, and as a copy that was made before or after a fit."""
    answer = run(lab, 1, "crosswise", package=package)[0]
    assert set(PACKAGES) <= set(answer["bases"])
    assert answer["alone"] == answer["list"] == 2
    assert answer["key"] == "ZeroGuardCallback"
    assert answer["pickle"] == answer["deepcopy"] == [None, True, False]
    assert answer["fresh"] == [2, "warn"]


def test_the_package_is_the_one_in_use(lab: Lab) -> None:
    answer = run(lab, 1, "bases")[0]
    assert answer["both installed"] == ["lightning.pytorch"]
    assert answer["both, one loaded"] == ["pytorch_lightning"]
    assert answer["both, both loaded"] == ["lightning.pytorch", "pytorch_lightning"]
    assert answer["both, the other's Fabric loaded"] == ["pytorch_lightning"]
    assert answer["one"] == ["pytorch_lightning"]
    assert answer["the other"] == ["lightning.pytorch"]
    assert answer["Fabric alone"] == []
    assert "neither lightning nor pytorch_lightning is installed" in answer["none"]
    assert "pip install" in answer["none"]


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {other!r}:
            raise ModuleNotFoundError(name)

import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {other!r} else find(name, package)
sys.meta_path.insert(0, Blocked())
from zeroguard.integrations.lightning import ZeroGuardCallback
from {package} import Trainer
trainer = Trainer(callbacks=ZeroGuardCallback(), logger=False, enable_checkpointing=False, accelerator="cpu")
assert any(type(c) is ZeroGuardCallback for c in trainer.callbacks)
assert {other!r} not in sys.modules
"""


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_the_other_package_alone(package: str) -> None:
    """For real: lightning cannot be imported, and a callback that is not in a list is taken."""
    code = ALONE.format(package=package, other=FIRST.partition(".")[0])
    path = os.pathsep.join(p for p in (PYTHON_PATH, str(ROOT)) if p)
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the installed entry points --------------------------------------------------------------------------------------

GROUPS = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_the_factory(group: str) -> None:
    points = importlib.metadata.entry_points(group=f"{group}.callbacks_factory")
    assert [point.value for point in points if point.name == "zeroguard"] == ["zeroguard.integrations.entry:callbacks"]


def test_without_the_variable_the_factory_imports_nothing() -> None:
    code = (
        "import sys, os; before = set(sys.modules); "
        "import zeroguard.integrations.entry as z; assert z.callbacks() == []; "
        "new = set(sys.modules) - before; assert not {'torch', 'pydantic', 'lightning'} & new, new"
    )
    env = {key: value for key, value in os.environ.items() if key != "ZEROGUARD"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@both_packages
def test_the_variable_guards_a_run(lab: Lab, package: str) -> None:
    for value in ("", "0", "off"):
        assert run(lab, 1, "factory", package=package, value=value)[0]["names"] == []
    answer = run(lab, 1, "factory", package=package, value="1")[0]
    assert answer["names"] == ["InstalledZeroGuardCallback"]
    assert answer["installed"] == [4]
    assert answer["keys"] == ["ZeroGuardCallback"]  # its checkpoints are those of the explicit callback
    assert len(answer["lines"]) == 1


@pytest.mark.parametrize("explicit", ["trainer", "model"])
def test_it_steps_aside_for_a_callback_in_the_code(lab: Lab, explicit: str) -> None:
    answer = run(lab, 1, "factory", package=FIRST, value="1", explicit=explicit)[0]
    assert answer["mine"] == 4
    assert answer["installed"] == [None]
    assert answer["state"] == [False]
    assert answer["lines"] == []


@pytest.mark.parametrize("explicit", ["session", "later session"])
def test_it_steps_aside_for_a_session_in_the_code(lab: Lab, explicit: str) -> None:
    answer = run(lab, 1, "factory", package=FIRST, value="1", explicit=explicit)[0]
    assert answer["own"] == 4


def test_without_deepspeed_the_variable_changes_nothing(lab: Lab) -> None:
    assert run(lab, 1, "factory_without_deepspeed", package=FIRST)[0]["warnings"] == []


# -- LightningCLI ----------------------------------------------------------------------------------------------------

FILE = "on_violation: warn\nguards:\n- name: retained_graph\n- name: accumulator_reset\n"
YAML = f"""
trainer:
  callbacks:
  - class_path: {CLASS}
    init_args:
      config:
        on_violation: warn
        guards:
        - name: retained_graph
        - name: accumulator_reset
          idle: untouched
      grad_norm: true
      grad_norms: module
"""


@both_packages
def test_cli_takes_nested_keys_from_yaml(lab: Lab, package: str) -> None:
    answer = run(lab, 1, "command_line", package=package, args=["--config=run.yaml"], files={"run.yaml": YAML})[0]
    assert answer["config"]["on_violation"] == "warn"
    assert [guard["name"] for guard in answer["config"]["guards"]] == ["retained_graph", "accumulator_reset"]
    assert answer["config"]["guards"][1]["idle"] == "untouched"
    assert answer["grad_norm"] is True
    assert answer["grad_norms"] == "module"
    # What LightningCLI saves beside the checkpoints can be read again.
    assert "idle: untouched" in answer["dump"]
    again = run(lab, 1, "command_line", package=package, args=["--config=run.yaml"], files={"run.yaml": answer["dump"]})
    assert again[0]["config"] == answer["config"]


@pytest.mark.parametrize("name", ["ZeroGuardCallback", CLASS])
def test_cli_takes_a_path_from_the_command_line(lab: Lab, name: str) -> None:
    args = [f"--trainer.callbacks+={name}", "--trainer.callbacks.config=zeroguard_run.yaml"]
    answer = run(lab, 1, "command_line", package=FIRST, args=args, files={"zeroguard_run.yaml": FILE})[0]
    assert answer["config"] == "zeroguard_run.yaml"


def test_cli_takes_keys_from_the_command_line(lab: Lab) -> None:
    args = [
        f"--trainer.callbacks+={CLASS}",
        "--trainer.callbacks.config.on_violation=record",
        "--trainer.callbacks.config.guards=[{name: accumulator_reset, action: detect}]",
        "--trainer.callbacks.progress_bar=false",
    ]
    config = run(lab, 1, "command_line", package=FIRST, args=args)[0]["config"]
    assert config["on_violation"] == "record"
    assert config["guards"] == [{"name": "accumulator_reset", "action": "detect", "idle": "zero_gradient"}]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("config.on_violation=explode", "on_violation: 'explode' is not allowed; allowed: 'raise', 'warn' or 'record'"),
        ("config.on_violatoin=warn", "did you mean 'on_violation'?"),
        ("config.guards=[{name: nope}]", "'host_read', "),
        ("config=nothere.yaml", "nothere.yaml: no such file"),
        ("config=wrong.yaml", "wrong.yaml: "),
    ],
)
def test_cli_says_what_is_wrong(lab: Lab, argument: str, text: str) -> None:
    args = [f"--trainer.callbacks+={CLASS}", f"--trainer.callbacks.{argument}"]
    files = {"wrong.yaml": "on_violation: explode\n"}
    assert text in run(lab, 1, "command_line", package=FIRST, args=args, files=files)[0]["error"]


@both_packages
def test_cli_fits(lab: Lab, package: str) -> None:
    args = ["--trainer.callbacks+=ZeroGuardCallback", "--trainer.callbacks.config=zeroguard_run.yaml"]
    case = {"package": package, "args": args, "files": {"zeroguard_run.yaml": FILE}, "fit": True}
    answer = run(lab, 1, "command_line", **case)[0]
    assert "error" not in answer, answer
    assert len(answer["repairs"]) == 4
    assert set(answer["selected"]) == {"retained_graph", "accumulator_reset"}
