"""The exception that leaves a trainer's loop, or a script under ``zeroguard run``, reaches the session before it is
closed: only so can it be told to the other ranks, and be explained by what they said last."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration import test_lightning as lightning
from tests.integration import test_transformers as transformers
from tests.lab.group import Lab

#: The telling itself may fail, or be interrupted while it waits for the job's store.
TELLING_FAILS = "OSError: telling failed"


def run(lab: Lab, call: str, python_path: str = "", **case: Any) -> Any:
    answer = lab.run(1, {"call": f"told.{call}", **case}, python_path=python_path, timeout=240)[0]
    assert "trace" not in answer, answer["trace"]
    assert answer.get("status") != "dead", answer
    return answer


def told(answer: dict[str, Any], text: str, *, instead: str = "") -> None:
    """Once, of the object that came out, while the session was open; and the engine is given back."""
    assert answer["told"] == [text]
    assert answer["raised"] == (instead or text)
    assert answer["same"] == (not instead)
    assert (answer["open"], answer["closed"], answer["failed"], answer["left"]) == (True, True, True, [])


@pytest.mark.parametrize("where", ["training_step", "validation_step", "test_step"])
@pytest.mark.parametrize("package", lightning.PACKAGES)
def test_lightning(lab: Lab, package: str, where: str) -> None:
    """In an evaluation of its own the session is that of the second engine."""
    stage = 3 if where == "validation_step" else 2
    answer = run(lab, "lightning", lightning.PYTHON_PATH, package=package, stage=stage, where=where)
    told(answer, f"Boom: {where}")
    assert answer["engines"] == (2 if where == "test_step" else 1)
    assert not answer["later"]  # closed when the callbacks behind zeroguard's hear of it


def test_lightning_after_ctrl_c(lab: Lab) -> None:
    case = {"package": lightning.FIRST, "stage": 2}
    assert run(lab, "lightning_ctrl_c", lightning.PYTHON_PATH, **case) == {"told": ["KeyboardInterrupt"]}


def test_lightning_where_the_telling_fails(lab: Lab) -> None:
    case = {"package": lightning.FIRST, "stage": 3, "where": "training_step", "fails": True}
    told(run(lab, "lightning", lightning.PYTHON_PATH, **case), "Boom: training_step")


@transformers.pytestmark
@pytest.mark.parametrize(("stage", "instead"), [(2, ""), (3, ""), (3, TELLING_FAILS)])
def test_transformers(lab: Lab, stage: int, instead: str) -> None:
    answer = run(lab, "transformers", transformers.PYTHON_PATH, stage=stage, fails=bool(instead))
    told(answer, "RuntimeError: boom", instead=instead)


@pytest.mark.parametrize(("stage", "instead"), [(2, ""), (3, TELLING_FAILS)])
def test_a_loop_callback(lab: Lab, stage: int, instead: str) -> None:
    told(run(lab, "by_hand", stage=stage, fails=bool(instead)), "Boom: boom", instead=instead)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("end", "text"), [("raise", "ValueError: boom"), ("ctrl_c", "KeyboardInterrupt: "), ("exit", "SystemExit: 3")]
)
def test_the_launcher(lab: Lab, end: str, text: str, fails: bool) -> None:
    """Whatever becomes of the telling, what comes out is the script's own, and shown without the launcher's frames."""
    answer = run(lab, "launched", stage=2, end=end, fails=fails)
    told(answer, text)
    assert answer["hidden"] == (end != "exit")


@pytest.mark.parametrize("end", ["exit well", "return"])
def test_a_script_that_ends_well_tells_nothing(lab: Lab, end: str) -> None:
    answer = run(lab, "launched", stage=3, end=end)
    assert answer["told"] == answer["left"] == []
    assert (answer["closed"], answer["failed"]) == (True, False)
