"""zeroguard stress: what the counts mean, how they are shown, and a command of the user's. No DeepSpeed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroguard.cli import main
from zeroguard.stress import runner
from zeroguard.stress.jobs import Job
from zeroguard.stress.report import Report
from zeroguard.stress.runner import Arm, StressError, run_command, run_job, with_guards
from zeroguard.stress.scenarios import misread
from zeroguard.stress.statistics import needed, wilson

ROOT = Path(__file__).resolve().parents[2]

# -- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failures", "iterations"), [(0, 10), (1, 10), (5, 10), (10, 10), (101, 402), (3, 100_000)])
def test_the_interval_solves_the_score_equation(failures: int, iterations: int) -> None:
    """Each bound is a rate that lies 1.96 of its own standard errors from what was seen."""
    seen = failures / iterations
    low, high = wilson(failures, iterations)
    assert 0 <= low <= seen <= high <= 1
    for bound in {low, high} - {0.0, 1.0}:
        assert abs(seen - bound) / math.sqrt(bound * (1 - bound) / iterations) == pytest.approx(1.959964, abs=1e-5)


def test_the_interval_of_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.25, 0.5, 0.9])
def test_needed_is_the_smallest_number_that_luck_reaches_in_one_of_twenty(rate: float) -> None:
    count = needed(rate)
    assert count is not None
    assert (1 - rate) ** count <= 0.05 < (1 - rate) ** (count - 1)


def test_needed_at_the_ends() -> None:
    assert needed(0.0) is None
    assert needed(1.0) == 1


# -- what an early read gave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("early", "says"),
    [
        ([3.0, 4.0], ""),
        ([1.0, 2.0], "buffer 1 of 1 (1 is the newest copy): the old value"),
        ([3.0, 2.0], "buffer 1 of 1 (1 is the newest copy): part old, part new"),
        ([9.0, 4.0], "buffer 1 of 1 (1 is the newest copy): neither old nor new"),
    ],
)
def test_misread_says_what_was_read(early: list[float], says: str) -> None:
    now, before = [torch.tensor([3.0, 4.0])], [torch.tensor([1.0, 2.0])]
    assert misread([torch.tensor(early)], now, before) == says


def test_misread_before_any_other_read() -> None:
    assert misread([torch.zeros(2)], [torch.ones(2)], []).endswith("the old value")


# -- the report ------------------------------------------------------------------------------------------------------


def arm(iterations: int, failures: int, message: str = "wrong") -> Arm:
    return Arm(iterations, failures, {message: failures} if failures else {})


def report(**arms: Arm) -> Report:
    return Report(
        "host-read", "zeroguard stress host-read", {"stage": 2}, {"gpu": "A", "gpus": 1}, arms, {"first": 0, "last": 9}
    )


def test_the_data_has_the_documented_keys() -> None:
    data = report(without=arm(10, 4), **{"with": arm(10, 0)}).to_dict()
    assert list(data) == ["scenario", "command", "settings", "environment", "arms", "seeds"]
    assert data["arms"]["without"] == {"iterations": 10, "failures": 4, "messages": {"wrong": 4}}
    assert data["arms"]["with"] == {"iterations": 10, "failures": 0, "messages": {}}
    json.dumps(data)


@pytest.mark.parametrize(
    ("bare", "kept", "says"),
    [
        (arm(100, 50), arm(100, 0), "100 of 100 were clean: enough."),
        (arm(100, 1), arm(100, 0), "100 of 100 were clean: not enough."),
        (arm(100, 50), arm(100, 3), "3 of 100 failed."),
        (arm(100, 0), arm(100, 0), "nothing that the guards could be shown to prevent"),
    ],
)
@pytest.mark.parametrize("how", [Report.text, Report.markdown])
def test_the_report_judges(how: Any, bare: Arm, kept: Arm, says: str) -> None:
    assert says in how(report(without=bare, **{"with": kept}))


def test_a_widened_arm_is_judged_for_itself() -> None:
    arms = {
        "without": arm(100, 5),
        "without, widened": arm(100, 90),
        "with": arm(100, 0),
        "with, widened": arm(100, 0),
    }
    text = report(**arms).text()
    assert "With the guards 100 of 100 were clean: not enough." in text
    assert "With the guards with the window widened 100 of 100 were clean: enough." in text


def test_only_a_guarded_failure_counts_for_the_status() -> None:
    assert report(without=arm(5, 5), **{"with": arm(5, 0)}).passed
    assert not report(without=arm(5, 0), **{"with": arm(5, 1)}).passed
    assert not report(**{"with": arm(5, 0), "with, widened": arm(5, 1)}).passed
    assert report(**{"without, widened": arm(5, 5)}).passed


def test_markdown_stays_a_table_whatever_the_message() -> None:
    text = report(without=arm(2, 1, "a | b `c`\n")).markdown()
    (line,) = (line for line in text.splitlines() if "a \\| b" in line)
    assert line.count("|") - line.count("\\|") == 5  # four cells


# -- the user's command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "guarded"),
    [
        (["pytest", "t.py::x"], [sys.executable, "-m", "zeroguard", "run", "-m", "pytest", "t.py::x"]),
        (["train.py", "--a"], [sys.executable, "-m", "zeroguard", "run", "train.py", "--a"]),
        (["python3.11", "train.py"], ["python3.11", "-m", "zeroguard", "run", "train.py"]),
        (["/x/python", "-m", "train"], ["/x/python", "-m", "zeroguard", "run", "-m", "train"]),
        (["torchrun", "--n", "2", "{run}", "t.py"], ["torchrun", "--n", "2", "-m", "zeroguard", "run", "t.py"]),
        (["python", "-c", "pass"], ["python", "-c", "pass"]),
        (["make", "test"], ["make", "test"]),
    ],
)
def test_how_a_command_is_guarded(command: list[str], guarded: list[str]) -> None:
    words, how = with_guards(command)
    assert words == guarded
    assert how == ("ZEROGUARD=1" if words == command else "zeroguard run")


def write(folder: Path, text: str) -> str:
    path = folder / "flaky.py"
    path.write_text(text)
    return str(path)


def test_failures_are_grouped_and_every_iteration_has_its_seed(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nn = int(sys.argv[1])\nif n % 2: raise ValueError(f'odd at {object()}')\n")
    ticks: list[bool] = []
    got = run_command([sys.executable, script, "{seed}"], False, 4, 6, ticks.append, timeout=60)
    assert (got.iterations, got.failures) == (4, 2)
    assert ticks == [False, True, False, True]
    assert got.messages == {"status 1: ValueError: odd at <object object at 0x...>": 2}


def test_a_guarded_script_runs_under_the_launcher_and_the_report_says_if_nothing_was_guarded(tmp_path: Path) -> None:
    script = write(tmp_path, "import os, sys\nassert os.environ['ZEROGUARD'] == '1' and 'zeroguard' in sys.modules\n")
    got = run_command([sys.executable, script], True, 1, 0, lambda failed: None, timeout=60)
    assert got.failures == 0, got.messages
    assert got.note == "under zeroguard run; 0 of 1 runs said that an engine was guarded: this arm proves nothing"


def test_what_hangs_is_a_failure(tmp_path: Path) -> None:
    script = write(tmp_path, "import time; time.sleep(60)")
    got = run_command([sys.executable, script], False, 1, 0, lambda failed: None, timeout=0.5)
    assert got.messages == {"no end within 0.5 s": 1}


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(StressError, match="'no-such-command' cannot be started"):
        run_command(["no-such-command"], False, 1, 0, lambda failed: None, timeout=5)


def test_pytest_failures_are_grouped_by_their_error() -> None:
    text = "E       AssertionError: 3 != 4\nFAILED t.py::x - AssertionError: 3 != 4\n==== 1 failed in 0.12s ====\n"
    assert runner._message(1, text, 5) == "status 1: AssertionError: 3 != 4"
    assert runner._message(2, "==== 1 failed in 0.12s ====", 5) == "status 2: 1 failed"
    assert runner._message(-9, "", 5) == "status -9: no output"


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_report_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "import sys\nsys.exit('zeroguard' in sys.modules and 'the guarded arm fails')\n")
    typed = ["stress", "--iterations", "2", "--out", str(tmp_path / "out"), "--json", "--", sys.executable, script]
    assert main(typed) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["scenario"] == "command"
    assert data["command"].startswith("zeroguard stress --iterations 2")
    assert data["command"].endswith(f"-- {sys.executable} {script}")
    assert data["arms"]["without"]["failures"] == 0
    assert data["arms"]["with"]["messages"] == {"status 1: the guarded arm fails": 2}
    assert {"gpu", "gpus", "driver", "torch", "cuda", "nccl", "deepspeed", "python", "os"} <= set(data["environment"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["command.json", "command.md", "command.txt"]
    assert json.loads((tmp_path / "out" / "command.json").read_text()) == data


def test_one_arm_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "raise SystemExit(3)")
    assert main(["stress", "--iterations", "1", "--without", "--", sys.executable, script]) == 0
    out = capsys.readouterr().out
    assert "The arm with guards was not run" in out
    assert "with  " not in out.replace("without", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give a scenario, or a command behind --"),
        (["host-read", "--", "true"], "give a scenario, or a command behind --"),
        (["host-read", "--no-offload"], "host-read needs --offload"),
        (["inflight", "--stage", "2"], "inflight needs --stage 3"),
        (["--widen", "--", "true"], "--widen is for the scenarios"),
        (["--", "no-such-command"], "cannot be started"),
    ],
)
def test_what_cannot_be_run(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["host-read", "--iterations", "0"], ["no-such-scenario"], ["host-read", "--size", "x"]]
)
def test_what_argparse_refuses(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["stress", *words])
    assert stop.value.code == 2


# -- a worker that dies ----------------------------------------------------------------------------------------------


def fake_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Python that stands for ``python -m zeroguard.stress.worker``; ``job`` and ``tell`` are there."""
    head = "import json, os, sys\njob = json.loads(sys.argv[-1])\npipe = job['pipe']\n"
    head += "def tell(**line): os.write(pipe, (json.dumps(line) + chr(10)).encode())\n"
    path = tmp_path / "worker"
    path.write_text(f"#!{sys.executable}\n{head}{text}")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_worker_that_dies_costs_one_iteration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (
        "tell(environment={}, size=1)\n"
        "for i in range(job['skip'], job['iterations']):\n"
        "    if i == 2: os._exit(7)\n"
        "    tell(iteration=i, message='')\n"
        "tell(done=True, findings={}, guards=[])\n"
    )
    fake_worker(monkeypatch, tmp_path, text)
    got, _ = run_job(Job("host-read", False, iterations=5), lambda failed: None, timeout=20)
    assert got.to_dict() == {"iterations": 5, "failures": 1, "messages": {"the process ended with status 7": 1}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sys.exit('no DeepSpeed here')", "ended with status 1\nno DeepSpeed here"),
        ("tell(environment={}, size=1); tell(broken='RuntimeError: out of memory')", "RuntimeError: out of memory"),
        ("import time; time.sleep(30)", "no answer within 1 s"),
    ],
)
def test_a_worker_that_cannot_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, says: str) -> None:
    fake_worker(monkeypatch, tmp_path, text)
    with pytest.raises(StressError, match="host-read cannot run here") as error:
        run_job(Job("host-read", False, iterations=5), lambda failed: None, timeout=1)
    assert says in str(error.value)


# -- what is kept in docs ----------------------------------------------------------------------------------------------


def test_the_kept_counts_have_the_form_of_a_report_and_are_those_of_the_page() -> None:
    kept = json.loads((ROOT / "docs/results/host_read_h200.json").read_text())
    page = (ROOT / "docs/gpu.md").read_text()
    assert len(kept) == 6
    for one in kept:
        arms = {name: Arm(**arm) for name, arm in one["arms"].items()}
        told = Report(one["scenario"], one["command"], one["settings"], one["environment"], arms, one["seeds"])
        assert told.to_dict() == one
        assert told.passed
        release, overlap = one["environment"]["deepspeed"], str(one["settings"]["overlap_comm"]).lower()
        counts = " | ".join(f"{arm.failures} of {arm.iterations}" for arm in arms.values())
        assert f"| {release} | {overlap} | {counts} |" in page
