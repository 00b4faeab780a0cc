"""A guard or a sink that breaks does not break training, and says so."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_session import IN_FLIGHT, FakeBackend, MemorySink, in_flight, lines_of, opened, watching
from zeroguard import Finding, GuardConfig, Repair, Session, lanes
from zeroguard import events as ev
from zeroguard import session as session_module
from zeroguard.backends.base import EngineFacts, ParamStatus
from zeroguard.collective import Votes
from zeroguard.findings import Finding as Record
from zeroguard.guards.param_status import ParamStatusGuard
from zeroguard.sinks import JsonLinesSink, JsonLinesSinkConfig

RECORD = Record("param_status", "in_flight", "warning", 0, 1, ("w",), "e", "s", "c", "r")


class Breaks(FakeBackend):
    """An engine whose parameter status cannot be read."""

    def param_status(self, *, scan: bool = True) -> ParamStatus:
        raise KeyError("ds_status")


def kinds(session: Session) -> list[tuple[str, str]]:
    return [(finding.guard, finding.kind) for finding in session.findings]


# -- guards ----------------------------------------------------------------------------------------------------------


def test_a_guard_that_raises_is_said_and_switched_off_at_the_end_of_the_step(caplog: pytest.LogCaptureFixture) -> None:
    backend = Breaks()
    session = opened({"guards": [{"name": "automatic"}]}, backend)
    session.emit(ev.StepEnd(1, True))
    session.emit(ev.ForwardBegin(2, True, True))
    (finding,) = session.findings  # once
    assert (finding.guard, finding.kind, finding.severity) == ("param_status", "guard_error", "warning")
    assert finding.seen == "KeyError: 'ds_status', in StepEnd"
    assert 'raise KeyError("ds_status")' in finding.detail
    assert "test_breakage.py" in finding.detail
    assert "Traceback" in caplog.text
    assert backend.asked.count("switch_off") == 0
    session.decide()
    assert backend.asked.count("switch_off") == 1
    before = session.summary().rows
    session.emit(ev.StepEnd(2, True))
    row = {row.guard: row for row in session.summary().rows}["param_status"]
    assert row.verdict == "broken"
    assert "switched off after step 0: rank 0: KeyError: 'ds_status', in StepEnd" in row.note
    assert row.events == {row.guard: row for row in before}["param_status"].events
    others = {row.guard: row.events for row in session.rows if row.guard == "retained_graph"}
    assert others["retained_graph"] > 0
    session.close()
    assert kinds(session) == [("param_status", "guard_error")]


def test_raise_lets_it_through() -> None:
    session = opened({"on_guard_error": "raise"}, Breaks())
    with pytest.raises(KeyError, match="ds_status"):
        session.emit(ev.StepEnd(1, True))


def test_an_interrupt_is_no_breakage() -> None:
    class Interrupted(FakeBackend):
        def param_status(self, *, scan: bool = True) -> ParamStatus:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(None, Interrupted()).emit(ev.StepEnd(1, True))


def test_another_rank_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "vote", lambda *a, **k: Votes([], {}, True))
    said = {0: {}, 1: {"param_status": "KeyError: 'x', in StepEnd"}}
    monkeypatch.setattr("zeroguard.breakage.unite", lambda mine, groups: said)
    session = opened(None, FakeBackend(EngineFacts(stage=3, world_size=2)))
    session.decide()
    (finding,) = session.findings
    assert (finding.guard, finding.kind) == ("param_status", "guard_switched_off")
    assert finding.seen == "rank 1: KeyError: 'x', in StepEnd"
    assert {row.guard: row.verdict for row in session.rows}["param_status"] == "broken"


def test_fingerprints_and_their_comparison_are_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise ValueError("odd")

    session = opened(None, FakeBackend(EngineFacts(stage=2, world_size=2)))
    guard_ = next(guard_ for guard_ in session._guards if guard_.name == "accumulation")
    monkeypatch.setattr(type(guard_), "differs", broken)
    monkeypatch.setattr(session_module, "vote", lambda *a, **k: Votes([], {0: 3, 1: 4}))
    session.decide()
    assert kinds(session) == [(guard_.name, "guard_error")]
    monkeypatch.setattr(type(guard_), "fingerprint", broken)
    session.decide()


def test_what_others_wait_for_is_done_although_the_handler_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroguard.guards.accumulator_reset import AccumulatorResetGuard
    from zeroguard.guards.gradient_audit import GradientAuditGuard

    def broken(self: Any, event: ev.Event) -> Any:
        raise ValueError("odd")
        yield

    monkeypatch.setattr(AccumulatorResetGuard, "_reduce", broken)
    monkeypatch.setattr(GradientAuditGuard, "_step_begin", broken)
    audits: list[tuple[int, int]] = []

    class Engine(FakeBackend):
        def audit_gradients(self, elements: int, seed: int) -> Any:
            audits.append((elements, seed))
            return super().audit_gradients(elements, seed)

    backend = Engine(EngineFacts(stage=1, overlap_comm=True, world_size=2))
    guards = [{"name": "accumulator_reset"}, {"name": "gradient_audit"}]
    session = opened({"guards": guards, "on_violation": "warn"}, backend)
    for step in (1, 2):
        session.emit(ev.BackwardReduce(step, True))
        assert backend.asked.count("flush_pending") == step
        session.emit(ev.StepBegin(step - 1, 1))
        session.emit(ev.StepEnd(step, True))
        session.decide()
        assert len(audits) == step  # nothing is agreed on here, so both stay
    assert sorted(kinds(session)) == [("accumulator_reset", "guard_error"), ("gradient_audit", "guard_error")]


def test_host_read_waits_although_its_guard_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroguard.guards.host_read import HostReadGuard

    def broken(self: Any, event: ev.Event) -> Any:
        raise ValueError("odd")

    monkeypatch.setattr(HostReadGuard, "_read", broken)
    facts = EngineFacts(stage=2, offload_optimizer="cpu", accelerator="cuda", resolves_data_dependency=False)
    backend = FakeBackend(facts)
    session = opened(None, backend)
    session.host_read()
    session.decide()
    session.host_read()
    assert backend.asked.count("wait_copies") == 2
    assert ("host_read", "guard_error") in kinds(session)


# -- sinks -----------------------------------------------------------------------------------------------------------


class Raising(MemorySink):
    def write(self, record: Finding | Repair) -> None:
        super().write(record)
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("same_thread", [True, False])
def test_a_sink_that_raises_is_said_and_the_others_go_on(same_thread: bool) -> None:
    bad, good = Raising(), MemorySink()
    bad.same_thread = same_thread  # type: ignore[attr-defined]
    session = in_flight(watching(on_violation="warn"), times=3, sinks=[bad, good])
    assert len(bad.records) == 1
    assert [r.kind for r in good.records if r.kind != "sink_error"] == [
        f.kind for f in session.findings if f.guard != "sinks"
    ]
    error = next(f for f in session.findings if f.guard == "sinks")
    assert "No space left on device" in error.seen
    assert "Traceback" in error.detail
    assert error in good.records
    row = {row.guard: row for row in session.rows}["sinks"]
    assert "4 record(s) not written" in row.note  # three findings, and the one about the sink
    session.close()
    assert good.closed == 1


def test_a_sink_that_raises_comes_through_on_request() -> None:
    with pytest.raises(OSError, match="No space"):
        in_flight(watching(on_violation="warn", on_guard_error="raise"), sinks=[Raising()])


def test_no_sink_left_and_the_log_is_told(caplog: pytest.LogCaptureFixture) -> None:
    in_flight(watching(on_violation="record", sinks=[]), sinks=[Raising()])
    assert "sink error (warning)" in caplog.text


def test_a_logger_that_raises() -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no log today")

    handler = Handler()
    logging.getLogger("zeroguard").addHandler(handler)
    try:
        session = in_flight(watching(on_violation="warn"), times=2)
    finally:
        logging.getLogger("zeroguard").removeHandler(handler)
    assert sum(f.kind == "sink_error" for f in session.findings) == 1


def test_a_full_disk(tmp_path: Path) -> None:
    backend = FakeBackend()
    session = opened(watching(on_violation="warn", sinks=[{"name": "jsonl", "directory": str(tmp_path)}]), backend)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, session._sinks[0]._file)  # type: ignore[attr-defined]
    os.close(full)
    backend.status = IN_FLIGHT
    for step in (1, 2):
        session.emit(ev.StepEnd(step, True))
    errors = [f for f in session.findings if f.kind == "sink_error"]
    assert len(errors) == 1
    assert "No space left on device" in errors[0].seen
    assert str(tmp_path) in errors[0].seen
    session.close()


def test_a_line_that_did_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonLinesSink(JsonLinesSinkConfig(directory=tmp_path), 0)
    sink.write(RECORD)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    with pytest.raises(OSError, match="20 of"):
        sink.write(RECORD)
    monkeypatch.undo()
    sink.write(RECORD)
    sink.close()
    sink.close()
    assert len(lines_of(tmp_path)) == 2


def test_a_closed_file(tmp_path: Path) -> None:
    config = watching(on_violation="warn", sinks=[{"name": "jsonl", "directory": str(tmp_path)}])
    session = in_flight(config)
    session._sinks[0].close()
    session._backend.status = IN_FLIGHT  # type: ignore[attr-defined]
    session.emit(ev.StepEnd(2, True))
    assert [f.seen.split(": ")[1] for f in session.findings if f.kind == "sink_error"] == ["OSError"]
    session.close()
    assert len(lines_of(tmp_path)) == 1


def test_a_sink_that_fails_at_close_is_said() -> None:
    class Sink(MemorySink):
        def close(self) -> None:
            raise ValueError("still open elsewhere")

    good = MemorySink()
    session = opened(sinks=[Sink(), good])
    session.close()
    assert kinds(session) == [("sinks", "sink_error")]
    assert good.closed == 1


KILLED = """
import sys
from pathlib import Path
from zeroguard.findings import Finding
from zeroguard.sinks import JsonLinesSink, JsonLinesSinkConfig
sink = JsonLinesSink(JsonLinesSinkConfig(directory=Path(sys.argv[1])), 0)
record = Finding("g", "k", "warning", 0, 1, tuple(f"layer.{n}.weight" for n in range(300)), "e", "s", "c", "r")
print("ready", flush=True)
while True:
    sink.write(record)
