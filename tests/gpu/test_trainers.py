"""On a CUDA device: Lightning's own strategies, as they are shipped, and the gradient audit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.lab.group import Lab

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: Lightning's strategies refuse the CPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
CONFIGURATIONS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
EACH = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
PACKAGE = "lightning.pytorch"
AUDIT = {"name": "gradient_audit", "elements_per_parameter": "all", "every_n_steps": 1, "action": "raise"}
BESIDE = {"guards": [{"name": "automatic"}, AUDIT], "on_violation": "record"}
ALONE = {"guards": [AUDIT], "on_violation": "record"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab({"DS_ACCELERATOR": "cuda", "LAB_DEVICE": "cuda"})
    yield made
    made.close()


def run(lab: Lab, call: str, **case: Any) -> dict[str, Any]:
    return lab.run(1, {"call": call, **case}, timeout=280)[0]


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize("mode", ["retained", "forwards", "auto"])
@EACH
def test_lightning(lab: Lab, stage: int, offload: bool, mode: str) -> None:
    case = {"package": PACKAGE, "stage": stage, "offload": offload, "mode": mode}
    answer = run(lab, "lightning_programs.fit", **case)
    assert answer["status"] == "exact", answer
    assert answer["findings"] == [], answer


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@EACH
def test_fabric(lab: Lab, stage: int, offload: bool) -> None:
    case = {"package": PACKAGE, "stage": stage, "offload": offload, "mode": "retained"}
    answer = run(lab, "lightning_programs.fabric", **case)
    assert answer["status"] == "exact", answer


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@EACH
def test_the_audit_is_silent_where_the_run_is_exact(lab: Lab, stage: int, offload: bool, dtype: str) -> None:
    for pattern in ("misuse_engine", "boundary_manual", "clear_engine"):
        for gas in (1, 4):
            case = {"pattern": pattern, "stage": stage, "offload": offload, "dtype": dtype, "gas": gas}
            answer = run(lab, "programs.two_losses", guarded=BESIDE, **case)
            assert answer["status"] == "exact", (case, answer["error"], answer["differences"])
            found = [f for f in answer["findings"] if f["guard"] == "gradient_audit"]
            assert found == [], answer["texts"]
            assert answer["verdicts"]["gradient_audit"] == "passed", answer["summary"]


@EACH
def test_the_audit_speaks_at_the_first_wrong_step(lab: Lab, stage: int, offload: bool) -> None:
    for pattern in ("misuse_engine", "clear_engine"):
        case = {"pattern": pattern, "stage": stage, "offload": offload, "dtype": "bf16"}
        answer = run(lab, "programs.two_losses", guarded=ALONE, **case)
        if answer["status"] == "wrong":
            assert answer["findings"], (case, answer["differences"])
        elif answer["status"] == "exact":
            assert answer["findings"] == [], answer["texts"]
