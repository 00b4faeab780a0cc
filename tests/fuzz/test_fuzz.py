"""Random legal programs on a guarded engine and in plain PyTorch: what differs is said, what is exact not accused.

As a part of the tests the examples are the same every time. ``FUZZ_EXAMPLES=2000 pytest tests/fuzz`` takes so many for
each configuration, new ones every time; ``FUZZ_SEED=...`` repeats a run. A failure prints the shortest program that
hypothesis finds, and how to run it again (:mod:`tests.fuzz.replay`).
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.fuzz import judge
from tests.fuzz.grammar import CONFIGURATIONS, configurations, legalize, operations
from tests.lab.group import Lab

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SEED = int(os.environ.get("FUZZ_SEED", random.randrange(1 << 32)))
#: DeepSpeed keeps every ZeRO-3 engine alive, so that workers grow
CASES_A_WORKER = 1000

# It keeps what it finds in the sources there, and would otherwise make a folder in the checkout.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "zeroguard-hypothesis")

pytestmark = pytest.mark.timeout(0 if EXAMPLES else 300)


@pytest.fixture(scope="class")
def lab() -> Iterator[Lab]:
    """Workers of their own: many engines use them up, and some may hang. (xdist's loadscope spreads classes.)"""
    made = Lab()
    yield made
    made.close()


def fuzz(lab: Lab, stage: int, offload: bool, ranks: int, mode: str, examples: int) -> None:
    """``examples``: how many the tests take that run every time."""
    count = 0

    def example(config: dict[str, Any], raw: list[dict[str, Any]]) -> None:
        nonlocal count
        count += 1
        if count % CASES_A_WORKER == 0:
            lab.close()
        program = legalize(config, raw)
        broken = judge.verdict(config, program, judge.run(lab, config, program))
        if broken:
            again = f"\nFUZZ_EXAMPLES={EXAMPLES} FUZZ_SEED={SEED}" if EXAMPLES else ""
            raise AssertionError(judge.report(config, program, broken) + again)

    run = given(configurations(stage, offload, ranks, mode), operations())(example)
    if EXAMPLES:
        run = seed(SEED)(run)
    # Each case begins in the same worker with a new engine; how long it takes says nothing.
    settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],  # what hypothesis would explain is our own lines
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )(run)()


EACH = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
#: without repairs only those that do not refuse loss.backward(), as stage 0 does
ZERO = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])


class TestOneRank:
    """All guards, and gradient_audit with every element at every step: exact, silent, and nothing left behind."""

    @EACH
    def test_exact_and_silent(self, lab: Lab, stage: int, offload: bool) -> None:
        fuzz(lab, stage, offload, 1, "repair", 52)


class TestTwoRanks:
    """The same on two ranks, whose partitions cut parameters in two."""

    @EACH
    def test_exact_and_silent(self, lab: Lab, stage: int, offload: bool) -> None:
        fuzz(lab, stage, offload, 2, "repair", 22)


class TestNothingRepaired:
    """What DeepSpeed gets wrong by itself is said at or before the step at which it shows."""

    @ZERO
    def test_the_audit_alone_says_it(self, lab: Lab, stage: int, offload: bool) -> None:
        fuzz(lab, stage, offload, 1, "audit", 25)

    @ZERO
    def test_the_other_guards_say_it(self, lab: Lab, stage: int, offload: bool) -> None:
        fuzz(lab, stage, offload, 1, "detect", 15)


def test_the_fuzzer_knows_a_wrong_run(lab: Lab) -> None:
    """Two losses of one forward without a guard: the verdict is not always "as it should be"."""
    config = {"stage": 2, "offload": True, "ranks": 1, "mode": "repair", "gas": 1, "optimizer": "sgd"}
    config |= {"idle": "zero_gradient", "managed": True, "warm": False, "zero": {}}
    both = [{"op": "backward", "terms": [[0, head]], "by": "engine", "retain": head == 0} for head in (0, 1)]
    program = legalize(config, both)
    assert judge.verdict(config, program, judge.run(lab, config, program)) == ""
    answers = judge.run(lab, config, program, guarded=False)
    assert "wrong after operation" in judge.verdict(config, program, answers), judge.listing(config, program)