"""


def test_a_killed_process_leaves_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    for delay in (0.0, 0.003, 0.01, 0.02):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        lines = whole.splitlines()
        assert all(json.loads(line)["kind"] == "k" for line in lines)
    with path.open("ab") as file:
        file.write(b'{"record": "fin')  # as a file system that lost its power may leave it
    before = len(lines)
    sink = JsonLinesSink(JsonLinesSinkConfig(directory=tmp_path), 0)
    sink.write(RECORD)
    sink.close()
    assert len(lines_of(tmp_path)) == before + 1


# -- sinks that block ------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that the sinks wait for; set at the end, so that no thread stays."""
    monkeypatch.setattr(lanes, "PATIENCE", 0.05)
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_sink_that_blocks_stops_no_step(impatient: threading.Event) -> None:
    got: list[Finding | Repair] = []

    def blocked(record: Finding | Repair) -> None:
        impatient.wait()
        got.append(record)

    began = time.monotonic()
    session = in_flight(watching(on_violation="warn"), times=20, sinks=[blocked])
    assert time.monotonic() - began < 2.0
    assert [f.kind for f in session.findings if f.guard == "sinks"] == ["sink_late"]
    assert got == []
    impatient.set()
    session.close()
    assert got == session.findings  # nothing is lost: what had to wait was written in its order


