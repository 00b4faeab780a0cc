"""Where findings and repairs go besides the session's own lists."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from zeroguard.findings import Finding, Repair
from zeroguard.guards.base import GuardModel

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
    """Whole lines only, flushed one by one: a killed process leaves no half line behind."""

    def __init__(self, config: JsonLinesSinkConfig, rank: int) -> None:
        config.directory.mkdir(parents=True, exist_ok=True)
        self.path = config.directory / f"rank-{rank}.jsonl"
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Finding | Repair) -> None:
        kind = "finding" if isinstance(record, Finding) else "repair"
        self._file.write(json.dumps({"record": kind, **record.to_dict()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CallableSink:
    """A function that takes each finding and repair."""

    def __init__(self, function: Callable[[Finding | Repair], object]) -> None:
        self.function = function

    def write(self, record: Finding | Repair) -> None:
        self.function(record)

    def close(self) -> None:
        return None


def as_sink(item: object) -> Sink:
    """A sink as it is, a function wrapped.

    Raises:
        ConfigError: for anything else.
    """
    if hasattr(item, "write") and hasattr(item, "close"):
        return item  # type: ignore[return-value]
    if callable(item):
        return CallableSink(item)
    from zeroguard.errors import ConfigError

    raise ConfigError(
        f"sinks: {item!r} ({type(item).__name__}) is no sink; give a function of one argument or an object with "
        "write() and close()"
    )
