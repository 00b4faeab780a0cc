"""Reads of gradients: right, the same on every rank, and refused where there is nothing to read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.group import Lab

CONFIGURATIONS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
EACH = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
#: errors relative to the largest gradient: sums in another order, and one rounding of a low-precision average
LIMITS = {"fp32": 5e-7, "bf16": 1e-2, "fp16": 2e-3}
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}


def run(lab: Lab, ranks: int, call: str, **case: Any) -> list[dict[str, Any]]:
    answers = lab.run(ranks, {"call": f"reading.{call}", **case})
    assert not any("trace" in a or a.get("status") == "dead" for a in answers), answers
    return answers


def check(answers: list[dict[str, Any]], dtype: str = "fp32", *, findings: tuple[str, ...] = ()) -> None:
    for answer in answers:
        assert len(answer["windows"]) == 3
        for window in answer["windows"]:
            for what in ("names", "shapes", "picked", "again", "watched"):
                assert window[what], (what, window)
            for what in ("whole", "norms", "module", "total"):
                assert window[what] <= LIMITS[dtype], (what, window)
        assert answer["findings"] == list(findings)
    # Every rank has the same answer, to the bit.
    assert all([w["bits"] for w in a["windows"]] == [w["bits"] for w in answers[0]["windows"]] for a in answers)


KINDS = [(1, "fp32", 1), (2, "fp32", 1), (2, "fp32", 4), (2, "bf16", 4), (2, "fp16", 1)]
#: fp16 at stage 0: DeepSpeed's own loss scale is broken there; see the next test
READS = [(*where, *kind) for where in CONFIGURATIONS for kind in KINDS if (where[0], kind[1]) != (0, "fp16")]


@pytest.mark.parametrize(("stage", "offload", "ranks", "dtype", "gas"), READS)
def test_reads_are_those_of_plain_pytorch(
    lab: Lab, stage: int, offload: bool, ranks: int, dtype: str, gas: int
) -> None:
    """Also a tied weight, a frozen layer, an idle branch, two groups of parameters, and partitions that cut them."""
    by = "engine" if gas == 1 else "manual"
    answers = run(lab, ranks, "read", stage=stage, offload=offload, dtype=dtype, gas=gas, by=by)
    check(answers, dtype)
    refused = answers[0]["refused"]
    assert refused["before"].startswith("no backward since the last optimizer step")
    assert refused["inside"].startswith("a backward is running")
    assert refused["after"].startswith("no backward since the last optimizer step")
    if gas > 1:
        assert refused["middle"].startswith("the accumulation window is open: 3 backward(s)")
        assert "4 micro-batch(es) a step" in refused["middle"]


def test_reads_show_what_is_consumed(lab: Lab) -> None:
    """From 0.18 on, fp16 at stage 0: the backward does not multiply by the loss scale, the step divides by it."""
    for answer in run(lab, 1, "read", stage=0, dtype="fp16"):
        assert answer["difference"] > 1e-2, "DeepSpeed trains right: then the reads have to be right too"
        assert 1 - answer["windows"][0]["whole"] == pytest.approx(1 / 64, rel=0.01)


@pytest.mark.parametrize(
    "zero",
    [
        {"overlap_comm": True, "contiguous_gradients": False},
        {"overlap_comm": True, "reduce_bucket_size": 40},
        {"reduce_scatter": False},
    ],
    ids=lambda zero: "-".join(zero),
)
@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])
def test_settings_of_the_reduction(lab: Lab, stage: int, offload: bool, zero: dict[str, Any]) -> None:
    check(run(lab, 2, "read", stage=stage, offload=offload, zero=zero, gas=2))


@pytest.mark.parametrize(("most", "alone"), [(50, 40), (1, 10**6)])
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, True), (2, False), (3, False), (3, True)])
def test_many_buckets(lab: Lab, stage: int, offload: bool, most: int, alone: int) -> None:
    check(run(lab, 2, "small_buckets", stage=stage, offload=offload, most=most, alone=alone))


@pytest.mark.parametrize(("stage", "offload"), [c for c in CONFIGURATIONS if c[0] in (1, 2)])
def test_round_robin(lab: Lab, stage: int, offload: bool) -> None:
    check(run(lab, 2, "read", stage=stage, offload=offload, zero={"round_robin_gradients": True}))


@pytest.mark.parametrize(
    "zero", [{"stage3_param_persistence_threshold": 10**6}, {"sub_group_size": 70}], ids=lambda zero: next(iter(zero))
)
@pytest.mark.parametrize("offload", [False, True])
def test_settings_of_stage_3(lab: Lab, offload: bool, zero: dict[str, Any]) -> None:
    check(run(lab, 2, "read", stage=3, offload=offload, zero=zero))


@pytest.mark.parametrize(
    ("stage", "offload", "dtype"),
    [
        (1, False, "bf16"),
        (1, True, "bf16"),
        (2, False, "fp16"),
        (2, True, "fp16"),
        (3, False, "bf16"),
        (3, True, "fp16"),
    ],
)
def test_fp32_accumulation(lab: Lab, stage: int, offload: bool, dtype: str) -> None:
    """Stage 1 without offload in bf16 is BF16_Optimizer."""
    answers = run(lab, 2, "read", stage=stage, offload=offload, dtype=dtype, gas=2, extra=FP32_ACCUMULATION)
    check(answers, dtype)
    assert (answers[0]["optimizer"] == "BF16_Optimizer") is ((stage, offload, dtype) == (1, False, "bf16"))


@pytest.mark.parametrize("extra", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}], ids=str)
@pytest.mark.parametrize(("stage", "offload"), [c for c in CONFIGURATIONS if c[0] in (0, 1, 2)])
def test_scaling_before_the_reduction(lab: Lab, stage: int, offload: bool, extra: dict[str, Any]) -> None:
    check(run(lab, 2, "read", stage=stage, offload=offload, extra=extra, zero={"reduce_scatter": False}))


@EACH
def test_reads_are_not_clipped(lab: Lab, stage: int, offload: bool) -> None:
    for answer in run(lab, 2, "read", stage=stage, offload=offload, clip=0.1):
        assert max(window["whole"] for window in answer["windows"]) <= LIMITS["fp32"]
        assert all(window["watched"] for window in answer["windows"])
    for answer in run(lab, 2, "watched", stage=stage, offload=offload, extra={"gradient_clipping": 0.01}):
        assert max(answer["errors"]) <= 1e-6
        assert answer["root"] <= 1e-6
        assert answer["warnings"] == []


@EACH
def test_watch_where_the_step_is_the_boundary(lab: Lab, stage: int, offload: bool) -> None:
    extra = {"managed_gradient_accumulation": False}
    for answer in run(lab, 2, "watched", stage=stage, offload=offload, extra=extra, unmanaged=True):
        assert answer["early"].startswith("managed_gradient_accumulation is false")
        assert max(answer["errors"]) <= 1e-6
        assert answer["warnings"] == []


@pytest.mark.parametrize(("stage", "offload"), [c for c in CONFIGURATIONS if c[0] in (1, 2)])
def test_watch_after_a_coalesced_reduction(lab: Lab, stage: int, offload: bool) -> None:
    for answer in run(lab, 2, "coalesced", stage=stage, offload=offload):
        assert answer["early"].startswith("the accumulation window is open")
        assert answer["names"]
        assert answer["error"] <= 1e-7


@EACH
def test_announced_loops(lab: Lab, stage: int, offload: bool) -> None:
    for answer in run(lab, 2, "announced", stage=stage, offload=offload):
        assert max(answer["errors"]) <= LIMITS["fp32"]
        assert all(text.startswith("the accumulation window is open: 1 backward(s)") for text in answer["middle"])
        assert answer["watched"] == [0.0, 0.0]


@pytest.mark.parametrize("pattern", ["clear_engine", "misuse_manual"])
@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])
def test_two_losses_over_one_forward(lab: Lab, stage: int, offload: bool, pattern: str) -> None:
    for answer in run(lab, 2, "two_losses", stage=stage, offload=offload, pattern=pattern):
        assert max(answer["errors"]) <= 1e-7
        assert answer["same"]


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])
def test_after_zero_grad_and_after_a_backward_that_raised(lab: Lab, stage: int, offload: bool) -> None:
    for answer in run(lab, 2, "clearing", stage=stage, offload=offload):
        assert answer["cleared"].startswith("no backward since the last optimizer step or zero_grad")
        assert answer["error"] <= 1e-7
        assert answer["raised"].startswith("the last backward raised")
        assert answer["after"] > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names(lab: Lab, stage: int) -> None:
    answer = run(lab, 2, "names", stage=stage)[0]
    assert "'a.wieght'; the nearest is 'a.weight'" in answer["unknown"]
    assert answer["unknown"].startswith("ConfigError")
    assert answer["frozen"].startswith("GradientsUnavailableError: frozen.weight is frozen")
    assert answer["idle"] == ["a.bias"], "an idle parameter is left out, as PyTorch has None there"
    assert answer["empty"] == []
    assert "after close" in answer["closed"]


@EACH
def test_a_graph_task_without_parameters_changes_nothing(lab: Lab, stage: int, offload: bool) -> None:
    for answer in run(lab, 2, "second_pass", stage=stage, offload=offload):
        assert answer["same"]
        assert answer["error"] <= 1e-7
        assert answer["difference"] <= 3e-8


def test_norms_of_large_parameters(lab: Lab) -> None:
    answer = run(lab, 1, "chunks")[0]
    assert answer["error"] <= 1e-6
    assert answer["plain"] > 1e-5, "the sum in float32 is good enough: CHUNK is not needed any more"


def test_other_groups_are_refused(lab: Lab) -> None:
    for answer in run(lab, 2, "experts"):
        assert "partitioned over fewer ranks than the data-parallel group" in answer["refused"]
        assert answer["watched"] == {}
        assert len(answer["warnings"]) == 1
