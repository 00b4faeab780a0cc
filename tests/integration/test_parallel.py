"""Engines that split parameters or batches in another way than by data parallelism alone: audited over the right ranks,
or the summary says why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.group import Lab


@pytest.fixture(scope="module")
def own() -> Iterator[Lab]:
    """Workers of their own: DeepSpeed keeps such groups for as long as a process lives."""
    made = Lab()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "verdict", "reason"),
    [
        ("experts on each rank", "passed", ""),
        ("experts", "never exercised", "partitioned over fewer ranks than the data-parallel group has (expert"),
        ("sequence", "never exercised", "with sequence parallelism gradients are averaged over other ranks"),
    ],
)
def test_the_summary_says_what_is_audited(own: Lab, kind: str, verdict: str, reason: str) -> None:
    for answer in own.run(2, {"call": "parallel.audited", "kind": kind}):
        assert answer.get("verdict") == verdict, answer
        assert answer["findings"] == [], answer["texts"]
        assert bool(answer["note"]) is bool(reason)
        if reason:
            assert answer["note"].startswith("step 1 not audited: "), answer["note"]
            assert reason in answer["text"], "in the table that session.summary() returns"
