"""Runs the gallery: each program without zeroguard, with it, and its healthy neighbour."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tests.faults.gallery import FAULTS, INSTALLED, Case, Control, Fault, Program, by_audit
from tests.lab.group import ROOT, Lab

__all__ = ["AUTOMATIC", "Checked", "Outcome", "Place", "Runner", "check", "check_healthy", "detect", "places"]

RELEASES = Path(os.environ.get("LAB_RELEASES", ROOT / ".releases"))
AUTOMATIC: dict[str, Any] = {}
_AUDIT: dict[str, Any] = {"name": "gradient_audit", "elements_per_parameter": "all", "every_n_steps": 1}
#: the automatic choice, and the audit of every element at every step
AUDITED: dict[str, Any] = {"guards": [{"name": "automatic"}, _AUDIT]}
#: A program takes well under a second once its workers are there; their start may take half a minute on a busy machine.
TIMEOUT = 120.0
HANGS_AFTER = 4.0


def detect(stage: int) -> dict[str, Any]:
    """The guards where they put nothing right, and the audit of every element at every step."""
    guards: list[dict[str, Any]] = [
        {"name": "retained_graph", "action": "detect"},
        {"name": "accumulator_reset", "action": "detect"},
        {"name": "accumulation"},
        _AUDIT,
    ]
    if stage == 3:
        guards.append({"name": "param_status", "action": "warn"})
    return {"guards": guards, "on_violation": "record"}


@dataclass(frozen=True)
class Place:
    """One release and one configuration of a case."""

    fault: Fault
    case: Case
    release: str
    where: str

    @property
    def stage(self) -> int:
        return int(self.where[0])

    def __str__(self) -> str:
        options = "-".join(str(value) for value in self.case.options.values())
        return "-".join(part for part in (self.fault.name, options, self.where, self.release) if part)


def places() -> list[Place]:
    """All of them, one release after the other, so that few workers are needed at a time; hangs come last."""
    found = [
        Place(fault, case, release, where)
        for fault in FAULTS
        for case in fault.cases
        for release in case.releases
        for where in case.places
        if not case.not_run or case.shows == "hang"
    ]
    return sorted(found, key=lambda p: (p.release, p.case.shows == "hang", p.case.ranks))


@dataclass(frozen=True)
class Outcome:
    """What a run came to, over all ranks. ``heard``: finding -> the step at which it first came; ``errors`` are those
    of severity error that were not repaired."""

    status: str
    first: int
    off: float
    error: str
    heard: dict[str, int]
    errors: frozenset[str]
    repairs: tuple[str, ...]
    texts: str

    @property
    def exact(self) -> bool:
        return self.status == "exact"


@dataclass(frozen=True)
class Checked:
    """What a place came to without zeroguard, and everything that is not as the gallery says."""

    place: Place
    plain: Outcome
    complaints: tuple[str, ...]


def check(runner: Runner, place: Place) -> Checked:
    """All runs of a place."""
    case = place.case
    complaints: list[str] = []

    def run(guarded: Any, healthy: bool = False) -> Outcome:
        return runner.run(case, place.release, place.where, guarded, healthy)

    def want(right: bool, what: str, outcome: Outcome) -> None:
        if not right:
            complaints.append(f"{place}: {what}: {outcome}")

    for config in (AUDITED, detect(place.stage)):
        healthy = run(config, healthy=True)
        want(healthy.exact and not healthy.heard, "the healthy neighbour is exact and silent", healthy)
    plain = run(None)
    want((plain.status, plain.first) == (case.shows, case.first), f"{case.shows} at step {case.first}", plain)
    if case.shows == "hang":
        return Checked(place, plain, tuple(complaints))
    if case.repaired:
        guarded = run(AUTOMATIC)
        want(guarded.exact and not guarded.errors, "exact with zeroguard, and no error reported", guarded)
        want(set(guarded.heard) <= set(case.found), "nothing else is reported", guarded)
        found = run(detect(place.stage))
    else:
        found = run(AUDITED)
        want(not found.exact, "not repaired", found)
        want(set(found.heard) == set(case.found), "exactly these are found (or: no longer missed)", found)
    if not case.repaired and any(map(by_audit, case.found)):
        guarded = run(AUTOMATIC)
        # It compares a part of the elements; here that is enough.
        want(set(guarded.heard) == set(case.found), "exactly these are found as zeroguard comes", guarded)
    for name in case.found:
        want(found.heard.get(name) == case.found_at, f"{name} at step {case.found_at}", found)
    if case.on_request is not None:
        asked = run(case.on_request)
        want(asked.exact, "exact on request", asked)
    return Checked(place, plain, tuple(complaints))


def check_healthy(runner: Runner, control: Control) -> tuple[str, ...]:
    """A healthy program is exact, and nothing is said of it but what is true."""
    complaints = []
    for release, where in product(control.releases, control.places):
        configs = {"automatic": AUTOMATIC, "audited": AUDITED, "only detecting": detect(int(where[0]))}
        for name, config in {"without zeroguard": None, **configs}.items():
            answer = runner.run(control, release, where, config)
            if not (answer.exact and set(answer.heard) <= set(control.allowed)):
                complaints.append(f"{control.program} {release} {where} {name}: {answer}")
    return tuple(complaints)


class Runner:
    """Runs programs; an older release has workers of its own, which end when another release's turn comes."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.old = Lab()
        self.release = INSTALLED

    def close(self) -> None:
        self.old.close()

    def run(self, what: Program, release: str, where: str, guarded: Any, healthy: bool = False) -> Outcome:
        if release != self.release:
            self.old.close()
            self.release = release
        case = {
            "call": "gallery.bench.run",
            "program": what.program,
            "stage": int(where[0]),
            "offload": where.endswith("o"),
            "dtype": what.dtype,
            "options": what.options,
            "guarded": guarded,
            "healthy": healthy,
        }
        hangs = isinstance(what, Case) and what.shows == "hang" and not healthy
        lab, path = (self.lab, "") if release == INSTALLED else (self.old, self.path(release))
        answers = lab.run(what.ranks, case, python_path=path, timeout=HANGS_AFTER if hangs else TIMEOUT)
        if any("heard" not in answer for answer in answers):
            return Outcome("hang", 1, 0.0, str(answers[0]), {}, frozenset(), (), answers[0].get("log", ""))
        return _merge(answers)

    @staticmethod
    def path(release: str) -> str:
        folder = RELEASES / release
        if not (folder / "deepspeed").is_dir():
            raise FileNotFoundError(f"DeepSpeed {release} is not in {folder}; run: make releases")
        return str(folder)


def _merge(answers: list[dict[str, Any]]) -> Outcome:
    heard: dict[str, int] = {}
    errors = set()
    for step, guard, kind, severity, repaired in _heard(answers):
        name = f"{guard}.{kind}"
        heard[name] = min(step, heard.get(name, step))
        if severity == "error" and not repaired:
            errors.add(name)
    status = next((s for s in ("crash", "wrong") if any(a["status"] == s for a in answers)), "exact")
    return Outcome(
        status,
        min((a["first"] for a in answers if a["first"]), default=0),
        max(a["off"] for a in answers),
        next((a["error"] for a in answers if a["error"]), ""),
        heard,
        frozenset(errors),
        tuple(sorted({kind for a in answers for kind in a["repairs"]})),
        "\n".join(text for a in answers for text in [*a["texts"], a["trace"]] if text),
    )


def _heard(answers: list[dict[str, Any]]) -> Iterator[tuple[int, str, str, str, bool]]:
    for answer in answers:
        for item in answer["heard"]:
            yield tuple(item)
