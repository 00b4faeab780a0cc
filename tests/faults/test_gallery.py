"""Every fault of the gallery: what it does, that it is found where it first could be, or put right; and its nearest
healthy neighbour, exact and silent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.gallery import FAULTS, HEALTHY, Control
from tests.faults.runs import Place, Runner, check, check_healthy, places
from tests.faults.table import PAGE, about, read_rows, rows
from tests.lab.group import Lab


@pytest.fixture(scope="module")
def runner(lab: Lab) -> Iterator[Runner]:
    made = Runner(lab)
    yield made
    made.close()


@pytest.mark.parametrize("control", HEALTHY, ids=lambda c: "-".join([c.program, *map(str, c.options.values())]))
def test_healthy(runner: Runner, control: Control) -> None:
    assert check_healthy(runner, control) == ()


@pytest.mark.parametrize("place", places(), ids=str)
def test_fault(runner: Runner, place: Place) -> None:
    assert check(runner, place).complaints == ()


def test_what_is_missed_late_or_not_repaired_has_a_reason() -> None:
    for fault in FAULTS:
        for case in fault.cases:
            good = case.repaired and case.found and case.found_at <= case.first
            assert good or case.why or case.not_run, fault.name


def test_the_page_is_the_registry() -> None:
    """Each row of docs/faults.md is what the registry expects; only what was measured is not in it."""
    shown = read_rows(PAGE.read_text(encoding="utf-8"))
    assert [row.expected for row in shown] == [row.expected for row in rows()], "python -m tests.faults.table --write"


def test_every_program_says_what_its_healthy_neighbour_is() -> None:
    for fault in FAULTS:
        for case in fault.cases:
            assert "Healthy:" in about(case.program), case.program
