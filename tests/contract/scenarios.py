"""Twelve programs with a fault in them, and what each shows of one guard, on the releases of DeepSpeed and PyTorch that
are on the path. Each runs without and with zeroguard, on a CPU and one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.lab.group import Lab

CONFIGURATIONS = ((1, False), (1, True), (2, False), (2, True), (3, False), (3, True))
#: what a difference to plain PyTorch may be: one rounding
EXACT = 3e-8
ALONE = {"guards": [{"name": "accumulation"}], "on_violation": "record"}
AUDIT = {"guards": [{"name": "gradient_audit", "elements_per_parameter": "all"}], "on_violation": "record"}
#: Lost to anyone before this release: DeepSpeed knows engine.backward() only.
OUTPUT_HOOKS = (0, 18)
NO_LOSS_BACKWARD = "`loss.backward()` is DeepSpeed's own from 0.18 on"


class Run(NamedTuple):
    """One program on one configuration: what was right, without and with zeroguard."""

    without: bool
    with_it: bool
    seen: str


class Scenario(NamedTuple):
    """A program with a fault. ``guard`` is the one that it is about; ``run`` gives a :class:`Run` a configuration."""

    name: str
    guard: str
    run: Callable[..., Iterator[Run]]
    #: the program uses loss.backward()
    manual: bool = False


class Verdict(NamedTuple):
    """``works``, ``not needed``, ``unavailable`` or ``wrong``; ``why`` says more."""

    status: str
    why: str = ""


Ask = Callable[[dict[str, Any]], dict[str, Any]]
Places = Sequence[tuple[int, bool]]


def _two_losses(pattern: str) -> Callable[[Ask, Places], Iterator[Run]]:
    def run(ask: Ask, places: Places) -> Iterator[Run]:
        for stage, offload in places:
            case = {"call": "programs.two_losses", "pattern": pattern, "stage": stage, "offload": offload}
            bare, guarded = ask({**case, "guarded": False}), ask(case)
            fine = guarded["status"] == "exact" and not guarded.get("findings")
            yield Run(bare["status"] == "exact", fine, f"{guarded['status']} {guarded.get('error', '')}")

    return run


def _idle(ask: Ask, places: Places) -> Iterator[Run]:
    for stage, offload in places:
        case = {"call": "idle.idle", "stage": stage, "offload": offload}
        bare, guarded = ask({**case, "guarded": False}), ask(case)
        yield Run(_close(bare), _close(guarded) and not guarded["findings"], str(guarded.get("error", "")))


def _close(answer: dict[str, Any]) -> bool:
    return bool(answer.get("differences")) and max(answer["differences"]) <= EXACT


def _in_flight(ask: Ask, places: Places) -> Iterator[Run]:
    case = {"call": "status.left_behind", "case": "exception"}
    bare, guarded = ask({**case, "guarded": False}), ask(case)

    def rest(answer: dict[str, Any]) -> bool:
        there = answer.get("seen", {}).get("at_boundary", {"registry": -1})
        return there["registry"] == 0 and there["INFLIGHT"] == 0

    yield Run(rest(bare), rest(guarded), str(guarded.get("error", "")))


def _host_read(ask: Ask, places: Places) -> Iterator[Run]:
    case = {"call": "host_read.reads", "how": "items"}
    truth, bare, guarded = (
        ask({**case, **more}) for more in ({"kind": "plain", "guarded": False}, {"guarded": False}, {})
    )
    seen, right = guarded.get("seen"), truth.get("seen", [])
    yield Run(bare.get("seen") == right, seen == right and any(right), str(guarded.get("error", "")))


def _found(kind: str, case: dict[str, Any], guarded: dict[str, Any], healthy: dict[str, Any]) -> Any:
    """A program about which there is something to say: said exactly there."""

    def run(ask: Ask, places: Places) -> Iterator[Run]:
        for stage, offload in places:
            where = {"stage": stage, "offload": offload}
            bad = ask({**case, **where, "guarded": guarded})
            good = ask({**case, **healthy, **where, "guarded": guarded})
            kinds = {finding["kind"] for finding in bad.get("findings", ())}
            wrong = bad.get("status", "wrong") == "wrong"
            fine = (kinds == {kind} if wrong else not kinds) and good.get("findings") == []
            yield Run(not wrong, fine, f"{sorted(kinds)} {bad.get('error', '')} {good.get('error', '')}")

    return run


def _audit(ask: Ask, places: Places) -> Iterator[Run]:
    """Alone, so that nothing is put right: it speaks where the run is wrong, and not where it is exact."""
    for stage, offload in places:
        case = {"call": "programs.two_losses", "pattern": "misuse_engine", "stage": stage, "offload": offload}
        bad = ask({**case, "guarded": AUDIT})
        if bad["status"] == "crash":
            continue
        wrong = bad["status"] == "wrong"
        yield Run(not wrong, wrong == bool(bad["findings"]), f"{bad['status']}, {len(bad['findings'])} finding(s)")


def _reading(ask: Ask, places: Places) -> Iterator[Run]:
    for stage, offload in places:
        answer = ask({"call": "reading.read", "stage": stage, "offload": offload})
        windows = answer.get("windows", ())
        fine = bool(windows) and all(max(w["whole"], w["norms"]) <= 5e-7 for w in windows)
        yield Run(False, fine, str(answer.get("error", "")))


SCENARIOS = (
    Scenario("`zero_grad` between two `engine.backward`", "retained_graph", _two_losses("clear_engine")),
    Scenario("`zero_grad` between two `loss.backward`", "retained_graph", _two_losses("clear_manual"), True),
    Scenario("two `engine.backward`, boundary set by hand", "retained_graph", _two_losses("boundary_engine")),
    Scenario("two `loss.backward`, boundary set by hand", "retained_graph", _two_losses("boundary_manual"), True),
    Scenario("two `engine.backward`, nothing else", "retained_graph", _two_losses("misuse_engine")),
    Scenario("two `loss.backward`, nothing else", "retained_graph", _two_losses("misuse_manual"), True),
    Scenario("a parameter that some steps do not reach", "accumulator_reset", _idle),
    Scenario("a forward that raises under ZeRO-3", "param_status", _in_flight),
    Scenario("offloaded gradients read in Python", "host_read", _host_read),
    Scenario(
        "a loss divided twice",
        "accumulation",
        _found("double_division", {"call": "rhythm.divided_twice"}, ALONE, {"gas": 1}),
    ),
    Scenario("a gradient that is not autograd's", "gradient_audit", _audit),
    Scenario("norms and whole gradients", "reading", _reading),
)


def judge(
    scenario: Scenario, lab: Lab, path: str, version: tuple[int, ...], places: Places = CONFIGURATIONS
) -> Verdict:
    """Run one scenario on the release in ``path`` (empty: the installed ones)."""

    def ask(case: dict[str, Any]) -> dict[str, Any]:
        answer = lab.run(1, case, python_path=path, timeout=240)[0]
        if answer.get("status") == "dead":
            raise RuntimeError(f"{case}: {answer}")
        return answer

    runs = list(scenario.run(ask, places))
    failed = [run for run in runs if not run.with_it]
    if failed and scenario.manual and version < OUTPUT_HOOKS:
        return Verdict("unavailable", NO_LOSS_BACKWARD)
    if failed:
        unavailable = next((run.seen for run in failed if "GuardUnavailableError" in run.seen), "")
        return Verdict("unavailable" if unavailable else "wrong", unavailable or failed[0].seen)
    needed = sum(not run.without for run in runs)
    return Verdict("works", f"{needed} of {len(runs)}") if needed else Verdict("not needed")
