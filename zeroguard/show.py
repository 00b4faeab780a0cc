"""What ``zeroguard config show`` prints: each field, its value and where it came from; the guards that there are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from zeroguard import __version__
from zeroguard.config import GUARDS, found_plugins
from zeroguard.errors import ConfigError
from zeroguard.files import plain, read_text, unique
from zeroguard.guards.base import GuardModel
from zeroguard.settings import Resolved

__all__ = ["as_json", "as_yaml", "read_engine_config", "write_table"]

Rows = list[tuple[str, ...]]
_GIVE = "give a DeepSpeed configuration in JSON"


def read_engine_config(path: Path) -> Mapping[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        ConfigError: naming the file.
    """
    try:
        # DeepSpeed, which brings hjson, reads it so: with comments, for one.
        import hjson as parser  # type: ignore[import-untyped]
    except ImportError:
        parser = json
    try:
        data = plain(lambda text: parser.loads(text, object_pairs_hook=unique), read_text(path, _GIVE))
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: holds {type(data).__name__}; a DeepSpeed configuration is a mapping")
    return data


def as_json(resolved: Resolved) -> str:
    """One object: ``config``, ``origins`` and ``guards``."""
    guards = [{"name": name, "distribution": who, "problem": problem} for name, who, problem in _guards()]
    data = {"config": resolved.config.model_dump(mode="json"), "origins": resolved.origins, "guards": guards}
    return json.dumps(data, indent=2) + "\n"


def as_yaml(resolved: Resolved) -> str:
    """A configuration file that gives the same configuration; its comments say where each value came from.

    Raises:
        ConfigError: PyYAML is missing.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError('YAML needs PyYAML: pip install "zeroguard[yaml]"') from error
    values = resolved.config.model_dump(mode="json")
    parts = [
        f"# {resolved.origins[name]}\n{yaml.safe_dump({name: value}, sort_keys=False)}"
        for name, value in values.items()
    ]
    return "\n".join(parts)


def write_table(resolved: Resolved, stream: IO[str]) -> None:
    """Two tables: with rich on a terminal, where it is installed, else as plain text."""
    tables: list[tuple[tuple[str, ...], Rows]] = [
        (("key", "value", "from"), _fields(resolved)),
        (("guard", "brought by", "problem"), _guards()),
    ]
    if not any(problem for *_, problem in tables[1][1]):
        tables[1] = (("guard", "brought by"), [row[:2] for row in tables[1][1]])
    if stream.isatty():
        try:
            return _rich(tables, stream)
        except ImportError:
            pass
    stream.write("\n".join(_plain([head, *rows]) for head, rows in tables))
    return None


def _fields(resolved: Resolved) -> Rows:
    out: Rows = []
    for name, origin in resolved.origins.items():
        first, *more = _lines(getattr(resolved.config, name))
        out.append((name, first, origin))
        out += [("", line, "") for line in more]
    return out


def _lines(value: Any) -> list[str]:
    """A value in one line; a list in one line an entry."""
    if value is None:
        return ["those that the engine needs"]
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_entry(item) for item in value] or ["none"]
    return [str(value)]


def _entry(item: GuardModel) -> str:
    """The name, and the options that are not at their defaults."""
    options = item.model_dump(mode="json", exclude_defaults=True)
    name = getattr(item, "name", "")
    return ", ".join([name, *(f"{key}={_short(value)}" for key, value in options.items() if key != "name")])


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _guards() -> Rows:
    """Name, who brings it, and what is wrong with it."""
    own = f"zeroguard {__version__}, built in"
    rows: Rows = [(name, own, "") for name in GUARDS]
    for plugin in found_plugins():
        rows.append((plugin.name, plugin.distribution, plugin.problem))
    return rows


def _plain(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _rich(tables: Sequence[tuple[tuple[str, ...], Rows]], stream: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream)
    for head, rows in tables:
        table = Table(*head, show_edge=False)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a value are no markup
        console.print(table)
        console.print()
