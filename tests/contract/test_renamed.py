"""A DeepSpeed whose internals have other names: for each attribute of the table exactly the documented error, and never
a wrong repair. The attribute is hidden from zeroguard alone, so that DeepSpeed itself works as it does."""

from __future__ import annotations

import pytest

from tests.lab.group import Lab
from zeroguard.backends.deepspeed import VERIFIED
from zeroguard.backends.deepspeed.attributes import TABLE

CONFIGURATIONS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
#: rows of releases that are not the installed one
ELSEWHERE = {f"{item.owner}.{item.name}" for item in TABLE if item.until}


def test_each_renamed_attribute_is_named_at_attach(lab: Lab) -> None:
    seen: set[str] = set()
    for stage, offload, bf16 in [*((s, o, False) for s, o in CONFIGURATIONS), (1, False, True)]:
        (answer,) = lab.run(1, {"call": "renamed.attach", "stage": stage, "offload": offload, "bf16": bf16})
        assert answer.get("status") not in ("error", "dead"), answer
        for name, row in answer.items():
            where = (stage, offload, bf16, name, row)
            seen.add(name)
            assert row["changed"] == [], where
            if not row["guards"]:
                assert row["error"] == "nothing raised", where
                continue
            assert row["error"] == "GuardUnavailableError", where
            assert row["guard"] == row["guards"][0], where
            assert row["missing"] == [name], where
            assert row["text"] == (
                f"guard {row['guard']!r} is unavailable on DeepSpeed {VERIFIED[-1]}: missing {name} ({row['lost']}). "
                f"Verified releases: {', '.join(VERIFIED)}. Install one of them, or set on_unavailable: warn to go on "
                "without this guard."
            ), where
            assert row["unavailable"] == sorted(row["guards"]), where
            assert len(row["warnings"]) == len(row["guards"]), where
            assert all(f"missing {name} ({row['lost']})" in text for text in row["warnings"]), where
    assert seen | ELSEWHERE == {f"{item.owner}.{item.name}" for item in TABLE}


@pytest.mark.parametrize(("stage", "offload"), [(2, True), (3, False)])
def test_the_guards_that_are_left_do_what_they_do_alone(lab: Lab, stage: int, offload: bool) -> None:
    """Without the guards that need the attribute, the loop ends as it does with the others alone: bit by bit, and with
    the same crash."""
    (answer,) = lab.run(1, {"call": "renamed.trained", "stage": stage, "offload": offload}, timeout=200)
    assert answer.get("status") not in ("error", "dead"), answer
    for name, row in answer.items():
        assert row["seen"] == row["alone"], (name, row)
        assert set(row["seen"]["repairs"]) <= set(row["left"]), (name, row)
    assert any(row["seen"]["status"] != "exact" for row in answer.values())


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
def test_reads_say_what_is_missing_and_training_goes_on(lab: Lab, stage: int, offload: bool) -> None:
    (answer,) = lab.run(1, {"call": "renamed.read", "stage": stage, "offload": offload})
    assert answer.get("status") not in ("error", "dead"), answer
    for name, text in answer.items():
        assert text.startswith(f"GradientsUnavailableError: DeepSpeed {VERIFIED[-1]} lacks {name} ("), (name, text)
