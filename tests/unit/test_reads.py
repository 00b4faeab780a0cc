"""Gradient norms and whole gradients as a session tells them, on a scripted engine."""

from __future__ import annotations

import ast
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest

import zeroguard
from zeroguard import ConfigError, GradientsUnavailableError, Session, SessionClosedError, load_config
from zeroguard.integrations.base import Keeper
from zeroguard.report.gradients import grouped
from zeroguard.testing import ScriptedEngine

NORMS = {"gain": 1.0, "net.a.weight": 3.0, "net.a.bias": 4.0, "net.b.weight": 12.0}


def session_on(norms: dict[str, float] | None = NORMS) -> Session:
    return Session(ScriptedEngine(norms=norms), load_config({"sinks": []}))


def test_total_is_the_norm_over_everything() -> None:
    assert session_on().grad_norms() == pytest.approx(math.sqrt(1 + 9 + 16 + 144))


def test_by_parameter_and_by_module() -> None:
    session = session_on()
    assert session.grad_norms(per="parameter") == NORMS
    # The root module holds "gain" itself; its children's parameters are not its own.
    assert session.grad_norms(per="module") == pytest.approx({"": 1.0, "net.a": 5.0, "net.b": 12.0})


def test_what_is_not_finite_stays_visible() -> None:
    norms = {"a.w": math.inf, "b.w": math.nan, "c.w": 1.0}
    assert grouped(norms, "module")["a"] == math.inf
    assert math.isnan(grouped(norms, "module")["b"])
    assert not math.isfinite(grouped(norms, "total")["total"])


@pytest.mark.parametrize("call", ["grad_norms", "gradients"])
def test_refused_where_there_is_nothing_to_read(call: str) -> None:
    with pytest.raises(GradientsUnavailableError, match="scripted"):
        getattr(session_on(None), call)()


@pytest.mark.parametrize("call", ["grad_norms", "gradients", "watch_norms"])
def test_refused_after_close(call: str) -> None:
    session = session_on()
    session.close()
    with pytest.raises(SessionClosedError, match=rf"session.{call}\(\) after close"):
        getattr(session, call)()


def test_the_error_is_public_and_survives_a_process_boundary() -> None:
    assert issubclass(zeroguard.GradientsUnavailableError, zeroguard.ZeroGuardError)
    assert str(pickle.loads(pickle.dumps(GradientsUnavailableError("no backward")))) == "no backward"


@pytest.mark.parametrize("per", ["layer", "", "none"])
def test_per_is_checked_before_anything_is_communicated(per: Any) -> None:
    with pytest.raises(ConfigError, match="'total', 'parameter', 'module'"):
        session_on(None).grad_norms(per)


@pytest.mark.parametrize("every", [0, -1])
def test_every_n_steps_is_checked(every: int) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        session_on().watch_norms(every_n_steps=every)


# -- watching --------------------------------------------------------------------------------------------------------


def test_nothing_is_read_unless_asked_for() -> None:
    session = session_on(None)
    session.before_step()
    assert session.last_grad_norms == {}


def test_watch_reads_before_each_step() -> None:
    session = session_on()
    session.watch_norms("module")
    session.before_step()
    assert session.last_grad_norms == pytest.approx({"": 1.0, "net.a": 5.0, "net.b": 12.0})
    session.watch_norms("total")
    assert session.last_grad_norms == {}
    session.before_step()
    assert session.last_grad_norms == pytest.approx({"total": math.sqrt(170)})


def test_watch_keeps_the_last_of_every_nth_step() -> None:
    session = session_on()
    engine: Any = session._backend
    session.watch_norms("parameter", every_n_steps=2)
    seen = []
    for step in range(4):
        engine.steps, engine.norms = step, {"w": float(step)}
        session.before_step()
        seen.append(session.last_grad_norms["w"])
    assert seen == [0.0, 0.0, 2.0, 2.0]


def test_watch_says_once_why_nothing_could_be_read() -> None:
    session = session_on()
    session.watch_norms()
    session.before_step()
    engine: Any = session._backend
    engine.norms = None
    with pytest.warns(UserWarning, match="no gradient norms before step 0: scripted"):
        session.before_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.before_step()
    assert session.last_grad_norms == {}, "an old norm must not pass for a new one"


def test_watch_ends() -> None:
    session = session_on()
    session.watch_norms()
    session.watch_norms(None)
    session.before_step()
    assert session.last_grad_norms == {}
    session.watch_norms()
    session.close()
    session.before_step()
    assert session.last_grad_norms == {}


# -- for the trainers' loggers ---------------------------------------------------------------------------------------


def keeper_with(session: Session, **options: Any) -> Keeper:
    keeper = Keeper({"sinks": []}, **options)
    keeper.session = session
    return keeper


def test_metrics_hold_the_watched_norms() -> None:
    session = session_on()
    keeper = keeper_with(session, grad_norms="module")
    session.watch_norms("module")
    session.before_step()
    metrics = keeper.metrics()
    assert metrics["zeroguard/grad_norm/net.a"] == 5.0
    assert metrics["zeroguard/grad_norm/(root)"] == 1.0
    assert "zeroguard/grad_norm" not in metrics


def test_metrics_hold_none_unless_asked_for() -> None:
    session = session_on()
    session.watch_norms()
    session.before_step()
    assert not [key for key in keeper_with(session).metrics() if "grad_norm" in key]


def test_the_keeper_checks_its_argument_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="'total', 'parameter', 'module'"):
        Keeper(grad_norms="layers")


def test_the_keeper_gives_the_norms_of_a_step_once() -> None:
    session = session_on()
    keeper = keeper_with(session, grad_norms="total")
    session.watch_norms(when=lambda step: step != 1)
    engine: Any = session._backend
    seen = []
    for engine.steps in range(3):
        session.before_step()
        seen += [len(keeper.new_norms()), len(keeper.new_norms())]
    assert seen == [1, 0, 0, 0, 1, 0]
    assert set(keeper.metrics()) >= {"zeroguard/grad_norm/total"}, "the newest stay readable"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grad_norms": "total", "grad_norms_every_n_steps": 0}, "every_n_steps=0: 1 or more"),
        ({"grad_norms_every_n_steps": 5}, "give grad_norms='total', too"),
    ],
)
def test_the_keeper_checks_the_rhythm(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Keeper(**options)


def test_the_pieces_are_found_without_communication() -> None:
    """The pieces are LOCAL: the file that finds them imports nothing that communicates."""
    file = Path(zeroguard.__file__).parent / "backends" / "deepspeed" / "pieces.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "zeroguard.collective" not in imported
