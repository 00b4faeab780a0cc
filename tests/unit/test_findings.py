"""Findings and the exceptions that carry them: data first, text second."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from zeroguard import Finding, GuardUnavailableError, GuardViolation, Repair
from zeroguard.findings import NAMES_SHOWN, name_list

FINDING = Finding(
    guard="accumulator_reset",
    kind="stale_gradient",
    severity="error",
    rank=3,
    step=17,
    subject=("embed.weight", "head.bias"),
    expected="EXPECTED-TEXT",
    seen="SEEN-TEXT",
    cause="CAUSE-TEXT",
    remedy="REMEDY-TEXT",
    effect="EFFECT-TEXT",
)
REPAIR = Repair("host_read", "copy_awaited", 1, 4, ("a", "b"), "One sentence.")


def test_finding_survives_json() -> None:
    data = json.loads(json.dumps(FINDING.to_dict()))
    assert set(data) == {field.name for field in fields(Finding)}
    assert data["subject"] == ["embed.weight", "head.bias"]
    assert Finding(**{**data, "subject": tuple(data["subject"])}) == FINDING


def test_repair_survives_json() -> None:
    data = json.loads(json.dumps(REPAIR.to_dict()))
    assert set(data) == {field.name for field in fields(Repair)}
    assert Repair(**{**data, "parameters": tuple(data["parameters"])}) == REPAIR


@pytest.mark.parametrize("record", [FINDING, REPAIR], ids=["finding", "repair"])
def test_records_are_frozen(record: Finding | Repair) -> None:
    with pytest.raises(FrozenInstanceError):
        record.rank = 9  # type: ignore[misc]


def test_text_first_line_says_what_where_and_when() -> None:
    first = FINDING.text().splitlines()[0]
    assert first == "[accumulator_reset] stale gradient (error), rank 3, step 17"
    assert str(FINDING) == FINDING.text()


def test_text_has_every_part() -> None:
    text = FINDING.text()
    for part in ("embed.weight, head.bias", "EXPECTED-TEXT", "SEEN-TEXT", "CAUSE-TEXT", "REMEDY-TEXT", "EFFECT-TEXT"):
        assert part in text


def test_text_leaves_out_what_is_empty() -> None:
    text = replace(FINDING, subject=(), effect="").text()
    assert "parameters:" not in text
    assert "effect:" not in text


def test_text_says_repaired_instead_of_the_severity() -> None:
    assert "(repaired)" in replace(FINDING, repaired=True).text()
    assert "(warning)" in replace(FINDING, severity="warning").text()


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "(no parameter)"),
        (1, "p0"),
        (5, "p0, p1, p2, p3, p4"),
        (6, "p0, p1, p2, p3, p4 and 1 more"),
        (1000, "p0, p1, p2, p3, p4 and 995 more"),
    ],
)
def test_name_list_shows_five_and_a_count(count: int, shown: str) -> None:
    assert NAMES_SHOWN == 5
    assert name_list(tuple(f"p{i}" for i in range(count))) == shown


def test_data_holds_all_names_where_the_text_shows_five() -> None:
    names = tuple(f"layer.{i}.weight" for i in range(12))
    finding = replace(FINDING, subject=names)
    assert "layer.4.weight and 7 more" in finding.text()
    assert "layer.5.weight" not in finding.text()
    assert finding.to_dict()["subject"] == list(names)


def test_repair_text_is_one_line() -> None:
    assert REPAIR.text() == "[host_read] copy awaited, rank 1, step 4: a, b. One sentence."
    assert str(replace(REPAIR, parameters=())) == "[host_read] copy awaited, rank 1, step 4. One sentence."


def test_violation_message_is_complete() -> None:
    error = GuardViolation([FINDING], ranks=(3,), step=17)
    message = str(error)
    for part in (
        "rank 3",
        "step 17",
        "accumulator_reset",
        "embed.weight",
        "head.bias",
        "EXPECTED-TEXT",
        "SEEN-TEXT",
        "CAUSE-TEXT",
        "REMEDY-TEXT",
    ):
        assert part in message
    assert error.findings == (FINDING,)
    assert error.ranks == (3,)
    assert error.step == 17


def test_violation_message_has_every_finding() -> None:
    other = replace(FINDING, kind="lost_gradient", subject=("other.weight",))
    message = str(GuardViolation([FINDING, other], ranks=(3,), step=17))
    assert message.startswith("zeroguard stopped training: 2 errors")
    assert "stale gradient" in message
    assert "lost gradient" in message


def test_follower_message_names_the_ranks() -> None:
    error = GuardViolation([], ranks=(1, 3), step=17)
    assert error.findings == ()
    assert "rank(s) 1, 3" in str(error)
    assert "step 17" in str(error)


def test_follower_without_knowledge_still_has_a_message() -> None:
    assert "another rank" in str(GuardViolation([]))


@pytest.mark.parametrize("how", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"])
@pytest.mark.parametrize(
    "error",
    [
        GuardViolation([FINDING], ranks=(3,), step=17),
        GuardViolation([], ranks=(1, 3), step=17),
        GuardUnavailableError("no such attribute", guard="host_read", missing=["optimizer.x"]),
    ],
    ids=["violation", "follower", "unavailable"],
)
def test_exceptions_survive_a_process_boundary(error: Exception, how) -> None:
    """Launchers and process pools pickle the exception of a worker; one that cannot be unpickled hides the finding."""
    again = how(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
