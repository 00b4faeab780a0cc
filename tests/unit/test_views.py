"""The containers that a user sees in place of DeepSpeed's: a dict and a list in all that can be asked of one, and a
wait before each value. And the detector's judgement of single operations. No DeepSpeed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroguard.backends.deepspeed.copies import HostCopies
from zeroguard.backends.deepspeed.detect import ReadDetector
from zeroguard.backends.deepspeed.views import WaitingDict, WaitingList

PLAIN = {"a": 1, "b": 2}


def view_of(data: Any) -> tuple[Any, list[str]]:
    looks: list[str] = []
    kind = WaitingDict if isinstance(data, dict) else WaitingList
    return kind(data, lambda: looks.append("look")), looks


#: What is done with a dict that shows a value, and must be what the plain dict gives.
SHOWS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda d: d["b"],
    "get": lambda d: (d.get("a"), d.get("x", 9)),
    "values": lambda d: list(d.values()),
    "items": lambda d: list(d.items()),
    "dict()": dict,
    "**": lambda d: {**d},
    "call": lambda d: dict(**d),
    "|": lambda d: d | {"b": 3, "c": 4},
    "r|": lambda d: {"b": 3, "c": 4} | d,
    "copy": lambda d: d.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    "repr": repr,
    "==": lambda d: (d == PLAIN, PLAIN == d, d != PLAIN, d == {}),  # noqa: SIM300
    "pop": lambda d: (d.pop("a"), d.pop("x", 5), dict(d)),
    "popitem": lambda d: (d.popitem(), dict(d)),
    "setdefault": lambda d: (d.setdefault("a", 7), d.setdefault("z", 8), dict(d)),
    "update of another": lambda d: (lambda e: (e.update(d), e)[1])({"b": 0}),
    "match": lambda d: _match(d),
}
#: What shows no value.
KEEPS: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "bool": bool,
    "iter": list,
    "keys": lambda d: list(d.keys()),
    "reversed": lambda d: list(reversed(d)),
    "in": lambda d: ("a" in d, "x" in d),
    "isinstance": lambda d: isinstance(d, dict),
    "fromkeys": lambda d: type(d).fromkeys("xy", 1),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "[]=": lambda d: d.__setitem__("n", 1),
    "del": lambda d: d.__delitem__("a"),
    "update": lambda d: d.update({"a": 5}, c=6),
    "|=": lambda d: d.__ior__({"q": 1}),
    "clear": lambda d: d.clear(),
}


def _match(data: Any) -> Any:
    match data:
        case {"a": a, **rest}:
            return a, rest
    return None


@pytest.mark.parametrize("how", SHOWS)
def test_a_dicts_values_are_those_of_the_plain_one_after_a_wait(how: str) -> None:
    view, looks = view_of(dict(PLAIN))
    got = SHOWS[how](view)
    assert got == SHOWS[how](dict(PLAIN))
    assert type(got) is type(SHOWS[how](dict(PLAIN)))
    assert looks


@pytest.mark.parametrize("how", KEEPS)
def test_what_shows_no_value_does_not_wait(how: str) -> None:
    view, looks = view_of(dict(PLAIN))
    assert KEEPS[how](view) == KEEPS[how](dict(PLAIN))
    assert looks == []


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_is_written_into_the_original(how: str) -> None:
    data, plain = dict(PLAIN), dict(PLAIN)
    view, looks = view_of(data)
    WRITES[how](view)
    WRITES[how](plain)
    assert data == plain
    assert list(data) == list(view) == list(plain)
    assert looks == []


def test_ior_gives_the_view() -> None:
    view, _ = view_of(dict(PLAIN))
    same = view
    same |= {"c": 3}
    assert same is view


def test_errors_are_those_of_a_dict() -> None:
    view, _ = view_of({})
    for wrong, error in (
        (lambda: view["x"], KeyError),
        (lambda: view.pop("x"), KeyError),
        (lambda: hash(view), TypeError),
    ):
        with pytest.raises(error):
            wrong()


LIST_SHOWS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda x: (x[0], x[-1], x[1:]),
    "for": lambda x: [v for v in x],  # noqa: C416
    "list()": list,
    "tuple()": tuple,
    "*": lambda x: [*x],
    "zip": lambda x: list(zip(x, "abc", strict=True)),
    "reversed": lambda x: list(reversed(x)),
    "+": lambda x: x + [9],  # noqa: RUF005
    "r+": lambda x: [9] + x,  # noqa: RUF005
    "* 2": lambda x: (x * 2, 2 * x),
    "copy": lambda x: (x.copy(), copy.copy(x), copy.deepcopy(x)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "repr": repr,
    "==": lambda x: (x == [3, 1, 2], [3, 1, 2] == x, x != [3]),  # noqa: SIM300
    "pop": lambda x: (x.pop(), list(x)),
    "sorted": sorted,
}
LIST_WRITES: dict[str, Callable[[Any], Any]] = {
    "[]=": lambda x: x.__setitem__(1, 8),
    "del": lambda x: x.__delitem__(0),
    "append": lambda x: x.append(4),
    "extend": lambda x: x.extend([4, 5]),
    "insert": lambda x: x.insert(0, 7),
    "remove": lambda x: x.remove(1),
    "reverse": lambda x: x.reverse(),
    "sort": lambda x: x.sort(),
    "clear": lambda x: x.clear(),
    "+=": lambda x: x.__iadd__([6]),
    "*=": lambda x: x.__imul__(2),
}


@pytest.mark.parametrize("how", LIST_SHOWS)
def test_a_lists_elements_are_those_of_the_plain_one_after_a_wait(how: str) -> None:
    view, looks = view_of([3, 1, 2])
    got = LIST_SHOWS[how](view)
    assert got == LIST_SHOWS[how]([3, 1, 2])
    assert type(got) is type(LIST_SHOWS[how]([3, 1, 2]))
    assert looks


@pytest.mark.parametrize("how", LIST_WRITES)
def test_what_is_written_into_a_list_is_in_both(how: str) -> None:
    data, plain = [3, 1, 2], [3, 1, 2]
    view, looks = view_of(data)
    LIST_WRITES[how](view)
    LIST_WRITES[how](plain)
    assert data == plain
    assert looks == []
    assert list.copy(view) == plain, "C code takes the elements without asking"
    assert len(view) == len(plain)


# -- who sees what -----------------------------------------------------------------------------------------------------


def copies_of(**containers: Any) -> tuple[Any, HostCopies, list[str]]:
    owner, reads = SimpleNamespace(**containers), []
    copies = HostCopies(owner, lambda: None, own_events=False)
    copies.on_read = reads.append
    for name in containers:
        setattr(owner, name, copies.view(owner, name, name))
    return owner, copies, reads


def test_deepspeed_sees_the_plain_object_and_the_user_the_view() -> None:
    plain, row = {"a": 1}, [1, 2]
    owner, copies, reads = copies_of(grads=plain, masters=row)
    view = owner.grads
    copies.enter()
    copies.enter()
    assert owner.grads is plain
    assert owner.masters is row
    row.append(3)
    copies.leave()
    assert owner.grads is plain, "still inside"
    copies.leave()
    assert owner.grads is view
    assert list.copy(owner.masters) == [1, 2, 3]
    assert reads == []
    assert owner.grads["a"] == 1
    assert reads == ["grads"]


def test_what_deepspeed_has_replaced_meanwhile_stays() -> None:
    owner, copies, _ = copies_of(grads={"a": 1})
    new = {"b": 2}
    copies.enter()
    owner.grads = new
    copies.leave()
    assert owner.grads is new


def test_closed_while_deepspeed_is_at_work() -> None:
    owner, copies, _ = copies_of(grads={"a": 1})
    view = owner.grads
    copies.enter()
    assert copies.close() == []
    assert owner.grads is view, "for the patches to take back"
    owner.grads = view.data
    copies.leave()
    assert owner.grads is view.data, "and not put in place again"


# -- the detector ------------------------------------------------------------------------------------------------------


class Late:
    """An accelerator for which float64 stands for device memory, and no copy ever lands unless it is waited for."""

    def __init__(self) -> None:
        self.landed = False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.float64

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def current_stream(self) -> None:
        return None

    def Event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None, query=lambda: self.landed, synchronize=lambda: None)


def detected(do: Callable[[Late], Any]) -> list[tuple[str, str, int]]:
    told: list[tuple[str, str, int]] = []
    late = Late()
    detector = ReadDetector(lambda: late, lambda *what: told.append(what))
    try:
        do(late)
    finally:
        assert detector.stop() == []
    return told


def test_a_tensor_moved_by_to_is_in_flight() -> None:
    def do(late: Late) -> None:
        host = torch.ones(3, dtype=torch.float64).to(dtype=torch.float32, non_blocking=True)
        host.sum()

    ((reader, copier, size),) = detected(do)
    assert "in do" in reader
    assert "in do" in copier
    assert size == 12


def test_a_tensor_moved_by_a_blocking_to_is_not() -> None:
    assert detected(lambda late: torch.ones(3, dtype=torch.float64).to(dtype=torch.float32).sum()) == []


def test_copies_in_a_list_are_seen() -> None:
    def do(late: Late) -> None:
        host = torch.zeros(2)
        torch._foreach_copy_([host], [torch.ones(2, dtype=torch.float64)], non_blocking=True)
        host.sum()

    assert len(detected(do)) == 1


def test_what_has_landed_is_not_in_flight() -> None:
    def do(late: Late) -> None:
        host = torch.ones(3, dtype=torch.float64).to(dtype=torch.float32, non_blocking=True)
        late.landed = True
        host.sum()

    assert detected(do) == []


def test_each_pair_of_lines_is_told_once() -> None:
    def do(late: Late) -> None:
        for _ in range(3):
            torch.ones(3, dtype=torch.float64).to(dtype=torch.float32, non_blocking=True).sum()

    assert len(detected(do)) == 1
