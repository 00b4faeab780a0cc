"""``zeroguard run``: a training script that knows nothing of zeroguard, with every engine that it makes guarded.

The order at the end of the process: the script's traceback, if there is one; then the functions that the script gave to
``atexit``, last one first, among which each session is closed at the place that its engine has in that order (before a
process group that was there earlier is torn down, after what still uses the engine); last of all the summary.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from zeroguard import Session, guard
from zeroguard.errors import ConfigError, GuardUnavailableError, ZeroGuardError
from zeroguard.integrations.imports import ImportHook
from zeroguard.integrations.script import Script, hide_launcher
from zeroguard.report.summary import Summary
from zeroguard.settings import resolve
from zeroguard.sinks import JsonLinesSink, JsonLinesSinkConfig

__all__ = ["Launch", "add_options", "run", "split"]

logger = logging.getLogger("zeroguard")

USAGE = (
    "zeroguard run [--config FILE] [--report DIR] [--on-violation {raise,warn,record}] (SCRIPT | -m MODULE) [ARG ...]"
)
_VALUED = ("--config", "--report", "--on-violation")
_LOCAL_RANK = ("--local_rank", "--local-rank")
#: What torchrun, DeepSpeed's launcher, MPI and Slurm leave in the environment of a process that is one of several.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


# -- the command line ------------------------------------------------------------------------------------------------


def split(argv: Sequence[str]) -> tuple[list[str], Script | None]:
    """Cut a command line where the script begins: zeroguard's own part, and the script with all that belongs to it.

    argparse cannot do this: it looks for its own options behind the script too. None where there is no script, also for
    every command other than ``run``.

    DeepSpeed's launcher puts ``--local_rank=N`` behind the module that it starts, in front of everything else. It is
    meant for the script, whose first argument it becomes.
    """
    rest = list(argv)
    first: list[str] = []
    while rest and rest[0].partition("=")[0] in _LOCAL_RANK:
        first, rest = first + rest[: _width(rest[0])], rest[_width(rest[0]) :]
    if rest[:1] != ["run"]:
        return list(argv), None
    own, rest = ["run"], rest[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m", "--"):
        width = _width(rest[0]) if rest[0].partition("=")[0] in _VALUED else 1
        own, rest = own + rest[:width], rest[width:]
    module = rest[:1] == ["-m"]
    if rest[:1] in (["-m"], ["--"]):
        rest = rest[1:]
    if not rest:
        return own, None
    return own, Script(rest[0], (*first, *rest[1:]), module)


def _width(option: str) -> int:
    return 1 if "=" in option else 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``run``, as they are shown by ``zeroguard run --help``."""
    parser.usage = USAGE
    parser.epilog = "Everything behind SCRIPT or MODULE belongs to it."
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration: YAML, JSON or TOML")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write findings and repairs to DIR/rank-N.jsonl as they happen (or set ZEROGUARD_REPORT=DIR)",
    )
    parser.add_argument(
        "--on-violation", choices=("raise", "warn", "record"), help="what an error does; overrides the configuration"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the script. What it raises comes out, ``SystemExit`` too; 2 if it could not be started.

    Args:
        arguments: of :func:`add_options`, and ``script``: the :class:`Script` or None.
    """
    script: Script | None = arguments.script
    launch = Launch(
        arguments.config,
        arguments.report or _report_variable(),
        {} if arguments.on_violation is None else {"on_violation": arguments.on_violation},
    )
    try:
        if script is None:
            raise ConfigError(f"there is no script to run\nusage: {USAGE}")
        script.check()
        launch.check()
    except ConfigError as error:
        return _refuse(str(error))
    launch.start()
    try:
        problem = script.run()
    except SystemExit as stop:
        launch.failed = stop.code not in (None, 0)
        if launch.failed:
            launch.tell(stop)
        raise
    except BaseException as error:
        launch.failed = True
        hide_launcher()
        launch.tell(error)
        raise
    if problem is not None:
        launch.cancel()
        return _refuse(problem)
    return 0


def _refuse(why: str) -> int:
    sys.stderr.write(f"zeroguard run: {why}\n")
    return 2


def _report_variable() -> Path | None:
    text = os.environ.get("ZEROGUARD_REPORT")
    return Path(text) if text else None


# -- the engines -----------------------------------------------------------------------------------------------------


class _Watched:
    """One engine, and what becomes of it. Holds neither the engine nor its session: the script may drop both."""

    def __init__(self, number: int, rank: int) -> None:
        self.number = number
        self.rank = rank
        self.problem = ""
        self.state = "open"
        self._session: weakref.ref[Session] | None = None
        self._facts: Any = None
        self._stats: dict[str, Any] = {}

    @property
    def guarded(self) -> bool:
        """Whether there is or was a session, the script's own included."""
        return self._session is not None

    def hold(self, session: Session) -> None:
        """Follow this session until it is closed, by us or by the script's own ``zeroguard.guard``."""
        session.yields = True
        self._session = weakref.ref(session)
        self._facts, self._stats = session._backend.facts, session._stats
        session._on_close.append(self._closed)

    def _closed(self) -> None:
        if self.state == "open":
            self.state = "taken over"

    def close(self, failed: bool) -> None:
        """LOCAL. Close the session if it is still open; an error goes to the log and into the summary."""
        session = self._session() if self._session is not None else None
        if session is None or self.state != "open":
            return
        self.state = "closed"
        try:
            session.close(failed=failed)
        except Exception as error:
            self.problem = f"closing its session failed: {type(error).__name__}: {error}"
            logger.exception("zeroguard run: engine %d: closing its session failed", self.number)

    def tell(self, error: BaseException) -> None:
        """LOCAL. The script ends with ``error``; what is known of the other ranks is added to it. An error on the way
        goes to the log: raised, it would hide the script's own."""
        session = self._session() if self._session is not None else None
        if session is None or self.state != "open":
            return
        try:
            session.on_exception(error)
        except Exception:
            logger.exception("zeroguard run: engine %d: telling the other ranks failed", self.number)

    def text(self) -> str:
        """Its part of the summary."""
        if not self.guarded:
            return f"engine {self.number}: not guarded: {self.problem}"
        if self.state == "taken over":
            return f"engine {self.number}: {self._facts.describe()}: taken over by the script's own zeroguard.guard"
        summary = Summary(self._facts, [stats.row() for stats in self._stats.values()])
        table = f"engine {self.number}: {str(summary).removeprefix('zeroguard, ')}"
        return f"{table}\n{self.problem}" if self.problem else table

    def findings(self) -> dict[str, int]:
        """Guard -> findings, where there are any."""
        return {name: stats.findings for name, stats in self._stats.items() if stats.findings}


class Launch:
    """One run of one script: guards what ``deepspeed.initialize`` returns, closes it, and says so at the end.

    Args:
        config: as for :func:`zeroguard.guard`; a relative path counts from here, wherever the script goes.
        report: the folder for ``rank-N.jsonl``, or None.
        overrides: fields of :class:`zeroguard.GuardConfig` that replace the configured ones.
    """

    def __init__(self, config: Path | None, report: Path | None, overrides: dict[str, Any]) -> None:
        self.config = None if config is None else config.absolute()
        self.report = None if report is None else report.absolute()
        self.overrides = overrides
        self.engines: list[_Watched] = []
        self.failed = False
        self._alone = not any(name in os.environ for name in _RANK_VARIABLES)
        self._process = os.getpid()
        self._folder = os.getcwd()
        self._undo: list[Callable[[], None]] = []

    def check(self) -> None:
        """Read the configuration and make the report's folder.

        Raises:
            ConfigError: one of them cannot be used.
        """
        resolve(self.config, **self.overrides)
        if self.report is not None:
            try:
                self.report.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--report {self.report}: {error.strerror or error}; give a folder that can be written"
                ) from error

    def start(self) -> None:
        """Watch for DeepSpeed, which is not imported before the script does it: the script may choose the accelerator
        (``DS_ACCELERATOR``), and set what PyTorch reads on import, in its first lines."""
        atexit.register(self._finish)  # first, so that it runs last
        hook = ImportHook("deepspeed", self._found)
        sys.meta_path.insert(0, hook)
        self._undo.append(lambda: sys.meta_path.remove(hook))
        loaded = sys.modules.get(hook.name)
        if loaded is not None:
            self._found(loaded)

    def cancel(self) -> None:
        """Take back what :meth:`start` did; nothing is printed."""
        atexit.unregister(self._finish)
        self._give_back()

    def tell(self, error: BaseException) -> None:
        """LOCAL. The script ends with ``error``, which is about to be printed, or to become the exit code."""
        if os.getpid() == self._process:
            for watched in self.engines:
                watched.tell(error)

    def _give_back(self) -> None:
        while self._undo:
            with contextlib.suppress(ValueError):  # the script has emptied sys.meta_path
                self._undo.pop()()

    def _found(self, module: ModuleType) -> None:
        # Its package imports PyTorch, which DeepSpeed has done as well by now.
        from zeroguard.backends.deepspeed.initialize import watch

        try:
            self._undo.append(watch(module, self._guard))
        except AttributeError:
            logger.error("zeroguard run: %r has no function initialize; nothing will be guarded", module)

    def _guard(self, engine: Any, rank: int, ranks: int) -> None:
        # Whatever goes wrong in here is told and not raised: the script runs without zeroguard too.
        watched = _Watched(len(self.engines) + 1, rank)
        self.engines.append(watched)
        sinks: list[JsonLinesSink] = []
        try:
            if self._alone and ranks > 1:
                raise ZeroGuardError(
                    f"it trains on {ranks} ranks, and the others were not started through zeroguard; start all of them "
                    f"with torchrun --nproc_per_node={ranks} -m zeroguard run ..."
                )
            if self.report is not None:
                sinks.append(JsonLinesSink(JsonLinesSinkConfig(directory=self.report), rank))
            with self._here():
                watched.hold(self._open(engine, sinks))
        except Exception as error:
            for sink in sinks:
                sink.close()
            kind = "" if type(error) is ZeroGuardError else f"{type(error).__name__}: "
            watched.problem = f"{kind}{error}"
            logger.error(
                "zeroguard run: engine %d is not guarded: %s",
                watched.number,
                watched.problem,
                exc_info=not isinstance(error, ZeroGuardError),
            )
            return
        # Now: atexit calls what was registered last first, and this is the engine's place in that order.
        atexit.register(self._close, watched)

    def _here(self) -> contextlib.AbstractContextManager[None]:
        """The folder in which :meth:`check` found the configuration. Some scripts leave it before they make an engine
        (Hydra's do), and what counts has to be what was checked."""
        return contextlib.nullcontext() if os.getcwd() == self._folder else contextlib.chdir(self._folder)

    def _open(self, engine: Any, sinks: Sequence[JsonLinesSink]) -> Session:
        try:
            return guard(engine, self.config, sinks=sinks, **self.overrides)
        except GuardUnavailableError as error:
            if not error.missing:
                raise
            # This DeepSpeed release lacks something that one guard needs. The others can still do their work.
            return guard(engine, self.config, sinks=sinks, **self.overrides | {"on_unavailable": "warn"})

    def _close(self, watched: _Watched) -> None:
        if os.getpid() == self._process:  # not in a child that the script has forked
            watched.close(self.failed)

    def _finish(self) -> None:
        if os.getpid() != self._process:
            return
        self._give_back()
        rank = self.engines[0].rank if self.engines else os.environ.get("RANK") or "0"
        if str(rank) != "0" or sys.stderr is None:
            return
        try:
            sys.stderr.write(self._summary())
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # nobody is listening any more

    def _summary(self) -> str:
        if not self.engines:
            return "zeroguard run: no DeepSpeed engine was made; nothing was guarded\n"
        found: dict[str, int] = {}
        for watched in self.engines:
            for name, count in watched.findings().items():
                found[name] = found.get(name, 0) + count
        counts = ", ".join(f"{name} {count}" for name, count in found.items()) or "none"
        parts = [watched.text() for watched in self.engines]
        parts.append(f"findings on rank 0: {counts}")
        if self.report is not None:
            parts[-1] += f"\nreport: {self.report / 'rank-N.jsonl'}, one file a rank"
        guarded = sum(watched.guarded for watched in self.engines)
        head = f"zeroguard run: {guarded} of {len(self.engines)} DeepSpeed engine{'s'[: len(self.engines) - 1]} guarded"
        return "\n" + "\n\n".join([head, *parts]) + "\n"
