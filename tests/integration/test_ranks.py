"""Ranks see alone and decide together; a rank that goes missing is named by those that are left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.agreement import GUARDS, LOOP_STEPS
from tests.lab.forks import Forks
from tests.lab.group import Lab

TIMEOUT = 4.0


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.stop()


# -- one decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "every"), [(2, 1), (4, 1), (2, 2)])
def test_what_one_rank_finds_all_raise_at_the_same_step(forks: Forks, ranks: int, every: int) -> None:
    answers = forks.run(ranks, {"call": "agreement.each_guard", "every": every}, timeout=20.0)
    for guard, (_, _, kind) in GUARDS.items():
        for victim in range(ranks):
            said = [answer[f"{guard} {victim}"] for answer in answers]
            assert [one["raised"] for one in said] == ["GuardViolation"] * ranks, said
            assert [one["ranks"] for one in said] == [[victim]] * ranks, said
            assert [one["step"] for one in said] == [every] * ranks, said
            for rank, one in enumerate(said):
                assert (kind in one["kinds"]) == (rank == victim), one
                assert f"rank {victim}" in one["text"] or f"rank(s) {victim}" in one["text"]


def test_without_agreement_a_rank_stops_alone(forks: Forks) -> None:
    answers = forks.run(2, {"call": "agreement.each_guard", "agree": False}, timeout=20.0)
    for guard in GUARDS.keys() - {"gradient_audit"}:
        assert [answers[rank][f"{guard} 1"]["raised"] for rank in (0, 1)] == ["", "GuardViolation"]
        assert answers[0][f"{guard} 1"]["step"] == LOOP_STEPS


# -- how much is said ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_agreement_is_one_all_reduce_and_without_it_nothing_is_said(lab: Lab, stage: int) -> None:
    def talk(guarded: Any) -> dict[str, Any]:
        return lab.run(2, {"call": "agreement.talk", "stage": stage, "guarded": guarded})[0]

    plain = talk(None)
    assert all(plain["steps"]), "the recorder sees DeepSpeed's own"
    for silent in ({"agree": False}, {"on_violation": "warn"}, {"on_violation": "record"}):
        assert talk(silent) == plain, silent
    for every in (1, 3):
        said = talk({"agree_every_n_steps": every})
        more = [sorted(step) for step in said["steps"]]
        for step, before in enumerate(plain["steps"], 1):
            assert more[step - 1] == sorted([*before, *(["allreduce"] if step % every == 0 else [])]), step
        assert said["attach"] == said["end"] == []


@pytest.mark.parametrize("stage", [2, 3])
def test_no_collective_on_the_way_out(forks: Forks, stage: int) -> None:
    answers = forks.run(2, {"call": "agreement.exits", "stage": stage}, timeout=20.0)
    assert [answer["calls"] for answer in answers] == [{}, {}], answers


# -- a rank goes missing ---------------------------------------------------------------------------------------------


def lost(forks: Forks, ranks: int, **case: Any) -> list[dict[str, Any]]:
    answers = forks.run(ranks, {"call": "lost.lost", **case}, timeout=TIMEOUT)
    for rank, answer in enumerate(answers):
        if rank != case["victim"]:
            assert answer["error"].startswith("RuntimeError"), answer
            # Its own timeout, what the victim took to fall, two looks at the store, and a busy machine.
            assert answer["seconds"] < TIMEOUT + 10
            held = ["zeroguard-heartbeat"] if case["how"] == "stop" and case["victim"] == 0 else []
            assert answer["threads"] == ["MainThread", *held], "only a store that is stopped holds the thread"
            assert answer["row"] == ["findings"]
            assert answer["notes"], answer
            assert "; ".join(answer["notes"]).replace("zeroguard: ", "") == answer["findings"][-1]["seen"]
    return answers


@pytest.mark.parametrize(
    ("ranks", "victim", "where", "stage", "by"),
    [(2, 1, "forward", 3, "callback"), (4, 2, "backward", 2, "loss"), (2, 0, "step", 1, "keeper")],
)
def test_a_rank_that_raises_is_named_with_its_exception(
    forks: Forks, ranks: int, victim: int, where: str, stage: int, by: str
) -> None:
    answers = lost(forks, ranks, how="raise", where=where, victim=victim, stage=stage, by=by, linger=8)
    assert answers[victim]["error"] == "ValueError: boom"
    assert answers[victim]["notes"] == answers[victim]["findings"] == []
    for answer in answers[:victim] + answers[victim + 1 :]:
        assert answer["notes"][0] == f"zeroguard: rank {victim} left with ValueError: boom in step 2, {where}"
        assert answer["findings"][-1]["kind"] == "rank_left"


@pytest.mark.parametrize(
    ("ranks", "victim", "how", "where", "stage"),
    [(2, 1, "kill", "forward", 1), (4, 2, "kill", "backward", 3), (4, 3, "stop", "step", 2)],
)
def test_a_rank_that_is_killed_or_stopped_is_named_with_its_last_place(
    forks: Forks, ranks: int, victim: int, how: str, where: str, stage: int
) -> None:
    answers = lost(forks, ranks, how=how, where=where, victim=victim, stage=stage)
    assert answers[victim] == {"status": "dead"}
    for answer in answers[:victim] + answers[victim + 1 :]:
        (note,) = answer["notes"]
        assert note.startswith(f"zeroguard: rank {victim} was last heard of "), note
        assert f"s ago in step 2, {where} (killed" in note
        assert answer["findings"][-1]["kind"] == "rank_silent"


def test_a_rank_that_hangs_is_seen_alive_elsewhere(forks: Forks) -> None:
    answers = lost(forks, 2, how="hang", where="forward", victim=1, stage=2)
    (note,) = answers[0]["notes"]
    assert note.startswith("zeroguard: rank 1 is alive, in step 2, forward for "), note
    assert answers[0]["findings"][-1]["kind"] == "rank_elsewhere"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_rank_that_hosts_the_store(forks: Forks, how: str) -> None:
    answers = lost(forks, 2, how=how, where="backward", victim=0, stage=2)
    (note,) = answers[1]["notes"]
    assert note.startswith("zeroguard: the job's store does not answer ("), note
    assert "rank 0 at 127.0.0.1:" in note
    assert note.endswith("is gone, stopped or cut off")
    assert answers[1]["findings"][-1]["kind"] == "store_gone"


@pytest.mark.parametrize("off", [{"heartbeat": False}, {"agree": False}], ids=str)
def test_without_heartbeat_nothing_is_added(forks: Forks, off: dict[str, bool]) -> None:
    case = {"call": "lost.lost", "how": "raise", "where": "forward", "victim": 1, "stage": 1, "guarded": off}
    answers = forks.run(2, case, timeout=TIMEOUT)
    assert answers[0]["error"].startswith("RuntimeError")
    assert answers[0]["notes"] == answers[0]["findings"] == []


# -- a rank that is not guarded --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "ranks", "guarded_on"),
    [(None, 4, [0, 2]), ({"on_violation": "warn"}, 2, [0]), ({"agree_every_n_steps": 2}, 2, [0])],
    ids=str,
)
def test_ranks_that_are_not_guarded_are_named(forks: Forks, others: Any, ranks: int, guarded_on: list[int]) -> None:
    case = {"call": "lost.partly", "guarded_on": guarded_on, "others": others, "linger": 2}
    answers = forks.run(ranks, case, timeout=TIMEOUT)
    absent = [rank for rank in range(ranks) if rank not in guarded_on]
    for rank in guarded_on:
        assert answers[rank]["error"].startswith("NotGuardedError"), answers[rank]
        assert answers[rank]["ranks"] == absent
        assert answers[rank]["step"] == 0
        assert f"rank(s) {', '.join(map(str, absent))} are not guarded" in answers[rank]["error"]


def test_ranks_that_are_all_guarded_are_not_waited_for(forks: Forks) -> None:
    case = {"call": "lost.partly", "guarded_on": [0, 1], "wait": 30.0}
    answers = forks.run(2, case, timeout=20.0)
    assert [(answer["error"], answer["step"]) for answer in answers] == [("", 2)] * 2
    assert [answer["threads"] for answer in answers] == [["MainThread"]] * 2
