"""The command line of ``zeroguard stress``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zeroguard.errors import ConfigError, ZeroGuardError
from zeroguard.stress.jobs import SCENARIOS, Job
from zeroguard.stress.report import FORMATS, Report
from zeroguard.stress.runner import Arm, run_command, run_job

__all__ = ["add_options", "run", "split"]

USAGE = (
    "zeroguard stress [options] {host-read,retained-graph,inflight,all}\n"
    "       zeroguard stress [options] -- COMMAND [ARG ...]"
)
EPILOG = (
    "In COMMAND {seed} is replaced by the iteration's seed. In the guarded arm a Python script, 'python -m' and pytest "
    "run under zeroguard run. Where a launcher starts the script, write {run} before it: torchrun {run} train.py is "
    "then torchrun -m zeroguard run train.py. Every other command finds ZEROGUARD=1 in its environment. Exit status: 0 "
    "if no guarded iteration failed, 1 if one did, 2 if an arm could not run."
)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut a command line at ``--``: zeroguard's own part, and the user's command."""
    words = list(argv)
    if words[:1] != ["stress"] or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``stress``."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument(
        "scenario", nargs="?", choices=(*SCENARIOS, "all"), help="what to run; all is the three of them"
    )
    parser.add_argument(
        "--iterations", type=_count, default=100, metavar="N", help="of each arm (default: %(default)s)"
    )
    parser.add_argument("--without", action="store_true", help="run the arm without guards (both, if neither is given)")
    parser.add_argument("--with", dest="guarded", action="store_true", help="run the arm with guards")
    parser.add_argument("--widen", action="store_true", help="run each arm with a larger window too: a delay kernel")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage (default: the scenario's)")
    parser.add_argument("--size", type=_count, metavar="H", help="width of a layer (default: the scenario's)")
    parser.add_argument(
        "--offload", action=argparse.BooleanOptionalAction, default=None, help="optimizer in pinned host memory"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the first iteration (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="for one iteration, in seconds (default: %(default)g)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write SCENARIO.txt, .md and .json there too")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output instead")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the arms, write the reports. 0 if no guarded iteration failed, 1 if one did, 2 if an arm could not run.

    Args:
        arguments: of :func:`add_options`, with ``user_command`` (words behind ``--``) and ``typed`` (all words).
    """
    try:
        if bool(arguments.scenario) == bool(arguments.user_command):
            raise ConfigError(f"give a scenario, or a command behind --\nusage: {USAGE}")
        reports = list(_reports(arguments))
        _write(arguments, reports)
    except (ZeroGuardError, OSError) as error:
        sys.stderr.write(f"zeroguard stress: {error}\n")
        return 2
    return 0 if all(report.passed for report in reports) else 1


def _reports(arguments: argparse.Namespace) -> Iterator[Report]:
    if arguments.user_command:
        for name in ("widen", "stage", "size", "offload"):
            if getattr(arguments, name):
                raise ConfigError(f"--{name} is for the scenarios; a command brings its own")
        yield _of_command(arguments)
        return
    for scenario in SCENARIOS if arguments.scenario == "all" else (arguments.scenario,):
        yield _of_scenario(arguments, scenario)


def _sides(arguments: argparse.Namespace) -> list[tuple[str, bool]]:
    """The arms to run: name and whether guarded."""
    both = arguments.without == arguments.guarded
    return [("without", False)] * (both or arguments.without) + [("with", True)] * (both or arguments.guarded)


def _of_command(arguments: argparse.Namespace) -> Report:
    from zeroguard.stress.environment import environment

    arms: dict[str, Arm] = {}
    for name, guarded in _sides(arguments):
        with _progress(arguments.iterations, name) as tick:
            arms[name] = run_command(
                arguments.user_command,
                guarded,
                arguments.iterations,
                arguments.seed,
                tick,
                timeout=arguments.timeout,
            )
    notes = [f"The arm {name}: {arm.note}." for name, arm in arms.items() if arm.note]
    return _report(arguments, "command", {}, environment(), arms, notes)


def _of_scenario(arguments: argparse.Namespace, scenario: str) -> Report:
    job = _job(arguments, scenario)
    arms: dict[str, Arm] = {}
    where: dict[str, Any] = {}
    notes: list[str] = []
    for name, guarded in _sides(arguments):
        for label, widen in ((name, False), (f"{name}, widened", True)):
            if widen and (not arguments.widen or scenario != "host-read" or _scripted(where)):
                continue
            with _progress(job.iterations, f"{scenario}, {label}") as tick:
                one = dataclasses.replace(job, guarded=guarded, widen=widen)
                arms[label], where = run_job(one, tick, timeout=arguments.timeout)
    notes += _notes(arguments, scenario, where)
    settings = {"stage": job.stage, "size": where["size"], "offload": job.offload}
    return _report(arguments, scenario, settings, where["environment"], arms, notes)


def _scripted(where: dict[str, Any]) -> bool:
    return bool(where["environment"]["accelerator"] == "scripted")


def _job(arguments: argparse.Namespace, scenario: str) -> Job:
    usual = SCENARIOS[scenario]
    stage = arguments.stage or usual.stage
    offload = usual.offload if arguments.offload is None else arguments.offload
    one = arguments.scenario != "all"
    if scenario == "host-read" and not offload:
        if one:
            raise ConfigError("host-read needs --offload: without it no gradient is in host memory")
        offload = True
    if scenario == "inflight" and stage != 3:
        if one:
            raise ConfigError(f"inflight needs --stage 3: stage {stage} gathers no parameters")
        stage = 3
    return Job(scenario, False, arguments.iterations, arguments.seed, stage, arguments.size or 0, offload)


def _notes(arguments: argparse.Namespace, scenario: str, where: dict[str, Any]) -> Iterator[str]:
    from zeroguard.stress import hardware

    if scenario == "host-read" and _scripted(where):
        yield (
            "The accelerator of this machine copies before Python goes on and cannot show this race. It was run on "
            "zeroguard's scripted accelerator, on which a copy lands only when somebody waits: without the guards "
            "every read of a copy that is on its way is wrong. The rate says nothing about a GPU."
        )
    elif scenario == "host-read" and arguments.widen:
        yield (
            f"Widened: a kernel of {hardware.DELAY_CYCLES} clock cycles is queued on the current stream when the "
            "gradient of the last layer arrives, so the copies that follow it land that much later."
        )
    if arguments.widen and (scenario != "host-read" or _scripted(where)):
        yield "Not widened: there is no window of time here, only what is waited for and what is not."


def _report(
    arguments: argparse.Namespace,
    scenario: str,
    settings: dict[str, Any],
    where: dict[str, Any],
    arms: dict[str, Arm],
    notes: list[str],
) -> Report:
    seeds = {"first": arguments.seed, "last": arguments.seed + arguments.iterations - 1}
    if "with" not in arms:
        notes = [*notes, "The arm with guards was not run; the exit status says nothing about them."]
    return Report(scenario, shlex.join(["zeroguard", *arguments.typed]), settings, where, arms, seeds, notes)


def _write(arguments: argparse.Namespace, reports: list[Report]) -> None:
    data: list[Any] = [report.to_dict() for report in reports]
    if arguments.json:
        sys.stdout.write(json.dumps(data if len(data) > 1 else data[0], indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(FORMATS[arguments.format](report) for report in reports))
    if arguments.out is None:
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for report, one in zip(reports, data, strict=True):
        name = arguments.out / report.scenario
        name.with_suffix(".txt").write_text(report.text(), encoding="utf-8")
        name.with_suffix(".md").write_text(report.markdown(), encoding="utf-8")
        name.with_suffix(".json").write_text(json.dumps(one, indent=1) + "\n", encoding="utf-8")


# -- progress --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(total: int, name: str) -> Iterator[Callable[[bool], None]]:
    """A bar on standard error with the failures so far, if that is a terminal; a line at the end, where rich is not
    installed."""
    count = [0, 0]

    def tick(failed: bool) -> None:
        count[0] += 1
        count[1] += failed

    if not sys.stderr.isatty():
        yield tick
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield tick
        sys.stderr.write(f"{name}: {count[0]} of {total}, {count[1]} failed\n")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, failed=0)

        def shown(failed: bool) -> None:
            tick(failed)
            bar.update(task, advance=1, failed=count[1])

        yield shown
