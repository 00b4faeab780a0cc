"""What guards cost does not grow where it must not: collectives with parameters, memory beyond its bound, host time
with a model that is healthy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.group import Lab

KIB, MIB = 2**10, 2**20
AUDIT = {"name": "gradient_audit", "every_n_steps": 1, "elements_per_parameter": 4}
AUDITED = [{"name": "automatic"}, AUDIT]
#: after its warm-up, and not at the steps in between
UNAUDITED = [{"name": "automatic"}, {**AUDIT, "warmup_steps": 0, "every_n_steps": 10}]
#: What a step sends for the agreement of two ranks: a number of eight bytes for each, and one for all.
AGREEMENT = ["all_reduce", 24]


def one(answers: list[dict[str, Any]]) -> dict[str, Any]:
    for answer in answers:
        assert "error" not in answer, answer
    return answers[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_one_collective_a_step_however_many_parameters(lab: Lab, stage: int) -> None:
    for parameters in (5, 60):
        case = {"call": "scale.collectives", "parameters": parameters, "stage": stage, "guards": UNAUDITED}
        assert one(lab.run(2, case))["steps"][1:] == [[AGREEMENT]] * 2, parameters


def test_an_audited_step_has_one_more(lab: Lab) -> None:
    for parameters in (5, 60):
        case = {"call": "scale.collectives", "parameters": parameters, "stage": 2, "guards": AUDITED}
        # Three floats a sample, and one that says whether a rank can judge.
        audit = ["all_reduce", 4 * (3 * 4 * parameters + 1)]
        assert one(lab.run(2, case))["steps"] == [[audit, AGREEMENT]] * 3, parameters


@pytest.mark.parametrize(
    ("stage", "offload", "few", "many"), [(2, False, 100, 400), (2, True, 100, 400), (3, True, 20, 60)]
)
def test_memory_of_the_default_guards(lab: Lab, stage: int, offload: bool, few: int, many: int) -> None:
    """Of Python's own memory; and of tensors in a step that is audited, at 64 places of each parameter."""
    case = {"call": "scale.memory", "stage": stage, "offload": offload}
    small, large = (one(lab.run(1, {**case, "parameters": n}, timeout=300)) for n in (few, many))
    a = {key: (large[key] - small[key]) / (many - few) for key in ("python", "audited", "tensors")}
    assert a["python"] < 1.25 * KIB, a
    assert a["audited"] < 1.5 * KIB, a
    assert a["tensors"] < 64 * 200, a
    assert large["findings"] == 0
    bare = [one(lab.run(1, {**case, "parameters": n, "audit": False}, timeout=300)) for n in (few, many)]
    assert (bare[1]["python"] - bare[0]["python"]) / (many - few) < KIB, bare
    assert bare[1]["tensors"] == 0


def test_memory_of_the_audit_has_an_end(lab: Lab) -> None:
    """On a model with very many parameters it looks at fewer places of each."""
    from zeroguard.backends.deepspeed.audit import MOST

    case = {"call": "scale.audited", "parameters": 3 * MOST // 64, "elements": 64}
    answer = one(lab.run(1, case))
    assert 0.9 * MOST < answer["samples"] <= MOST
    assert one(lab.run(1, {**case, "parameters": 100}))["samples"] == 6400


def test_what_is_kept_of_findings_and_repairs_has_an_end(lab: Lab) -> None:
    """A thousand records that name every parameter of a large model would be gigabytes."""
    answer = one(lab.run(1, {"call": "scale.kept", "parameters": 20_000, "steps": 100}))
    assert answer["counted"] == 100
    assert 0 < answer["repairs"] < 60
    assert answer["bytes"] < 16 * MIB


def test_a_healthy_step_does_not_get_slower_with_parameters(lab: Lab) -> None:
    """The guards themselves. Twice as slow would be noise; a pass over 100 000 names is a hundred times as slow."""
    few, many = (one(lab.run(1, {"call": "scale.scripted", "parameters": n}))["microseconds"] for n in (100, 100_000))
    assert many < 5 * few + 100, (few, many)


def test_the_host_part_of_an_agreement_of_ten_thousand_ranks(lab: Lab) -> None:
    (micros,) = lab.run(1, {"call": "scale.voted", "ranks": 10_000})
    assert micros < 20_000
