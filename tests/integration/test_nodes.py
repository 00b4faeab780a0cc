"""Two machines: network namespaces with addresses of their own, torchrun on both, two ranks each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.nodes import Nodes


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What the four ranks of one job said: of a finding on ZeRO-1, 2 and 3, and of the cable that was taken out."""
    why_not = Nodes.why_not()
    if why_not:
        pytest.skip(why_not)
    out = tmp_path_factory.mktemp("nodes")
    nodes = Nodes()
    files = [out / f"rank-{rank}.json" for rank in range(4)]
    try:
        nodes.start()
        nodes.run(out)
        _wait_for([out / "training"], nodes, out, 150)
        nodes.cut()
        _wait_for(files, nodes, out, 60)
        yield [json.loads(file.read_text()) for file in files]
    finally:
        nodes.stop()


def _wait_for(files: list[Path], nodes: Nodes, out: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        gone = [agent.returncode for agent in nodes.agents if agent.poll()]
        if gone or time.monotonic() > deadline:
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(out.glob("*.log")))
            pytest.fail(f"torchrun ended with {gone}; {[f.name for f in files if not f.exists()]} missing\n{logs}")
        time.sleep(0.1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_two_nodes_decide_together_and_report_together(answers: list[dict[str, Any]], stage: int) -> None:
    said = [answer["stages"][str(stage)] for answer in answers]
    assert [(one["raised"], one["ranks"], one["step"]) for one in said] == [("GuardViolation", [3], 3)] * 4
    assert [one["report"] for one in said] == [[[1, "planted", "warning", 3], [3, "planted", "error", 3]]] * 4
    assert not any(one["heartbeat"] for one in said), "no thread outlives its session"


def test_a_node_that_is_cut_off_is_named(answers: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert answers[rank]["error"].startswith("RuntimeError"), answers[rank]
        assert answers[rank]["seconds"] < 5 + 15
        notes = answers[rank]["notes"]
        assert [note.split(" was last heard of")[0] for note in notes] == ["zeroguard: rank 2", "zeroguard: rank 3"]
        assert answers[rank]["findings"][-1]["kind"] == "rank_silent"
    for rank in (2, 3):
        assert answers[rank]["error"].startswith("RuntimeError"), answers[rank]
        assert answers[rank]["seconds"] < 5 + 15
        (note,) = answers[rank]["notes"]
        assert "the job's store does not answer" in note
        assert "torchrun at " in note
