"""Guard host_read on a real DeepSpeed engine, on an accelerator on which an unguarded read is always stale.

ZeRO-2 with the optimizer offloaded to pinned memory and two micro-batches a step. From 0.19.8 DeepSpeed waits
before each further copy by itself, so only the newest copies are still on their way when the backward returns:
the last accumulator.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.group import Lab

ACCUMULATORS = ("items", "values", "getitem", "get", "to_dict", "copy", "deepcopy", "pickle")
GRADIENTS = ("master_index", "master_loop", "master_zip", "gradient_dict", "safe_get_full_grad")
READS = (*ACCUMULATORS, *GRADIENTS)
#: Ends in a copy to the device, which the stream orders: right on a GPU, too, where nothing is converted on the host.
ORDERED = frozenset({"safe_get_full_grad"})
ALONE: dict[str, Any] = {"guards": [{"name": "host_read"}]}


def host_read(**options: Any) -> dict[str, Any]:
    return {"guards": [{"name": "host_read", **options}]}


class Worker:
    """Answers of ``tests/lab/host_read.py`` on one rank. Those of programs without a guard are kept."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.kept: dict[Any, dict[str, Any]] = {}

    def __call__(self, call: str, **case: Any) -> dict[str, Any]:
        (answer,) = self.lab.run(1, {"call": f"host_read.{call}", **case})
        assert "error" not in answer, answer.get("trace") or answer.get("log") or answer["error"]
        return answer

    def unguarded(self, call: str, **case: Any) -> dict[str, Any]:
        key = (call, repr(sorted(case.items())))
        if key not in self.kept:
            self.kept[key] = self(call, guarded=False, **case)
        return self.kept[key]

    def truth(self, how: str, **case: Any) -> list[float]:
        """What an accelerator that resolves dependencies shows."""
        return self.unguarded("reads", how=how, kind="plain", **case)["seen"]


@pytest.fixture(scope="module")
def worker(lab: Lab) -> Worker:
    pytest.importorskip("deepspeed")
    return Worker(lab)


@pytest.mark.parametrize("how", [r for r in READS if r not in ORDERED])
def test_an_unguarded_read_is_stale(worker: Worker, how: str) -> None:
    right, answer = worker.truth(how), worker.unguarded("reads", how=how)
    assert all(right)
    assert answer["pending"][0] > 0
    assert answer["pending"][1] == answer["pending"][0], "a read by Python waits for nothing"
    assert answer["seen"] != right
    if how in ACCUMULATORS:
        wrong = [seen for seen, norm in zip(answer["seen"], right, strict=True) if seen != norm]
        assert wrong == [0.0], "the newest copy alone, and none of it"


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("guarded", [True, ALONE], ids=["automatic", "alone"])
def test_a_guarded_read_is_right(worker: Worker, how: str, guarded: Any) -> None:
    answer = worker("reads", how=how, guarded=guarded)
    assert answer["seen"] == worker.truth(how)
    assert answer["pending"][0] > 0
    assert answer["pending"][1] == 0
    assert answer["read_waits"] == ["event"]
    assert answer["findings"] == []
    assert answer["verdicts"]["host_read"] == "passed"


@pytest.mark.parametrize("at", [1, 2, 3])
def test_later_reads_are_right_too(worker: Worker, at: int) -> None:
    """After a boundary, and in the second window, where the old value is not zero."""
    if at == 2:
        assert worker.unguarded("reads", how="items", at=at)["seen"] != worker.truth("items", at=at)
    assert worker("reads", how="items", at=at)["seen"] == worker.truth("items", at=at)


@pytest.mark.parametrize("wait", ["event", "stream", "device"])
@pytest.mark.parametrize("how", ["items", "master_index"])
def test_each_wait_is_right(worker: Worker, how: str, wait: str) -> None:
    answer = worker("reads", how=how, guarded=host_read(wait=wait))
    assert answer["seen"] == worker.truth(how)
    assert answer["read_waits"][0] == wait
    # DeepSpeed forgets its own event by waiting for it, which then takes no time.
    assert answer["read_waits"][1:] == ([] if wait == "event" else ["event"])


@pytest.mark.parametrize("form", ["call", "call without tensors", "with"])
@pytest.mark.parametrize("how", ["items", "values", "getitem", "master_index", "gradient_dict"])
def test_explicit_mode_waits_when_told(worker: Worker, how: str, form: str) -> None:
    answer = worker("explicit", how=how, form=form, guarded=host_read(mode="explicit"))
    assert answer["before"] != worker.truth(how)
    assert answer["after"] == worker.truth(how)
    assert answer["read_waits"] == ["event"]


