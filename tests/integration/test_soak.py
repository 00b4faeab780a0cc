"""The long run of ``make soak``, made short: nothing grows, nothing is found, and the bits are those of the loop that
needs no guard."""

from __future__ import annotations

import pytest

from tests.benchmarks.soak import CONFIGURATIONS, run, spread, wrong
from tests.lab.group import Lab

STEPS = 60


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
def test_sixty_steps_with_everything_on(lab: Lab, stage: int, offload: bool) -> None:
    arms = run(lab, stage, offload, STEPS)
    assert list(wrong(arms, STEPS)) == []
    assert len(arms["with"][0]["samples"]) == 8


def test_what_grows_is_seen() -> None:
    samples = [{"hooks": 100}, {"hooks": 100}, {"hooks": 103}, {"hooks": 100}]
    assert spread(samples, "hooks") == 0.03
