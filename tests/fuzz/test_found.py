"""What the fuzzer has found, each program as it shrank: as it should be now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import judge
from tests.lab.group import Lab

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.close()


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_it_is_as_it_should_be(lab: Lab, path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    config, program = case["config"], case["program"]
    broken = judge.verdict(config, program, judge.run(lab, config, program))
    assert not broken, judge.report(config, program, broken)


@pytest.mark.parametrize("name", ["A-unmanaged-zero_grad-step-1o", "B-boundary-TFT-2o", "F-detect-mixed-3"])
def test_deepspeed_by_itself_is_wrong_there(lab: Lab, name: str) -> None:
    case = json.loads((Path(__file__).parent / "found" / f"{name}.json").read_text(encoding="utf-8"))
    [answer] = judge.run(lab, case["config"], case["program"], False)
    assert any(step["difference"] > 1e-3 for step in answer["steps"]), answer
