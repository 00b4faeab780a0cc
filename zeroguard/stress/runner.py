"""Runs one arm: a scenario in a worker process that is reused, or the user's command again and again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroguard.errors import ZeroGuardError
from zeroguard.stress.jobs import Job

__all__ = ["Arm", "StressError", "run_command", "run_job", "with_guards"]

#: What the progress bar is told after each iteration: whether it failed.
Tick = Callable[[bool], None]


class StressError(ZeroGuardError):
    """An arm could not run at all, so nothing was counted."""


@dataclass
class Arm:
    """What one arm gave.

    Attributes:
        iterations: how many were run.
        failures: how many of them failed.
        messages: failure message -> how often.
        guards: the guards that were at work.
        findings: ``guard: kind`` -> how often.
        note: something to know about this arm.
    """

    iterations: int = 0
    failures: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    guards: list[str] = field(default_factory=list)
    findings: dict[str, int] = field(default_factory=dict)
    note: str = ""

    def count(self, message: str) -> None:
        """One more iteration; it failed unless the message is empty."""
        self.iterations += 1
        if message:
            self.failures += 1
            self.messages[message] = self.messages.get(message, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict; empty ``guards``, ``findings`` and ``note`` are left out."""
        data = dataclasses.asdict(self)
        return {k: v for k, v in data.items() if v or k in ("iterations", "failures", "messages")}


# -- a scenario ------------------------------------------------------------------------------------------------------


def run_job(job: Job, tick: Tick, *, timeout: float) -> tuple[Arm, dict[str, Any]]:
    """LOCAL. Run a scenario's arm. A process that dies, or is silent for ``timeout`` seconds, is that iteration's
    failure; a new one goes on with the next.

    Returns:
        The arm, and what its process runs on: ``environment`` and ``size``.

    Raises:
        StressError: the program cannot run here; the message ends with what the process said last.
    """
    arm = Arm()
    where: dict[str, Any] = {}
    while arm.iterations < job.iterations:
        died = ""
        with _worker(dataclasses.replace(job, skip=arm.iterations)) as (pipe, process, log):
            try:
                for line in _lines(pipe, timeout):
                    where = line if "environment" in line else where
                    if "message" in line:
                        arm.count(line["message"])
                        tick(bool(line["message"]))
                    if "broken" in line:
                        raise StressError(f"{job.scenario} cannot run here: {line['broken']}\n{_tail(log)}")
                    if "done" in line:
                        arm.guards, arm.findings = line["guards"], line["findings"]
                        return arm, where
                died = f"the process ended with status {process.wait()}"
            except TimeoutError:
                died = f"no answer within {timeout:g} s"
            if not where:
                raise StressError(f"{job.scenario} cannot run here: {died}\n{_tail(log)}")
        arm.count(died)
        tick(True)
    return arm, where


@contextlib.contextmanager
def _worker(job: Job) -> Iterator[tuple[int, subprocess.Popen[bytes], Any]]:
    read, write = os.pipe()
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "zeroguard.stress.worker",
                    json.dumps(dataclasses.asdict(job) | {"pipe": write}),
                ],
                stdout=log,
                stderr=log,
                pass_fds=[write],
            )
        finally:
            os.close(write)
        try:
            yield read, process, log
        finally:
            os.close(read)
            process.kill()
            process.wait()


def _lines(pipe: int, timeout: float) -> Iterator[dict[str, Any]]:
    data = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], timeout)
        if not ready:
            raise TimeoutError
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return
        *whole, data = (data + chunk).split(b"\n")
        yield from map(json.loads, whole)


def _tail(log: Any, size: int = 2000) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - size))
    return str(log.read().decode(errors="replace")).strip()


# -- the user's command ----------------------------------------------------------------------------------------------

#: Stands for zeroguard in a command that hides its script behind a launcher: -m zeroguard run, or nothing.
HERE = "{run}"
SEED = "{seed}"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?$")
_GUARDED = re.compile(r"^zeroguard run: (\d+) of (\d+) DeepSpeed engines? guarded$", re.MULTILINE)
_NOTHING = "zeroguard run: no DeepSpeed engine was made"


def with_guards(command: Sequence[str]) -> tuple[list[str], str]:
    """The same command with its engines guarded, and how that is done.

    A Python script or module, and pytest, run under ``zeroguard run``; so does what follows ``{run}``. Everything else
    is left alone and finds ``ZEROGUARD=1`` in its environment, which Lightning's trainers act on.
    """
    run = ["-m", "zeroguard", "run"]
    if HERE in command:
        at = list(command).index(HERE)
        return [*command[:at], *run, *command[at + 1 :]], "zeroguard run"
    first, rest = command[0], list(command[1:])
    name = os.path.basename(first)
    if name in ("pytest", "py.test"):
        return [sys.executable, *run, "-m", "pytest", *rest], "zeroguard run"
    if name.endswith(".py"):
        return [sys.executable, *run, first, *rest], "zeroguard run"
    if _PYTHON.match(name) and rest and (not rest[0].startswith("-") or rest[0] == "-m"):
        return [first, *run, *rest], "zeroguard run"
    return list(command), "ZEROGUARD=1"


def run_command(
    command: Sequence[str], guarded: bool, iterations: int, seed: int, tick: Tick, *, timeout: float
) -> Arm:
    """Run the user's command ``iterations`` times; a status other than 0 is a failure.

    ``{seed}`` in an argument is replaced by ``seed`` + i, and so is the environment's ``PYTHONHASHSEED``.

    Raises:
        StressError: the command cannot be started.
    """
    arm = Arm()
    words, how = with_guards(command) if guarded else ([word for word in command if word != HERE], "")
    seen: list[bool] = []
    for i in range(iterations):
        env = {k: v for k, v in os.environ.items() if k != "ZEROGUARD"} | {"PYTHONHASHSEED": str((seed + i) % 2**32)}
        if guarded:
            env["ZEROGUARD"] = "1"
        status, text = _call([word.replace(SEED, str(seed + i)) for word in words], env, timeout)
        message = "" if status == 0 else _message(status, text, timeout)
        arm.count(message)
        tick(bool(message))
        told = _GUARDED.search(text)
        if told or _NOTHING in text:
            seen.append(bool(told and int(told[1])))
    if guarded and how == "zeroguard run":
        count = f"{sum(seen)} of {iterations} runs said that an engine was guarded"
        arm.note = f"under zeroguard run; {count}" + ("" if any(seen) else ": this arm proves nothing")
    elif guarded:
        arm.note = "with ZEROGUARD=1, which Lightning's trainers act on; whether an engine was guarded is not known"
    return arm


def _call(words: Sequence[str], env: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Exit status, None if it was too slow, and both outputs."""
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(words, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise StressError(f"{words[0]!r} cannot be started: {error.strerror or error}") from error
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.kill()
            process.wait()
        return status, _tail(log, 1 << 20)


_ERROR = re.compile(r"^(?:E\s+)?((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Exit|Interrupt|Warning|Violation)\b.*)$")
_VARYING = re.compile(r"0x[0-9a-fA-F]+")
_TIMES = re.compile(r" in \d+(\.\d+)?s\b.*")


def _message(status: int | None, text: str, timeout: float) -> str:
    """One line that groups failures of one kind: the last error that was printed, else the last line."""
    if status is None:
        return f"no end within {timeout:g} s"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("zeroguard run:")]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    last = errors[-1] if errors else _TIMES.sub("", lines[-1].strip("= ")) if lines else "no output"
    return f"status {status}: {_VARYING.sub('0x...', last)[:300]}"