@pytest.mark.parametrize("wait", ["stream", "device"])
def test_explicit_mode_waits_as_configured(worker: Worker, wait: str) -> None:
    answer = worker("explicit", how="items", form="call", guarded=host_read(mode="explicit", wait=wait))
    assert answer["after"] == worker.truth("items")
    assert answer["read_waits"][0] == wait


@pytest.mark.parametrize("guarded", [False, True, ALONE], ids=["unguarded", "automatic", "alone"])
@pytest.mark.parametrize("call", ["quiet", "reads"])
def test_training_is_that_of_an_ordinary_run(worker: Worker, call: str, guarded: Any) -> None:
    case = {"how": "items"} if call == "reads" else {}
    assert worker(call, guarded=guarded, **case)["weights"] == worker.unguarded("quiet", kind="plain")["weights"]


@pytest.mark.parametrize("guarded", [True, ALONE], ids=["automatic", "alone"])
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_waits_on_deepspeeds_own_way(worker: Worker, guarded: Any, overlap: bool) -> None:
    case = {"zero": {"overlap_comm": overlap}}
    plain, answer = worker.unguarded("quiet", **case), worker("quiet", guarded=guarded, **case)
    assert plain["hot"]
    assert answer["hot"] == plain["hot"], "waits during the backwards"
    assert answer["waits"] == plain["waits"], "waits at all"


@pytest.mark.parametrize("guarded", [True, ALONE], ids=["automatic", "alone"])
def test_a_run_without_reads_never_exercises_the_guard(worker: Worker, guarded: Any) -> None:
    """DeepSpeed's own reads, in its step, are not the user's."""
    assert worker("quiet", guarded=guarded)["verdicts"]["host_read"] == "never exercised"


def test_overlap_comm_waits_for_the_device_at_the_end_of_a_backward(worker: Worker) -> None:
    """As measured on an H200: with overlap_comm no read is stale, guarded or not."""
    case = {"how": "items", "zero": {"overlap_comm": True}}
    answer = worker.unguarded("reads", **case)
    assert answer["pending"][0] == 0
    assert answer["seen"] == worker.truth("items") == worker("reads", **case)["seen"]


def test_stage_1_reads_what_the_boundary_wrote(worker: Worker) -> None:
    """ZeRO-1 accumulates on the device; only the boundary copies to the host."""
    case = {"how": "master_index", "stage": 1}
    assert worker.unguarded("reads", **case)["seen"] != worker.truth(**case)
    answer = worker("reads", **case)
    assert answer["seen"] == worker.truth(**case)
    assert answer["read_waits"] == ["event"]


@pytest.mark.parametrize("at", [0, 1])
def test_stage_3_is_right_and_costs_no_backward(worker: Worker, at: int) -> None:
    """As measured on an H200: DeepSpeed waits for its own reduction there, so no read is stale, guarded or not."""
    case = {"how": "safe_get_full_grad", "stage": 3, "at": at}
    plain, answer = worker.unguarded("reads", **case), worker("reads", **case)
    assert plain["seen"] == worker.truth(**case) == answer["seen"]
    assert answer["hot"] == plain["hot"]
    assert answer["weights"] == plain["weights"]


@pytest.mark.parametrize("guarded", [True, ALONE], ids=["automatic", "by name"])
def test_not_needed_where_the_accelerator_resolves_dependencies(worker: Worker, guarded: Any) -> None:
    answer = worker("reads", how="items", kind="plain", guarded=guarded)
    assert answer["seen"] == worker.truth("items")
    assert answer["verdicts"]["host_read"] == "not needed"
    assert "host_read" not in answer["selected"]
    assert "host_read: accelerator 'cpu' resolves data dependencies" in answer["summary"]


@pytest.mark.parametrize("guarded", [True, ALONE], ids=["automatic", "alone"])
def test_close_gives_the_original_objects_back(worker: Worker, guarded: Any) -> None:
    answer = worker("undone", guarded=guarded)
    assert answer["during"] == [False, False, False]
    assert answer["after"] == [True, True, True]
    assert answer["mapped"]
    assert answer["left"] == []
    assert answer["type"] == "dict"


def test_explicit_mode_replaces_nothing(worker: Worker) -> None:
    answer = worker("undone", guarded=host_read(mode="explicit"))
    assert answer["during"] == answer["after"] == [True, True, True]
    assert answer["left"] == []


# -- DeepSpeed's own functions, and checkpoints, in the middle of a window --------------------------------------------


@pytest.mark.parametrize("guarded", [True, ALONE], ids=["automatic", "alone"])
@pytest.mark.parametrize(
    ("what", "stage"),
    [("full", 2), ("full", 3), ("local", 3), ("partitions", 3), ("checkpoint", 2), ("checkpoint", 3)],
)
def test_reads_and_checkpoints_in_the_middle_of_a_window(
    worker: Worker, what: str, stage: int, guarded: Any, tmp_path: Any
) -> None:
    case = {"what": what, "stage": stage}
    plain = worker("middle", **case, kind="plain", guarded=False, folder=str(tmp_path / "plain"))
    answer = worker("middle", **case, guarded=guarded, folder=str(tmp_path / "guarded"))
    assert len(plain["seen"]) == 4
    assert all(plain["seen"])
    assert answer["seen"] == plain["seen"]
    assert answer["weights"] == plain["weights"]