def test_what_a_blocked_sink_never_took_is_counted(impatient: threading.Event) -> None:
    session = in_flight(watching(on_violation="warn"), times=3, sinks=[lambda record: impatient.wait()])
    session.close()
    late = [f.seen for f in session.findings if f.guard == "sinks"]
    assert len(late) == 2
    assert "4 record(s) were not taken" in late[1]


def test_an_error_behind_a_late_record_is_said(impatient: threading.Event) -> None:
    def slow(record: Finding | Repair) -> None:
        impatient.wait()
        raise ValueError("too late")

    session = in_flight(watching(on_violation="warn"), times=2, sinks=[slow])
    impatient.set()
    session.close()
    assert [f.kind for f in session.findings if f.guard == "sinks"] == ["sink_late", "sink_error"]


def test_a_healthy_function_is_called_before_the_step_goes_on_and_sees_its_context() -> None:
    import contextvars

    name = contextvars.ContextVar("name", default="")
    name.set("run")
    got: list[str] = []
    session = in_flight(watching(on_violation="warn"), sinks=[lambda record: got.append(name.get())])
    assert got == ["run"]
    session.close()


def test_a_function_that_uses_the_session_does_not_wait_for_itself() -> None:
    session: Any = None
    seen: list[str] = []

    def curious(record: Finding | Repair) -> None:
        seen.append(record.kind)
        if len(seen) == 1:
            session.emit(ev.StepEnd(2, True))

    backend = FakeBackend()
    session = opened(watching(on_violation="warn"), backend, sinks=[curious])
    backend.status = IN_FLIGHT
    began = time.monotonic()
    session.emit(ev.StepEnd(1, True))
    session.close()
    assert time.monotonic() - began < lanes.PATIENCE / 2
    assert len(seen) >= 1
    assert "sinks" not in {f.guard for f in session.findings}


def test_no_thread_without_a_record_and_none_after_close() -> None:
    def mine() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "zeroguard-sink"]

    others = set(mine())
    session = opened(watching(on_violation="warn"), sinks=[lambda record: None])
    assert set(mine()) <= others
    session.close()
    for thread in set(mine()) - others:
        thread.join(5)
    assert set(mine()) <= others


def test_a_lane_that_nobody_closes_goes_with_its_thread() -> None:
    lane = lanes.Lane(MemorySink())
    lane.write(RECORD)
    thread = lane._thread
    del lane
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()


def test_the_field_is_documented() -> None:
    assert GuardConfig().on_guard_error == "disable"
    assert ParamStatusGuard.collective is False
