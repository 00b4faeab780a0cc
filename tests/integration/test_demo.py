"""The demo runs as a user runs it, and shows what it promises."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"stage", "offload", "pattern", "without", "with", "findings", "repairs"}
PATTERNS = ("engine.backward twice", "loss.backward twice", "zero_grad between")

# Under a minute on two idle cores; more room for a busy machine.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="the demo trains on real DeepSpeed engines"
    ),
]


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/plain_loop.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]  # nothing but JSON may stand there


def test_json_has_one_line_for_every_configuration_and_pattern(lines: list[dict[str, Any]]) -> None:
    seen = [(line["stage"], line["offload"], line["pattern"]) for line in lines]
    assert seen == [(s, offload, p) for s in (1, 2, 3) for offload in (False, True) for p in PATTERNS]
    for line in lines:
        assert set(line) == KEYS
        for side in ("without", "with"):
            assert set(line[side]) == {"status", "max_abs_diff", "error"}
            crashed = line[side]["status"] == "crash"
            assert (line[side]["error"] is not None) == crashed == (line[side]["max_abs_diff"] is None)


def test_every_guarded_run_is_exact_and_without_a_finding(lines: list[dict[str, Any]]) -> None:
    assert {line["with"]["status"] for line in lines} == {"exact"}
    assert all(line["findings"] == 0 and line["repairs"] > 0 for line in lines)


def test_unguarded_runs_show_both_kinds_of_fault(lines: list[dict[str, Any]]) -> None:
    statuses = [line["without"]["status"] for line in lines]
    assert set(statuses) == {"exact", "wrong", "crash"}
    # Far from the rounding that "exact" allows: the faults are no matter of tolerance.
    assert all(line["without"]["max_abs_diff"] > 1e-3 for line in lines if line["without"]["status"] == "wrong")


def test_piped_table_is_plain_text_that_fits_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI systems set it
    done = demo("--stages", "1", "--offload")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    header = next(line for line in done.stdout.splitlines() if "configuration" in line)
    columns = ("configuration", "pattern", "without zeroguard", "with zeroguard", "findings", "repairs")
    places = [header.find(column) for column in columns]
    assert -1 not in places
    assert places == sorted(places)
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert done.stdout.count("ZeRO-1 offload") == 3
    assert done.stdout.splitlines()[-1].endswith("3 of 3 with it.")
    assert "3/6] ZeRO-1 offload" in done.stderr


def test_unknown_option_is_refused_before_anything_starts() -> None:
    done = demo("--stage3")
    assert done.returncode == 2
    assert "unrecognized arguments: --stage3" in done.stderr
    assert "starting" not in done.stderr
