"""The examples run as their first lines say, and show what they promise. (The demo, and those of Hugging Face and
Accelerate, are run by test_demo.py and test_transformers.py.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def example(*command: str) -> str:
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["lightning_two_losses", "fabric_loop"])
def test_lightning_and_fabric(name: str) -> None:
    lines = [line for line in example(f"examples/{name}.py").splitlines() if line.startswith("ZeRO-")]
    assert len(lines) >= 3
    for line in lines:
        assert re.search(r"(wrong by \S+|crashed: \w+)\s+exact$", line.rstrip()), line


def test_a_home_made_trainer_with_callbacks() -> None:
    text = example(*TORCHRUN, "--nproc_per_node=2", "examples/loop_callback.py")
    complete, missing = text.split("without on_after_backward")
    assert complete.count("repaired") == 4, "retained_graph and accumulator_reset, wrapped and announced"
    assert "[call_order]" not in complete
    assert "LoopCallback.on_after_backward has been called" in missing


def test_every_example_is_short_and_run_by_a_test() -> None:
    """Under 80 lines each; what begins with an underscore is no example."""
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for path in (ROOT / "examples").glob("[!_]*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 80, path.name
        assert path.stem in tests, path.name
