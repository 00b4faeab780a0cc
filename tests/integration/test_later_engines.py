"""A trainer that evaluates after its training, maybe on another engine: guarded it computes the same, and every engine
is as without zeroguard afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration import test_lightning as lightning
from tests.integration import test_transformers as transformers
from tests.lab.group import Lab


def both(lab: Lab, python_path: str, **case: Any) -> dict[str, Any]:
    """The answer with zeroguard, which differs from the one without it in nothing. ``changed`` is by identity."""
    answers = [lab.run(1, {**case, "guarded": it}, python_path=python_path, timeout=240)[0] for it in (False, True)]
    for answer in answers:
        assert "trace" not in answer, answer["trace"]
        assert answer.get("status") != "dead", answer
    without, guarded = answers
    assert guarded["values"] == without["values"]
    assert guarded["changed"] == without["changed"]
    assert without["changed"][0]  # the engine of the training: DeepSpeed itself has changed something
    assert guarded["ours"] == [[] for _ in without["changed"]]
    assert guarded["findings"] == guarded["repairs"] == guarded["open"] == []
    return guarded


@pytest.mark.parametrize("package", lightning.PACKAGES)
@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_makes_an_engine_for_each_run(lab: Lab, stage: int, package: str) -> None:
    case = {"call": "later_engines.lightning", "package": package, "stage": stage}
    answer = both(lab, lightning.PYTHON_PATH, **case)
    assert answer["status"] == "exact"
    assert answer["values"] == pytest.approx(answer["true"], rel=1e-6)
    # The number of engines so far, and of the session: one for each.
    assert answer["runs"] == [["fit", 1, 0], ["test", 2, 1], ["validate", 3, 2], ["predict", 4, 3]]


@transformers.pytestmark
@pytest.mark.parametrize("stage", [2, 3])
def test_transformers_evaluates_after_training(lab: Lab, stage: int) -> None:
    answer = both(lab, transformers.PYTHON_PATH, call="later_engines.transformers", stage=stage)
    runs = [["train", 1, 0], ["evaluate", 1, 0], ["predict", 1, 0], ["second trainer", 2, 0]]
    assert answer["runs"] == runs[: 4 if stage == 3 else 3]  # the training alone has a session
    assert answer["difference"] <= 1e-6
    trained = answer["true"]
    assert answer["values"] == pytest.approx([*trained, *trained[-1:] * (len(answer["runs"]) - 1)], rel=1e-6)
