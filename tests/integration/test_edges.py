"""Copies, closing in a hook, attaching late: what a guarded run must survive."""

from __future__ import annotations

import pytest

from tests.lab.group import Lab

CONFIGURATIONS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
EACH = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)


@EACH
def test_a_deep_copy_of_the_module_is_not_the_module(lab: Lab, stage: int, offload: bool) -> None:
    answer = lab.run(1, {"call": "edges.deep_copy", "stage": stage, "offload": offload})[0]
    assert answer.get("same"), answer
    assert answer["modes"] == [[True, False], [True, False]]


@EACH
def test_closing_in_a_backward_hook_loses_nothing(lab: Lab, stage: int, offload: bool) -> None:
    answer = lab.run(1, {"call": "edges.close_in_hook", "stage": stage, "offload": offload})[0]
    assert max(answer["differences"]) <= 3e-8, answer


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (1, True), (2, False), (3, False)])
def test_attaching_in_mid_window_drops_nothing(lab: Lab, stage: int, offload: bool) -> None:
    """Offloaded ZeRO-2 and 3 lose such a gradient by themselves, and before the attach nobody kept it."""
    answer = lab.run(1, {"call": "edges.attach_mid_window", "stage": stage, "offload": offload})[0]
    assert max(answer["differences"]) <= 3e-8, answer
    assert answer["findings"] == []


@pytest.mark.parametrize("action", ["repair", "detect"])
@EACH
def test_attaching_to_a_running_model_flags_no_unused_layer(lab: Lab, stage: int, offload: bool, action: str) -> None:
    answer = lab.run(1, {"call": "edges.spare_layer", "stage": stage, "offload": offload, "action": action})[0]
    assert answer["findings"] == [], answer
    assert answer["repairs"] == []
