"""Engines that are compiled: guarded where that is exact, refused with the reason where guards would see nothing."""

from __future__ import annotations

import pytest

from tests.lab.group import Lab


@pytest.mark.parametrize(
    ("stage", "offload", "how"),
    [(2, True, "torch.compile first"), (3, False, "engine.compile later")],
)
def test_a_compiled_engine_is_guarded_as_one_that_is_not(lab: Lab, stage: int, offload: bool, how: str) -> None:
    case = {"call": "compiled.exact", "stage": stage, "offload": offload, "how": ["not", how], "gas": 1}
    answer = lab.run(1, case, timeout=240)[0]
    assert how in answer, answer
    for row in answer.values():
        assert row["same"], row
        assert row["guarded"]["findings"] == []
        assert row["unguarded"]["error"] == row["guarded"]["error"] == ""
    assert answer[how]["guarded"]["frames"] > answer[how]["unguarded"]["frames"] > 0  # it was compiled, both times
    assert answer[how]["guarded"]["events"] == answer["not"]["guarded"]["events"]


def test_deep_compile_is_refused(lab: Lab) -> None:
    answer = lab.run(1, {"call": "compiled.refused", "stage": 1})[0]
    assert "guard 'retained_graph' is unavailable on this engine: DeepCompile" in answer.get("error", ""), answer
    assert answer["error"].endswith("on_unavailable: warn to go on without this guard.")
    assert answer["missing"] == []
    assert "unavailable" in answer["verdicts"]
    assert set(answer["verdicts"]) <= {"not applicable", "not needed", "off", "unavailable"}
    assert any("DeepCompile" in text for text in answer["warned"])
