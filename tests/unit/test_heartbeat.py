"""The heartbeat: what a rank says of itself in the store, who is seen as missing, and that no thread stays behind."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from zeroguard import NotGuardedError
from zeroguard import heartbeat as module
from zeroguard.collective import from_collective, job_store
from zeroguard.heartbeat import Beat, Heartbeat, Place
from zeroguard.ranks import SHOWN, explain

GROUP = (0, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "BEAT", 0.05)
    monkeypatch.setattr(module, "ANSWER", 0.5)
    monkeypatch.setattr(module, "GUARDED", 0.2)
    before = threading.active_count()
    yield
    assert threading.active_count() == before


class Rank:
    """One rank of a pair, in this process."""

    def __init__(self, store: Any, rank: int, agreement: str = "every-1", group: tuple[int, ...] = GROUP) -> None:
        self.place: Place | None = Place(0, "forward")
        self.heartbeat = Heartbeat(lambda: store, rank, [group], lambda: self.place, agreement)
        self.heartbeat.start()


def pair(**options: Any) -> tuple[Rank, Rank]:
    store = dist.HashStore()
    return Rank(store, 0), Rank(store, 1, **options)


def until(rank: Rank, true: Any) -> dict[int, Beat]:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        beats, _ = rank.heartbeat.look()
        if true(beats):
            return beats
    raise AssertionError(beats)


def test_the_other_rank_is_seen_where_it_is() -> None:
    one, two = pair()
    two.place = Place(7, "backward")
    beat = until(one, lambda beats: 1 in beats and beats[1].place == Place(7, "backward"))[1]
    assert (beat.end, beat.error) == ("", "")
    _, silent = one.heartbeat.look()
    assert silent == set()
    two.heartbeat.close()
    beats, silent = one.heartbeat.look()
    assert beats[1].end == "closed"
    assert silent == set()
    one.heartbeat.close()


def test_a_rank_that_left_says_why() -> None:
    one, two = pair()
    two.heartbeat.leave("ValueError: boom", follows=False)
    two.heartbeat.close()
    beats, _ = one.heartbeat.look()
    assert (beats[1].end, beats[1].error, str(beats[1].place)) == ("left", "ValueError: boom", "step 0, forward")
    one.heartbeat.close()


def test_a_rank_whose_process_stands_still_is_silent() -> None:
    store = dist.HashStore()
    one, two = Rank(store, 0), Rank(store, 1)
    until(one, lambda beats: 1 in beats)
    held = threading.Event()
    two.heartbeat._jobs.put((lambda store: held.wait(), module.Future()))
    time.sleep(0.2)
    beats, silent = one.heartbeat.look()
    assert silent == {1}
    assert beats[1].place == Place(0, "forward")
    held.set()
    two.heartbeat.close()
    one.heartbeat.close()


def test_a_rank_without_an_open_session_is_absent() -> None:
    store = dist.HashStore()
    one, two = Rank(store, 0), Rank(store, 1)
    assert one.heartbeat.absent() == two.heartbeat.absent() == []
    # How often a rank has opened and closed a session is its own business.
    one.heartbeat.close()
    again = Rank(store, 0)
    third = Rank(store, 0)
    third.heartbeat.close()
    assert again.heartbeat.absent() == two.heartbeat.absent() == []
    other = Rank(store, 0, group=(0, 2))
    assert other.heartbeat.absent() == [2], "another group counts on its own"
    two.heartbeat.close()
    assert again.heartbeat.absent() == [1]
    two = Rank(store, 1)
    two.heartbeat.leave("ValueError: boom", follows=False)
    two.heartbeat.close()
    assert again.heartbeat.absent() == [], "it was there, and what it did then is told otherwise"
    for rank in (again, other):
        rank.heartbeat.close()


@pytest.mark.parametrize("agreement", ["", "every-2"])
def test_another_agreement_is_none(agreement: str) -> None:
    one, two = pair(agreement=agreement)
    assert one.heartbeat.absent() == [1]
    one.heartbeat.close()
    two.heartbeat.close()


class Dead:
    """A store that does not answer, or whose server is gone."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs
        self.free = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.hangs:
                self.free.wait()
            raise dist.DistNetworkError("Broken pipe")

        return call


@pytest.mark.parametrize("hangs", [True, False])
def test_a_store_that_is_gone_holds_nobody_up(hangs: bool) -> None:
    store = Dead(hangs)
    rank = Rank(store, 0)
    began = time.monotonic()
    assert rank.heartbeat.absent() == []
    rank.heartbeat.leave("ValueError", follows=False)
    with pytest.raises(ConnectionError, match="no answer within" if hangs else "DistNetworkError: Broken pipe"):
        rank.heartbeat.look()
    rank.heartbeat.close()
    assert time.monotonic() - began < 3
    store.free.set()
    rank.heartbeat._thread.join(5)


def test_it_ends_with_its_session() -> None:
    rank = Rank(dist.HashStore(), 0)
    rank.place = None
    rank.heartbeat._thread.join(5)
    assert not rank.heartbeat._thread.is_alive()
    rank.heartbeat.close()


def beat(**changes: Any) -> Beat:
    now = time.time()
    return Beat(**{"number": 1, "at": now - 30, "since": now - 40, "step": 3, "doing": "backward", **changes})


def test_who_is_behind_it_comes_first_and_who_follows_is_left_out() -> None:
    beats = {
        1: beat(end="left", error="RuntimeError: connection closed", follows=True),
        2: beat(),
        3: beat(end="left", error="ValueError: boom", doing="forward"),
        4: beat(end="closed", step=5),
    }
    kind, said = explain(beats, {2}, [1, 2, 3, 4, 5])
    assert kind == "rank_left"
    assert said == [
        "rank 3 left with ValueError: boom in step 3, forward",
        "rank 2 was last heard of 30 s ago in step 3, backward (killed, crashed, stopped, or cut off)",
        "rank 4 closed its session 30 s ago, after step 5",
        "rank 5 has never been heard of: it is not guarded, or has no heartbeat",
    ]


def test_where_nobody_is_missing_all_places_are_told() -> None:
    beats = {1: beat(doing="forward"), 2: beat(end="left", error="RuntimeError: gloo", follows=True)}
    assert explain(beats, set(), [1, 2]) == (
        "rank_elsewhere",
        [
            "rank 1 is alive, in step 3, forward for 40 s",
            "rank 2 left with RuntimeError: gloo in step 3, backward, out of a collective as well",
        ],
    )


def test_a_text_names_a_few_ranks() -> None:
    ranks = list(range(1, 100))
    _, said = explain({rank: beat() for rank in ranks}, set(ranks), ranks)
    assert len(said) == SHOWN + 1
    assert said[-1] == f"and {99 - SHOWN} more ranks"


def test_exceptions_out_of_a_collective() -> None:
    gloo = RuntimeError("[x/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error")
    assert from_collective(gloo)
    assert from_collective(dist.DistBackendError("NCCL timed out"))
    assert from_collective(dist.DistNetworkError("gone"))
    wrapped = ValueError("in the loop")
    wrapped.__cause__ = gloo
    assert from_collective(wrapped)
    assert not from_collective(RuntimeError("the size of tensor a must match"))
    assert not from_collective(ValueError("gloo/"))


def test_without_a_process_group_there_is_no_store() -> None:
    assert job_store() is None


def test_not_guarded_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NotGuardedError([1, 3], 0, 2)))
    assert error.ranks == (1, 3)
    assert "rank(s) 1, 3 are not guarded, and rank 0 is" in str(error)
    assert "agree_every_n_steps: 2" in str(error)
