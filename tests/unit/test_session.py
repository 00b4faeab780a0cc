"""The session: what it chooses, what findings and repairs lead to, what it gives back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroguard import (
    ConfigError,
    Finding,
    GuardConfig,
    GuardUnavailableError,
    GuardViolation,
    Repair,
    Session,
    SessionClosedError,
    load_config,
)
from zeroguard import attach as attach_module
from zeroguard import events as ev
from zeroguard import session as session_module
from zeroguard.backends.base import BackwardState, Done, EngineFacts, GradientAudit, ParamStatus, Switched, UpdateAudit
from zeroguard.collective import Votes
from zeroguard.config import GUARDS
from zeroguard.testing import ScriptedEngine, facts, replay

ZERO3 = EngineFacts(stage=3, dtype="bfloat16", deepspeed_version="0.19.8")
ZERO2 = EngineFacts(
    stage=2, offload_optimizer="cpu", pin_memory=True, accelerator="cuda", resolves_data_dependency=False
)


class FakeBackend:
    """The engine as guards see it, with answers that a test sets and a log of the repairs asked for."""

    def __init__(self, facts: EngineFacts = ZERO3) -> None:
        self.facts = facts
        self.groups: tuple[Any, ...] = ("data-parallel",)
        self.steps = 0
        self.busy = False
        self.status = ParamStatus()
        self.state = BackwardState()
        self.stale: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()
        self.answers: dict[str, list[Done]] = {}
        self.asked: list[str] = []

    def param_status(self, *, scan: bool = True) -> ParamStatus:
        return self.status

    def switched_parameters(self, *, every: bool = True) -> Switched:
        return Switched()

    def gradient_order(self) -> int:
        return 0

    def audit_gradients(self, elements: int, seed: int) -> GradientAudit:
        return GradientAudit()

    def audit_update(self) -> Callable[[], UpdateAudit]:
        return UpdateAudit

    def backward_state(self) -> BackwardState:
        return self.state

    def idle_parameters(self) -> tuple[str, ...]:
        return self.stale

    def stale_parameters(self) -> tuple[str, ...]:
        return self.stale

    def lost_parameters(self) -> tuple[str, ...]:
        return self.lost

    def __getattr__(self, name: str) -> Any:
        """Every repair of the protocol: remember that it was asked for, answer what the test has set."""
        if name.startswith("_"):
            raise AttributeError(name)

        def repair(*args: Any, **kwargs: Any) -> list[Done]:
            self.asked.append(name)
            return self.answers.get(name, [])

        return repair


class MemorySink:
    """Keeps the records and counts the closes."""

    def __init__(self) -> None:
        self.records: list[Finding | Repair] = []
        self.closed = 0

    def write(self, record: Finding | Repair) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


def opened(config: dict[str, Any] | None = None, backend: FakeBackend | None = None, **more: Any) -> Session:
    return Session(backend or FakeBackend(), load_config(config), **more)


def watching(**options: Any) -> dict[str, Any]:
    """A configuration in which param_status reports what is in flight as an error."""
    return {"guards": [{"name": "param_status", "action": "raise"}], **options}


IN_FLIGHT = ParamStatus(in_flight=("layer.weight",), registry=1)


def in_flight(config: dict[str, Any], times: int = 1, **more: Any) -> Session:
    """A session that has just seen a step after which a parameter was in flight."""
    backend = FakeBackend()
    session = opened(config, backend, **more)
    for step in range(1, times + 1):
        backend.status = IN_FLIGHT
        session.emit(ev.StepEnd(step, True))
    backend.status = ParamStatus()  # at rest again, so that closing the session finds nothing more
    return session


# -- what a finding leads to -----------------------------------------------------------------------------------------


def test_raise() -> None:
    sink = MemorySink()
    session = in_flight(watching(), sinks=[sink])
    assert [finding.kind for finding in session.findings] == ["in_flight"]
    with pytest.raises(GuardViolation) as caught:
        session.decide()
    assert caught.value.findings == tuple(session.findings)
    assert caught.value.ranks == (0,)
    assert caught.value.step == 1
    assert "layer.weight" in str(caught.value)
    assert sink.records == session.findings
    session.decide()  # a finding stops the run once
    assert len(session.findings) == 1


def test_raise_waits_for_the_fixed_point() -> None:
    """emit is where ranks see alone; only decide, which all of them reach, may raise."""
    session = in_flight(watching(), times=3)
    assert len(session.findings) == 3
    with pytest.raises(GuardViolation) as caught:
        session.decide()
    assert len(caught.value.findings) == 3


def test_raise_without_findings_does_nothing() -> None:
    session = opened(watching())
    session.emit(ev.StepEnd(1, True))
    session.decide()
    assert session.findings == []


def test_warn(caplog: pytest.LogCaptureFixture) -> None:
    sink = MemorySink()
    with caplog.at_level(logging.DEBUG, logger="zeroguard"):
        session = in_flight(watching(on_violation="warn"), sinks=[sink])
        session.decide()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "layer.weight" in caplog.text
    assert sink.records == session.findings


def test_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="zeroguard"):
        session = in_flight(watching(on_violation="record"))
        session.decide()
    assert caplog.records == []
    assert [finding.severity for finding in session.findings] == ["error"]


@pytest.mark.parametrize("choice", ["raise", "warn", "record"])
def test_a_warning_never_stops_the_run(choice: str) -> None:
    backend = FakeBackend()
    backend.status = IN_FLIGHT
    session = opened({"guards": [{"name": "param_status", "action": "warn"}], "on_violation": choice}, backend)
    session.emit(ev.StepEnd(1, True))
    session.decide()
    assert [finding.severity for finding in session.findings] == ["warning"]


def test_decisions_do_not_pile_up_under_warn() -> None:
    session = in_flight(watching(on_violation="warn"))
    session.decide()
    assert session._pending == []


def test_a_rank_follows_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, tuple[Any, ...]]] = []

    def vote(flag: bool, word: int, *, groups: tuple[Any, ...], device: str, broken: bool) -> Votes:
        asked.append((flag, groups))
        return Votes([1], {})

    monkeypatch.setattr(session_module, "vote", vote)
    session = opened(None, FakeBackend(EngineFacts(stage=3, world_size=2)))
    session.emit(ev.StepEnd(5, True))
    with pytest.raises(GuardViolation) as caught:
        session.decide()
    assert asked == [(False, ("data-parallel",))]
    assert caught.value.findings == ()
    assert caught.value.ranks == (1,)
    assert "rank(s) 1" in str(caught.value)
    assert "step 5" in str(caught.value)


@pytest.mark.parametrize("config", [{"agree": False}, {"on_violation": "warn"}, {"on_violation": "record"}], ids=str)
def test_no_communication_where_none_is_needed(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    def vote(*args: Any, **kwargs: Any) -> Votes:
        raise AssertionError("communicated")

    monkeypatch.setattr(session_module, "vote", vote)
    opened(config).decide()


def test_agreement_at_each_nth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []
    backend = FakeBackend(EngineFacts(stage=3, world_size=2))

    def vote(flag: bool, word: int, **_: Any) -> Votes:
        asked.append((backend.steps, flag))
        return Votes([0] if flag else [], {})

    monkeypatch.setattr(session_module, "vote", vote)
    session = opened(watching(agree_every_n_steps=3), backend)
    for backend.steps in range(1, 6):
        backend.status = IN_FLIGHT if backend.steps == 4 else ParamStatus()
        session.emit(ev.StepEnd(backend.steps, True))
        session.decide()
    backend.steps = 6
    with pytest.raises(GuardViolation) as caught:
        session.decide()
    assert asked == [(3, False), (6, True)]
    assert [finding.step for finding in caught.value.findings] == [4]


def test_one_rank_alone_does_not_wait_for_the_nth_step() -> None:
    session = in_flight(watching(agree_every_n_steps=3))
    session._backend.steps = 1
    with pytest.raises(GuardViolation):
        session.decide()


def test_agree_false_raises_alone() -> None:
    session = in_flight(watching(agree=False))
    with pytest.raises(GuardViolation):
        session.decide()


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_max_findings_bounds_the_list_while_the_count_goes_on() -> None:
    sink = MemorySink()
    session = in_flight(watching(on_violation="warn", max_findings=2), times=7, sinks=[sink])
    assert len(session.findings) == 2
    assert [row.findings for row in session.rows if row.guard == "param_status"] == [7]
    assert len(sink.records) == 7
    assert [finding.step for finding in session.findings] == [1, 2]


def test_max_findings_bounds_the_repairs_too() -> None:
    backend = FakeBackend()
    backend.answers["release_in_flight"] = [Done("gather_released", ("layer.weight",), "Waited for.")]
    session = opened({"guards": [{"name": "param_status"}], "max_findings": 3}, backend)
    for step in range(1, 6):
        backend.status = IN_FLIGHT
        session.emit(ev.StepEnd(step, True))
    assert len(session.repairs) == 3
    assert [row.repairs for row in session.rows if row.guard == "param_status"] == [5]


def test_repairs_carry_guard_rank_step_and_parameters() -> None:
    backend = FakeBackend(EngineFacts(stage=3, rank=2, world_size=4))
    backend.answers["release_in_flight"] = [
        Done("gather_released", ("layer.weight",), "Waited for."),
        Done("housekeeping", routine=True),
    ]
    session = opened({"guards": [{"name": "param_status"}]}, backend)
    backend.status = IN_FLIGHT
    session.emit(ev.StepEnd(9, True))
    assert backend.asked == ["release_in_flight"]
    assert session.repairs == [Repair("param_status", "gather_released", 2, 9, ("layer.weight",), "Waited for.")]


def test_events_reach_the_guards_in_their_order() -> None:
    """What prepares a backward comes before what reads its gradients, whatever the order in the configuration."""
    backend = FakeBackend(EngineFacts(stage=2))
    session = opened({"guards": [{"name": "accumulator_reset"}, {"name": "retained_graph"}]}, backend)
    assert session.selection.selected == ["retained_graph", "accumulator_reset"]
    session.emit(ev.BackwardBegin(2, "engine.backward", again=1, after_boundary=True))
    assert backend.asked == ["rearm_backward", "carry"]


# -- choosing --------------------------------------------------------------------------------------------------------


def test_selection_texts() -> None:
    session = opened()
    assert list(session.selection) == list(GUARDS)
    assert session.selection.selected == [
        "retained_graph",
        "accumulator_reset",
        "param_status",
        "accumulation",
        "gradient_audit",
    ]
    lines = str(session.selection).splitlines()
    assert lines[0] == "- host_read: ZeRO-3, bfloat16, 1 rank has no gradients in host memory"
    assert [line.split(":")[0] for line in lines[1:]] == [f"+ {name}" for name in session.selection.selected]
    assert all(why for why in session.selection.values())


def test_a_guard_that_communicates_needs_ranks_that_agree() -> None:
    two = facts(stage=2, world_size=2)
    session = replay([], config={"agree": False}, engine=ScriptedEngine(two))
    assert "gradient_audit" not in session.selection.selected
    assert session.selection["gradient_audit"] == "on several ranks it needs an all-reduce, and agree is false"
    with pytest.raises(GuardUnavailableError, match=r"gradient_audit.*agree is false"):
        replay([], guards=["gradient_audit"], config={"agree": False}, engine=ScriptedEngine(two))
    alone = replay([], config={"agree": False}, engine=ScriptedEngine(facts(stage=2)))
    assert "gradient_audit" in alone.selection.selected


def test_selection_says_what_was_left_out_of_the_list() -> None:
    session = opened({"guards": [{"name": "param_status"}]})
    assert session.selection.selected == ["param_status"]
    assert session.selection["retained_graph"] == "not in the configured list"


def test_options_beside_the_automatic_choice() -> None:
    guards = [{"name": "automatic"}, {"name": "accumulation", "action": "repair"}, {"name": "host_read"}]
    session = opened({"guards": guards})
    assert session.selection.selected == [
        "retained_graph",
        "accumulator_reset",
        "param_status",
        "accumulation",
        "gradient_audit",
    ]
    assert "no gradients in host memory" in session.selection["host_read"], "options only: no mistake"
    (accumulation,) = (guard for guard in session._guards if guard.name == "accumulation")
    assert accumulation.config.action == "repair"


def test_an_empty_list_runs_nothing() -> None:
    session = opened({"guards": []})
    assert session.selection.selected == []
    session.emit(ev.StepEnd(1, True))
    session.decide()
    assert {row.verdict for row in session.rows} == {"off"}


def test_selection_of_an_offloaded_engine() -> None:
    session = opened(None, FakeBackend(ZERO2))
    assert session.selection.selected == [
        "host_read",
        "retained_graph",
        "accumulator_reset",
        "accumulation",
        "gradient_audit",
    ]
    assert "ZeRO-2" in session.selection["param_status"]
    assert "(pinned)" in session.selection["host_read"]


def test_not_needed_is_no_mistake_even_when_asked_for_by_name() -> None:
    backend = FakeBackend(EngineFacts(stage=2, offload_optimizer="cpu"))
    session = opened({"guards": [{"name": "host_read"}]}, backend)
    assert session.selection.selected == []
    assert "resolves data dependencies" in session.selection["host_read"]
    assert [row.verdict for row in session.rows if row.guard == "host_read"] == ["not needed"]


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (ZERO2, "param_status", "ZeRO-2 does not partition parameters"),
        (ZERO3, "host_read", "has no gradients in host memory"),
        (EngineFacts(stage=0), "accumulator_reset", "stage 0 accumulates in .grad"),
        (EngineFacts(stage=0, dtype="float16"), "retained_graph", "no backward state"),
    ],
)
def test_not_applicable_by_name_is_an_error(facts: EngineFacts, name: str, reason: str) -> None:
    with pytest.raises(GuardUnavailableError) as caught:
        opened({"guards": [{"name": name}]}, FakeBackend(facts))
    assert caught.value.guard == name
    assert caught.value.missing == ()
    assert repr(name) in str(caught.value)
    assert reason in str(caught.value)


def test_unavailable_guards_do_not_run_and_say_why() -> None:
    session = opened(unavailable={"param_status": "missing module.ds_inflight_param_registry"})
    assert "param_status" not in session.selection.selected
    assert session.selection["param_status"] == "missing module.ds_inflight_param_registry"
    row = next(row for row in session.rows if row.guard == "param_status")
    assert (row.verdict, row.note) == ("unavailable", "missing module.ds_inflight_param_registry")


class FakeDoor:
    """The part of zeroguard.backends.deepspeed that says what is missing: everything of param_status."""

    VERIFIED = ("0.19.8",)

    class Gone:
        owner, name, lost = "module", "ds_inflight_param_registry", "running gathers are not seen"

    def missing(self, engine: Any, guard: str, **where: Any) -> list[Any]:
        return [self.Gone()] if guard == "param_status" else []

    def cannot_guard(self, engine: Any) -> str:
        return ""


def test_on_unavailable_raise_names_guard_and_attribute() -> None:
    with pytest.raises(GuardUnavailableError) as caught:
        attach_module._unavailable(FakeDoor(), object(), ZERO3, GuardConfig())
    assert caught.value.guard == "param_status"
    assert caught.value.missing == ("module.ds_inflight_param_registry",)
    assert "module.ds_inflight_param_registry" in str(caught.value)
    assert "0.19.8" in str(caught.value)


def test_on_unavailable_warn_warns() -> None:
    """A guard that does not run is unavailable loudly, never a silent no-op."""
    with pytest.warns(UserWarning, match="ds_inflight_param_registry"):
        out = attach_module._unavailable(FakeDoor(), object(), ZERO3, GuardConfig(on_unavailable="warn"))
    assert list(out) == ["param_status"]


def test_on_unavailable_does_not_ask_for_guards_that_are_not_wanted() -> None:
    config = GuardConfig(guards=())
    assert attach_module._unavailable(FakeDoor(), object(), ZERO3, config) == {}
    assert attach_module._unavailable(FakeDoor(), object(), ZERO2, GuardConfig()) == {}


# -- summary ---------------------------------------------------------------------------------------------------------


def test_summary_tells_never_exercised_from_passed() -> None:
    session = opened()
    verdicts = {row.guard: row.verdict for row in session.rows}
    assert verdicts == {
        "host_read": "not applicable",
        "retained_graph": "never exercised",
        "accumulator_reset": "never exercised",
        "param_status": "never exercised",
        "accumulation": "never exercised",
        "gradient_audit": "never exercised",
    }
    session.emit(ev.ForwardBegin(1, True, True))
    verdicts = {row.guard: row.verdict for row in session.rows}
    assert verdicts["param_status"] == "passed"
    assert verdicts["retained_graph"] == "never exercised"
    text = str(session.summary())
    assert "passed" in text
    assert "never exercised" in text


def test_summary_says_findings_and_repaired() -> None:
    session = in_flight(watching(on_violation="record"))
    assert [row.verdict for row in session.rows if row.guard == "param_status"] == ["findings"]
    backend = FakeBackend()
    backend.status = IN_FLIGHT
    backend.answers["release_in_flight"] = [Done("gather_released", ("layer.weight",))]
    session = opened({"guards": [{"name": "param_status"}]}, backend)
    session.emit(ev.StepEnd(1, True))
    assert [row.verdict for row in session.rows if row.guard == "param_status"] == ["repaired"]


def test_summary_text() -> None:
    text = str(opened().summary())
    lines = text.splitlines()
    assert lines[0] == "zeroguard, rank 0: ZeRO-3, bfloat16, 1 rank, DeepSpeed 0.19.8"
    assert lines[1].split() == ["guard", "verdict", "events", "checks", "repairs", "findings", "time"]
    assert text.endswith("host_read: ZeRO-3, bfloat16, 1 rank has no gradients in host memory")


def test_summary_counts_events_and_checks() -> None:
    session = opened()
    session.emit(ev.ForwardBegin(1, True, True))
    session.emit(ev.ForwardBegin(2, True, True, nested=True))
    row = next(row for row in session.rows if row.guard == "param_status")
    assert (row.events, row.checks) == (2, 1)


# -- host_read and the phases ----------------------------------------------------------------------------------------


def test_host_read_waits_in_the_call_and_is_a_context_manager() -> None:
    backend = FakeBackend(ZERO2)
    session = opened(None, backend)
    session.host_read()
    assert backend.asked == ["wait_copies"]
    with session.host_read(object()):
        assert backend.asked == ["wait_copies"] * 2


def test_host_read_returns_at_once_where_it_is_not_needed() -> None:
    backend = FakeBackend(ZERO3)
    opened({"guards": []}, backend).host_read()
    assert backend.asked == []


def test_host_read_after_close_raises() -> None:
    backend = FakeBackend(ZERO2)
    session = opened(None, backend)
    session.close()
    with pytest.raises(SessionClosedError, match="host_read"):
        session.host_read()
    assert backend.asked == []


def test_phases_follow_the_events() -> None:
    session = opened()
    assert session.phase is ev.Phase.BETWEEN
    for event, phase in (
        (ev.ForwardBegin(1, True, True), ev.Phase.FORWARD),
        (ev.ForwardEnd(1), ev.Phase.BETWEEN),
        (ev.BackwardBegin(1, "loss.backward"), ev.Phase.BACKWARD),
        (ev.GraphReached(1, 1, 0), ev.Phase.BACKWARD),
        (ev.BackwardEnd(1, True), ev.Phase.BETWEEN),
        (ev.StepBegin(0, 1), ev.Phase.STEP),
        (ev.StepEnd(1, True), ev.Phase.BETWEEN),
        (ev.BackwardBegin(2, "engine.backward"), ev.Phase.BACKWARD),
        (ev.BackwardAborted(2, "ValueError: boom"), ev.Phase.BETWEEN),
        (ev.Raised(ev.Phase.BACKWARD, "ValueError: boom"), ev.Phase.BACKWARD),
        (ev.Close(False), ev.Phase.CLOSED),
    ):
        session.emit(event)
        assert session.phase is phase


# -- closing ---------------------------------------------------------------------------------------------------------


def test_close_is_idempotent() -> None:
    sink, undone = MemorySink(), []
    session = opened(sinks=[sink])
    session._on_close += [lambda: undone.append("first"), lambda: undone.append("second")]
    session.close()
    session.close()
    assert session.closed
    assert undone == ["second", "first"]
    assert sink.closed == 1
    assert session.phase is ev.Phase.CLOSED


def test_with_closes_and_lets_the_exception_through() -> None:
    sink = MemorySink()
    session = opened(sinks=[sink])
    assert session.__enter__() is session
    with pytest.raises(KeyError, match="theirs"), session:
        raise KeyError("theirs")
    assert session.closed
    assert sink.closed == 1


@pytest.mark.parametrize(("failed", "looked"), [(False, 1), (True, 0)])
def test_nothing_is_waited_for_after_an_exception(failed: bool, looked: int) -> None:
    backend = FakeBackend()
    session = opened({"guards": [{"name": "param_status"}]}, backend)
    backend.status = IN_FLIGHT
    session.__exit__(KeyError if failed else None, None, None)
    assert backend.asked == ["release_in_flight"] * looked


def test_enter_on_a_closed_session_raises() -> None:
    session = opened()
    session.close()
    with pytest.raises(SessionClosedError, match="closed"), session:
        pass


@pytest.mark.parametrize("config", [{"on_guard_error": "raise"}, {"on_guard_error": "disable"}], ids=str)
def test_what_was_wrapped_goes_back_even_if_a_guard_fails_at_close(config: dict[str, Any]) -> None:
    class Broken(FakeBackend):
        def param_status(self, *, scan: bool = True) -> ParamStatus:
            raise RuntimeError("foreign")

    sink, undone = MemorySink(), []
    session = opened(config, Broken(), sinks=[sink])
    session._on_close.append(lambda: undone.append("undone"))
    if config["on_guard_error"] == "raise":
        with pytest.raises(RuntimeError, match="foreign"):
            session.close()
    else:
        session.close()
        assert [finding.kind for finding in session.findings] == ["guard_error"]
    assert undone == ["undone"]
    assert sink.closed == 1


def test_one_failing_undo_does_not_keep_the_others_from_running() -> None:
    """Such as the warning about a wrapper left alone, under "python -W error": the engine must not stay marked."""

    def fails() -> None:
        raise UserWarning("as an error")

    sink, undone = MemorySink(), []
    session = opened(sinks=[sink])
    session._on_close += [lambda: undone.append("mark"), fails]
    with pytest.raises(UserWarning, match="as an error"):
        session.close()
    assert undone == ["mark"]
    assert sink.closed == 1


def test_repr_and_iteration() -> None:
    session = in_flight(watching(on_violation="record"))
    assert repr(session) == "<zeroguard.Session open, 1 findings, 0 repairs>"
    assert list(session) == session.findings
    session.close()
    assert "closed" in repr(session)


# -- sinks -----------------------------------------------------------------------------------------------------------


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_json_lines_sink_writes_whole_lines_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    config = watching(on_violation="warn", sinks=[{"name": "jsonl", "directory": str(folder)}])
    session = in_flight(config, times=3)
    # Before close: a process that is killed now leaves these three lines and no half one.
    text = (folder / "rank-0.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert text.count("\n") == 3
    assert lines_of(folder) == [{"record": "finding", **finding.to_dict()} for finding in session.findings]
    session.close()
    assert len(lines_of(folder)) == 3


def test_json_lines_sink_has_repairs_and_one_file_a_rank(tmp_path: Path) -> None:
    backend = FakeBackend(EngineFacts(stage=3, rank=5, world_size=8))
    backend.status = IN_FLIGHT
    backend.answers["release_in_flight"] = [Done("gather_released", ("läyer\n.weight",), "Waited for.")]
    config = {"guards": [{"name": "param_status"}], "sinks": [{"name": "jsonl", "directory": str(tmp_path)}]}
    session = opened(config, backend)
    session.emit(ev.ForwardBegin(1, True, True))
    backend.status = ParamStatus()
    session.close()
    (line,) = lines_of(tmp_path, rank=5)
    assert line == {"record": "repair", **session.repairs[0].to_dict()}
    assert line["parameters"] == ["läyer\n.weight"]


def test_json_lines_sink_appends(tmp_path: Path) -> None:
    config = watching(on_violation="warn", sinks=[{"name": "jsonl", "directory": str(tmp_path)}])
    for _ in range(2):
        in_flight(config).close()
    assert len(lines_of(tmp_path)) == 2


def test_logging_sink_logs_repairs_only_on_request(caplog: pytest.LogCaptureFixture) -> None:
    for repairs, expected in ((False, []), (True, [logging.DEBUG])):
        caplog.clear()
        backend = FakeBackend()
        backend.status = IN_FLIGHT
        backend.answers["release_in_flight"] = [Done("gather_released", ("layer.weight",))]
        config = {"guards": [{"name": "param_status"}], "sinks": [{"name": "logging", "repairs": repairs}]}
        with caplog.at_level(logging.DEBUG, logger="zeroguard"):
            opened(config, backend).emit(ev.StepEnd(1, True))
        assert [record.levelno for record in caplog.records] == expected


def test_a_function_is_a_sink() -> None:
    got: list[Finding | Repair] = []
    session = in_flight(watching(on_violation="warn"), sinks=[got.append])
    session.close()
    assert got == session.findings


@pytest.mark.parametrize("item", [3, "runs/guard", None, object()], ids=["int", "str", "None", "object"])
def test_what_is_no_sink_is_refused(item: object) -> None:
    with pytest.raises(ConfigError, match="is no sink") as caught:
        opened(sinks=[item])
    assert repr(item) in str(caught.value)
    assert type(item).__name__ in str(caught.value)


def test_a_refused_sink_leaves_no_file_behind(tmp_path: Path) -> None:
    config = {"sinks": [{"name": "jsonl", "directory": str(tmp_path / "runs")}]}
    with pytest.raises(ConfigError):
        opened(config, sinks=[3])
    assert not (tmp_path / "runs").exists()