# -- detect ------------------------------------------------------------------------------------------------------------

DETECT = {**host_read(detect=True), "on_violation": "record"}
READING = ("item", "tolist", "numpy", "norm", "add", "add_", "copy to host", "cat", "foreach", "clone", "cast", "bool")
HANDING_OUT = ("print", "pickle", "deepcopy", "equal", "column")


@pytest.mark.parametrize("use", [*READING, *HANDING_OUT])
def test_detect_finds_every_read_of_a_copy_in_flight(worker: Worker, use: str) -> None:
    answer = worker("detect", source="user", use=use, guarded=DETECT)
    assert answer["found"] == 0, "before the read"
    (finding,) = answer["findings"]
    assert (finding["kind"], finding["severity"]) == ("read_in_flight", "error")
    assert "16 bytes" in finding["seen"]
    assert "tests/lab/host_read.py" in finding["seen"]
    assert "tests/lab/host_read.py" in finding["cause"]
    assert "in _user_copy" in finding["cause"]


def test_detect_finds_a_read_of_deepspeeds_copy_and_names_both_lines(worker: Worker) -> None:
    answer = worker("detect", source="kept", use="norm", guarded=DETECT)
    (finding,) = answer["findings"]
    assert "stage_1_and_2.py" in finding["cause"]
    assert "called from" in finding["cause"]
    assert "tests/lab/host_read.py" in finding["seen"]


@pytest.mark.parametrize("use", ["onto the device", "view", "shape", "fill"])
@pytest.mark.parametrize("source", ["user", "kept"])
def test_detect_leaves_alone_what_is_no_read(worker: Worker, source: str, use: str) -> None:
    assert worker("detect", source=source, use=use, guarded=DETECT)["findings"] == []


@pytest.mark.parametrize("source", ["view", "waited", "event", "other part", "blocking"])
def test_detect_leaves_alone_what_was_waited_for(worker: Worker, source: str) -> None:
    assert worker("detect", source=source, use="norm", guarded=DETECT)["findings"] == []


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_detect_is_silent_on_a_loop_that_reads_nothing(worker: Worker, stage: int, gas: int) -> None:
    """DeepSpeed's own reads are in order, and the weights are those of a run without it."""
    answer = worker("quiet", guarded=DETECT, stage=stage, gas=gas)
    assert answer["findings"] == []
    assert answer["weights"] == worker.unguarded("quiet", kind="plain", stage=stage, gas=gas)["weights"]


@pytest.mark.parametrize(("source", "found"), [("user", 1), ("kept", 1), ("waited", 0)])
def test_detect_where_the_loop_announces_itself(worker: Worker, source: str, found: int) -> None:
    case = {"call": "loop.over", "mode": "announced", "target": "host_read.detect", "source": source, "use": "norm"}
    guarded = {"guards": [{"name": "automatic"}, *DETECT["guards"]], "on_violation": "record"}
    (answer,) = worker.lab.run(1, {**case, "guarded": guarded})
    assert [finding["kind"] for finding in answer["findings"]] == ["read_in_flight"] * found, answer


def test_without_detect_nothing_is_found(worker: Worker) -> None:
    assert worker("detect", source="user", use="norm", guarded=host_read())["findings"] == []


def test_a_read_that_was_found_stops_the_run(worker: Worker) -> None:
    (answer,) = worker.lab.run(
        1, {"call": "host_read.detect", "source": "user", "use": "norm", "guarded": host_read(detect=True)}
    )
    assert answer["error"].startswith("GuardViolation")


@pytest.mark.parametrize("nested", [False, True])
def test_detect_leaves_nothing_behind(worker: Worker, nested: bool) -> None:
    answer = worker("detector_leaves_nothing", nested=nested)
    assert answer["works"] == 4.0
    assert answer["during"] == [n + 1 for n in answer["before"]]
    left = [1 * nested, 0]
    assert answer["after"] == [n + more for n, more in zip(answer["before"], left, strict=True)]
    assert len(answer["warnings"]) == nested


@pytest.mark.parametrize("offload", [True, False])
def test_a_tensor_of_the_users_own(worker: Worker, offload: bool) -> None:
    """session.host_read(t) is right for any host tensor, not only for DeepSpeed's."""
    answer = worker("own_tensor", offload=offload)
    assert answer["before"] == [0.0] * 4
    assert answer["after"] == [1.0] * 4
    assert answer["findings"] == []
