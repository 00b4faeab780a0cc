"""Two engines are guarded at once and do not see each other."""

from __future__ import annotations

import pytest

from tests.lab.group import Lab

STAGES = [(0, False), (1, False), (2, True), (3, False)]


@pytest.mark.parametrize("through", ["engine", "module"])
@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_a_generator_and_its_discriminator(lab: Lab, stage: int, offload: bool, through: str) -> None:
    """The discriminator is frozen while the generator's loss runs through it: for its own engine no backward at all."""
    case = {"call": "two_engines.gan", "stage": stage, "offload": offload, "through": through}
    answer = lab.run(1, case)[0]
    assert answer.get("findings") == [], answer
    assert answer["repairs"] == []
    assert "error guarded" not in answer
    assert answer["guarded"] <= 3e-8
    if stage == 0 and through == "engine":
        assert "stage 0" in answer["error unguarded"]  # DeepSpeed alone refuses this loop
    else:
        assert answer["same"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_frozen_reference_model(lab: Lab, stage: int) -> None:
    answer = lab.run(1, {"call": "two_engines.frozen_reference", "stage": stage})[0]
    assert answer.get("findings") == [], answer
    assert answer["same"]
    assert "retained_graph" in answer["selected"][0]
    assert answer["selected"][1] == (["param_status"] if stage == 3 else [])  # it has no optimizer
