"""On a CUDA device: the host-read race, which exists nowhere else, and the same proofs as on the CPU with NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.integration.test_give_back import all_is_back
from tests.integration.test_two_losses import silent
from tests.lab.group import Lab

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the host-read race cannot be shown here", allow_module_level=True)

pytestmark = pytest.mark.gpu
CONFIGURATIONS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
PATTERNS = ["clear_engine", "clear_manual", "boundary_engine", "boundary_manual", "misuse_engine", "misuse_manual"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab({"DS_ACCELERATOR": "cuda", "LAB_DEVICE": "cuda"})
    yield made
    made.close()


def test_unguarded_reads_are_wrong(lab: Lab) -> None:
    """Without this the next test proves nothing. A race: at least one wrong read of 150, not each; the rate differs
    from process to process, and a small copy lands before Python gets to it."""
    case = {"call": "race.host_reads", "guarded": False, "iterations": 50, "hidden": 4096}
    answer = lab.run(1, case, timeout=280)[0]
    assert answer["wrong"] > 0, answer


@pytest.mark.parametrize("wait", ["event", "stream", "device"])
@pytest.mark.parametrize("mode", ["transparent", "explicit"])
def test_guarded_reads_are_right(lab: Lab, mode: str, wait: str) -> None:
    guarded = {"guards": [{"name": "host_read", "mode": mode, "wait": wait}]}
    case = {"call": "race.host_reads", "guarded": guarded, "explicit": mode == "explicit", "iterations": 50}
    answer = lab.run(1, case, timeout=280)[0]
    assert answer["reads"] == 150, answer
    assert answer["wrong"] == 0, answer
    assert answer["verdicts"]["host_read"] == "passed"


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("form", ["copy_", "to"])
@pytest.mark.parametrize(
    ("use", "found"),
    [("norm", 1), ("item", 1), ("tolist", 1), ("numpy", 1), ("pickle", 1), ("onto the device", 0), ("view", 0)],
)
def test_detect_finds_reads_in_flight(lab: Lab, use: str, found: int, form: str, offload: bool) -> None:
    case = {"call": "measured.detect", "form": form, "use": use, "offload": offload}
    answer = lab.run(1, case, timeout=280)[0]
    assert answer["findings"] == ["read_in_flight"] * found, answer
    if use != "onto the device":
        assert lab.run(1, {**case, "waited": True}, timeout=280)[0]["findings"] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("gas", [1, 4])
@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
def test_two_losses_are_exact(lab: Lab, stage: int, offload: bool, gas: int, dtype: str) -> None:
    for pattern in PATTERNS:
        case = {"call": "programs.two_losses", "pattern": pattern, "stage": stage, "offload": offload}
        answer = lab.run(1, {**case, "dtype": dtype, "gas": gas}, timeout=280)[0]
        assert answer["status"] == "exact", (pattern, answer.get("differences"), answer["error"])
        assert silent(answer, pattern, gas), answer["texts"]


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
def test_idle_parameters_are_exact(lab: Lab, stage: int, offload: bool) -> None:
    answer = lab.run(1, {"call": "idle.idle", "stage": stage, "offload": offload}, timeout=280)[0]
    assert max(answer["differences"]) <= 1e-6 * answer["update"] + 3e-8, answer


@pytest.mark.parametrize("case", ["eval", "exception"])
def test_nothing_stays_in_flight(lab: Lab, case: str) -> None:
    answer = lab.run(1, {"call": "status.left_behind", "case": case}, timeout=280)[0]
    assert answer["seen"]["at_boundary"]["registry"] == 0, answer
    assert answer["seen"]["at_boundary"]["INFLIGHT"] == 0, answer


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
@pytest.mark.parametrize("program", ["single_loss", "accumulation_adamw_clipping", "eval_between"])
def test_healthy_programs_are_bit_identical(lab: Lab, program: str, stage: int, offload: bool) -> None:
    case = {"call": "healthy.run", "program": program, "stage": stage, "offload": offload}
    answer = lab.run(1, case, timeout=280)[0]
    assert answer.get("same"), answer
    assert answer["findings"] == [], answer["texts"]


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
def test_everything_is_given_back(lab: Lab, stage: int, offload: bool) -> None:
    all_is_back(lab.run(1, {"call": "returned.course", "stage": stage, "offload": offload}, timeout=280)[0])
