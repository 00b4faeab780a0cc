"""Patches: what is wrapped goes back, in reverse order, and nobody else's change is undone."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from zeroguard.backends.deepspeed.wrapping import Patches


class Thing:
    """Something foreign with a method, a class attribute and an instance attribute."""

    shared = "class"

    def __init__(self) -> None:
        self.own = ["instance"]

    def greet(self, name: str, *, loud: bool = False) -> str:
        """Say something."""
        return name.upper() if loud else name


def tagging(tag: str) -> Any:
    """A maker of wrappers that put ``tag`` around the result."""

    def make(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> str:
            return f"{tag}({original(*args, **kwargs)})"

        return wrapped

    return make


class Handle:
    """A torch hook handle, as far as Patches goes."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def remove(self) -> None:
        self.log.append(self.name)


def test_method_is_wrapped_on_the_instance_alone() -> None:
    thing, other = Thing(), Thing()
    Patches().method(thing, "greet", tagging("a"))
    assert thing.greet("x") == "a(x)"
    assert other.greet("x") == "x"
    assert "greet" not in vars(other)


def test_undo_leaves_no_trace_of_a_wrapped_method() -> None:
    thing = Thing()
    before = dict(vars(thing))
    patches = Patches()
    patches.method(thing, "greet", tagging("a"))
    assert patches.undo() == []
    assert vars(thing) == before
    assert thing.greet.__func__ is Thing.greet
    assert not patches.live


def test_an_instance_attribute_comes_back_as_the_same_object() -> None:
    thing = Thing()
    own = thing.own
    patches = Patches()
    patches.attribute(thing, "own", ["ours"])
    assert thing.own == ["ours"]
    patches.undo()
    assert thing.own is own


def test_a_method_that_sat_on_the_instance_comes_back_as_the_same_object() -> None:
    thing = Thing()
    theirs = lambda name: f"theirs({name})"  # noqa: E731
    thing.greet = theirs  # type: ignore[method-assign]
    patches = Patches()
    patches.method(thing, "greet", tagging("a"))
    assert thing.greet("x") == "a(theirs(x))"
    patches.undo()
    assert vars(thing)["greet"] is theirs


def test_a_class_attribute_shows_through_again() -> None:
    thing = Thing()
    patches = Patches()
    patches.attribute(thing, "shared", "ours")
    assert (thing.shared, Thing.shared) == ("ours", "class")
    patches.undo()
    assert "shared" not in vars(thing)
    assert thing.shared == "class"


def test_an_attribute_that_holds_none_is_no_absent_one() -> None:
    thing = Thing()
    thing.maybe = None  # type: ignore[attr-defined]
    patches = Patches()
    patches.attribute(thing, "maybe", 1)
    patches.undo()
    assert vars(thing)["maybe"] is None


def test_undo_goes_in_reverse_order() -> None:
    thing = Thing()
    before = dict(vars(thing))
    patches = Patches()
    patches.method(thing, "greet", tagging("first"))
    patches.method(thing, "greet", tagging("second"))
    assert thing.greet("x") == "second(first(x))"
    # Only the reverse order finds its own wrapper in place each time.
    assert patches.undo() == []
    assert vars(thing) == before


def test_hooks_are_removed_in_reverse_order() -> None:
    log: list[str] = []
    patches = Patches()
    for name in ("one", "two", "three"):
        patches.hook(Handle(log, name))
    patches.undo()
    assert log == ["three", "two", "one"]


def test_undo_twice_does_nothing() -> None:
    thing, log = Thing(), []
    patches = Patches()
    patches.method(thing, "greet", tagging("a"))
    patches.hook(Handle(log, "one"))
    patches.undo()
    thing.greet = "somebody's"  # type: ignore[method-assign, assignment]
    assert patches.undo() == []
    assert thing.greet == "somebody's"
    assert log == ["one"]


def test_a_wrapper_that_somebody_kept_calls_through_after_undo() -> None:
    thing = Thing()
    patches = Patches()
    patches.method(thing, "greet", tagging("a"))
    kept = thing.greet
    assert kept("x") == "a(x)"
    patches.undo()
    assert kept("x") == "x"
    assert kept("x", loud=True) == "X"


def test_somebody_elses_later_wrapper_is_left_alone_and_reported() -> None:
    thing = Thing()
    patches = Patches()
    patches.method(thing, "greet", tagging("a"))
    ours = thing.greet
    theirs = tagging("theirs")(ours)
    thing.greet = theirs  # type: ignore[method-assign]
    assert thing.greet("x") == "theirs(a(x))"
    assert patches.undo() == ["Thing.greet"]
    assert vars(thing)["greet"] is theirs
    # Our part of their chain is still called, and adds nothing.
    assert thing.greet("x") == "theirs(x)"


def test_what_somebody_deleted_is_reported_and_not_brought_back() -> None:
    thing = Thing()
    patches = Patches()
    patches.method(thing, "greet", tagging("a"))
    del thing.greet
    assert patches.undo() == ["Thing.greet"]
    assert "greet" not in vars(thing)


def test_one_replaced_attribute_does_not_keep_the_others_from_going_back() -> None:
    thing = Thing()
    own = thing.own
    patches = Patches()
    patches.attribute(thing, "own", ["ours"])
    patches.method(thing, "greet", tagging("a"))
    thing.greet = lambda name: name  # type: ignore[method-assign]
    assert patches.undo() == ["Thing.greet"]
    assert thing.own is own


def test_signature_name_and_docstring_are_kept() -> None:
    thing = Thing()
    signature = inspect.signature(thing.greet)
    Patches().method(thing, "greet", tagging("a"))
    assert inspect.signature(thing.greet) == signature
    assert list(inspect.signature(thing.greet).parameters) == ["name", "loud"]
    assert thing.greet.__name__ == "greet"
    assert thing.greet.__doc__ == "Say something."


def test_exceptions_pass_through_the_wrapper() -> None:
    class Raises:
        def go(self) -> None:
            raise KeyError("theirs")

    obj = Raises()
    patches = Patches()
    patches.method(obj, "go", tagging("a"))
    for _ in range(2):
        with pytest.raises(KeyError, match="theirs"):
            obj.go()
        patches.undo()


def test_one_function_serves_many_objects() -> None:
    """Its wrapper looks like the original, and is copied, pickled and taken back as the other one is."""

    def read(original: Any, *args: Any, **kwargs: Any) -> str:
        return f"read({original(*args, **kwargs)})"

    patches, things = Patches(), [Thing(), Thing()]
    before = [dict(vars(thing)) for thing in things]
    for thing in things:
        patches.shared(thing, "greet", read)
    assert [thing.greet("x", loud=True) for thing in things] == ["read(X)"] * 2
    wrapper = things[0].greet
    assert inspect.signature(wrapper) == inspect.signature(Thing().greet)
    assert (wrapper.__name__, wrapper.__qualname__) == ("greet", "Thing.greet")
    assert wrapper.__self__ is things[0]
    assert copy.deepcopy(things[0]).greet("x") == "x"
    assert pickle.loads(pickle.dumps(things[0])).greet("x") == "x"
    assert patches.undo() == []
    assert [vars(thing) for thing in things] == before
    assert wrapper("x") == "x"
