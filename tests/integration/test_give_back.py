"""After close every wrapped method, hook and dict is the original object again."""

from __future__ import annotations

import pytest

from tests.lab.group import Lab

CONFIGURATIONS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


@pytest.mark.parametrize("fail", ["", "forward", "backward", "step"])
@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
def test_identity_after_close(lab: Lab, stage: int, offload: bool, fail: str) -> None:
    answer = lab.run(1, {"call": "giveback.round_trip", "stage": stage, "offload": offload, "fail": fail})[0]
    assert answer.get("changed") == [], answer
    assert answer["raised"] == (f"boom in {fail}" if fail else "")
    if fail in ("", "forward"):
        assert answer["again"]


def test_identity_after_close_bf16_optimizer(lab: Lab) -> None:
    extra = {"data_types": {"grad_accum_dtype": "fp32"}}
    case = {"call": "giveback.round_trip", "stage": 1, "offload": False, "dtype": "bf16", "extra": extra}
    assert lab.run(1, case)[0].get("changed") == []


def test_attaching_twice_is_an_error(lab: Lab) -> None:
    answer = lab.run(1, {"call": "giveback.attach_twice"})[0]
    assert "already has an open zeroguard session" in answer["error"]
    assert answer["after_close"] == "attached"


def test_errors_name_the_thing_and_the_way_out(lab: Lab) -> None:
    answer = lab.run(1, {"call": "giveback.errors"})[0]
    assert answer["no_engine"].startswith("EngineNotFoundError: no DeepSpeed engine in this Linear.")
    assert "deepspeed.initialize" in answer["no_engine"]
    assert answer["not_applicable"].startswith("GuardUnavailableError: guard 'param_status'")
    assert "ZeRO-1 does not partition parameters" in answer["not_applicable"]
    missing = answer["missing"]
    assert "optimizer.params_in_partition" in missing
    assert "0.16.9, 0.17.6, 0.18.5, 0.19.2, 0.19.8" in missing
    assert "on_unavailable: warn" in missing
    assert missing.endswith("| accumulator_reset | ('optimizer.params_in_partition',)")
    assert "accumulator_reset" in answer["warned"][0]
    assert "on_unavailable" not in answer["warned"][0]
    assert answer["selected"] == ["retained_graph", "accumulation"]
    assert answer["verdicts"]["accumulator_reset"] == "unavailable"
    assert "+ retained_graph: ZeRO-1" in answer["selection"]
    assert "- host_read: " in answer["selection"]
