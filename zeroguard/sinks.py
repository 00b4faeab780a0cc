"""Where findings and repairs go besides the session's own lists."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from zeroguard.errors import ConfigError
from zeroguard.findings import Finding, Repair
from zeroguard.guards.base import GuardModel
from zeroguard.lanes import Lane

__all__ = [
    "CallableSink",
    "JsonLinesSink",
    "JsonLinesSinkConfig",
    "LoggingSink",
    "LoggingSinkConfig",
    "Sink",
    "as_sink",
]

logger = logging.getLogger("zeroguard")
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.DEBUG}


class Sink(Protocol):
    """Anything with these two methods."""

    def write(self, record: Finding | Repair) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class LoggingSinkConfig(GuardModel):
    """Findings go to the logger ``zeroguard``."""

    name: Literal["logging"] = "logging"
    """The sink's name."""
    repairs: bool = False
    """Whether repairs are logged too, at level DEBUG."""


class JsonLinesSinkConfig(GuardModel):
    """Findings and repairs go to one file a rank, a JSON object a line."""

    name: Literal["jsonl"] = "jsonl"
    """The sink's name."""
    directory: Path = Field()
    """Folder of the files ``rank-N.jsonl``; made where it is missing."""


class LoggingSink:
    """Findings at ERROR, WARNING, or DEBUG for notes; repairs at DEBUG."""

    def __init__(self, config: LoggingSinkConfig | None = None) -> None:
        self.config = config or LoggingSinkConfig()

    def write(self, record: Finding | Repair) -> None:
        if isinstance(record, Finding):
            logger.log(_LEVELS[record.severity], "%s", record.text())
        elif self.config.repairs:
            logger.debug("%s", record.text())

    def close(self) -> None:
        return None


class JsonLinesSink:
    """Each line is appended whole, by one write to the file: a line that ends is complete, whenever the process dies.

    What a killed process has left of a last line is cut off when the file is opened again.
    """

    def __init__(self, config: JsonLinesSinkConfig, rank: int) -> None:
        self.path = config.directory / f"rank-{rank}.jsonl"
        # Not through a symbolic link: what is written stays in the folder that was given.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            config.directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, flags, 0o666)
        except (OSError, ValueError) as error:
            link = isinstance(error, OSError) and error.errno == errno.ELOOP and self.path.is_symlink()
            why = "is a symbolic link" if link else getattr(error, "strerror", None) or error
            raise ConfigError(
                f"sinks: jsonl: {self.path!s:.300}: {why}; give a directory in which files can be written"
            ) from error
        self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        if self._regular:
            self._cut()

    def _cut(self) -> None:
        """Cut the file after its last newline."""
        end = size = os.fstat(self._file).st_size
        while end:
            start = max(0, end - 65536)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)

    def write(self, record: Finding | Repair) -> None:
        kind = "finding" if isinstance(record, Finding) else "repair"
        line = (json.dumps({"record": kind, **record.to_dict()}) + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):
            if self._regular:
                self._cut()
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes fitted, and were taken back", str(self.path))

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __repr__(self) -> str:
        return f"JsonLinesSink({str(self.path)!r})"


class CallableSink:
    """A function that takes each finding and repair."""

    def __init__(self, function: Callable[[Finding | Repair], object]) -> None:
        self.function = function

    def write(self, record: Finding | Repair) -> None:
        self.function(record)

    def close(self) -> None:
        return None


def as_sink(item: object) -> Sink:
    """A function or an object as a sink that is called from a thread of its own; an object whose ``same_thread`` is
    true as it is, to be called from the thread that trains.

    Raises:
        ConfigError: for anything else.
    """
    if hasattr(item, "write") and hasattr(item, "close"):
        return item if getattr(item, "same_thread", False) else Lane(item)  # type: ignore[return-value]
    if callable(item):
        return Lane(CallableSink(item))
    raise ConfigError(
        f"sinks: {item!r} ({type(item).__name__}) is no sink; give a function of one argument or an object with "
        "write() and close()"
    )
