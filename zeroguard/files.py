"""Files from a user are data: read whole up to a limit, parsed by parsers that build nothing but plain values, and
refused where they expand, nest or repeat themselves. Every refusal names the file and the way out."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zeroguard.errors import ConfigError

__all__ = ["DEPTH", "ENTRIES", "LIMIT", "json_of", "parse", "plain", "read_text", "unique"]

#: Bytes of a file, values in a YAML file with its aliases written out, and levels of nesting. A configuration has a few
#: hundred, a few dozen and four.
LIMIT = 2**20
ENTRIES = 10_000
DEPTH = 32

_KINDS = "give a .yaml, .yml, .json or .toml file"


def read_text(path: Path, give: str = _KINDS) -> str:
    """The text of a regular file.

    Args:
        path: symbolic links are followed.
        give: what to give instead, for the message.

    Raises:
        ConfigError: there is no such file, it is something else, larger than :data:`LIMIT`, or no UTF-8 text.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISDIR(mode):
                raise ConfigError(f"{path}: is a folder; {give}")
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path}: is no regular file; {give}")
            data = file.read(LIMIT + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; {give}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; {give}") from error
    except OSError as error:
        loop = "symbolic links lead in a circle" if error.errno == errno.ELOOP else error.strerror or error
        raise ConfigError(f"{path}: cannot be read: {loop}; {give}") from error
    except ValueError as error:  # a null character in the path
        raise ConfigError(f"{path!s:.200}: cannot be read: {error}; {give}") from error
    if len(data) > LIMIT:
        raise ConfigError(
            f"{path}: larger than {LIMIT // 1024} KiB, and read no further; {give} that holds a configuration"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ConfigError(f"{path}: not UTF-8 text: byte 0x{byte:02x} at {error.start}; save it as UTF-8") from error


def _open(path: str, flags: int) -> int:
    # Without waiting: a pipe that nobody writes to would hold training up for ever.
    return os.open(path, flags | os.O_NONBLOCK)


def parse(path: Path, text: str) -> Any:
    """The value in a YAML, JSON or TOML file, by the file's suffix; an empty YAML file is an empty mapping.

    Raises:
        ConfigError: naming the file.
    """
    suffix = path.suffix.lower()
    if suffix not in _PARSERS:
        raise ConfigError(f"{path}: unknown kind of file {suffix!r}; allowed: .yaml, .yml, .json, .toml")
    kind, parser = _PARSERS[suffix]
    try:
        return plain(parser, text)
    except ImportError as error:
        raise ConfigError(f"{path}: reading this file needs a package that is missing: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {kind}: {error}") from error


def plain(parser: Callable[[str], Any], text: str) -> Any:
    """What ``parser`` makes of a text, if it nests at most :data:`DEPTH` levels.

    Raises:
        ValueError: it nests deeper, or the parser refused it.
    """
    try:
        value = parser(text)
    except RecursionError as error:
        raise ValueError(_DEEP) from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):  # its errors share no base with ValueError
            raise ValueError(str(error)) from error
        raise
    if not _shallow(value):
        raise ValueError(_DEEP)
    return value


_DEEP = f"more than {DEPTH} lists and mappings inside one another; a configuration has four"


def _shallow(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        level = [inner for one in level for inner in _parts(one)]
        if not level:
            return True
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as ``object_pairs_hook`` gets it, in which no key stands twice.

    Raises:
        ValueError: naming the key. Which of the two would count cannot be seen in the file.
    """
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r:.200} stands there twice; keep one of them")
        out[key] = value
    return out


def json_of(text: str) -> Any:
    """JSON in which no key stands twice. Raises ValueError."""
    return json.loads(text, object_pairs_hook=unique)


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    _check_yaml(yaml, text)
    data = yaml.safe_load(text)
    return {} if data is None else data  # not "or", which takes [] and false for an empty file too


_PARSERS = {".json": ("JSON", json_of), ".toml": ("TOML", _toml), ".yaml": ("YAML", _yaml), ".yml": ("YAML", _yaml)}


class _Node:
    """A list or a mapping that is open: what it holds so far."""

    def __init__(self, anchor: str | None, mapping: bool) -> None:
        self.anchor, self.mapping = anchor, mapping
        self.entries = 1
        self.parts = 0
        self.keys: set[str] = set()


def _check_yaml(yaml: Any, text: str) -> None:
    """Before anything is built, from the parser's events, which come one by one: an alias stands for all that it refers
    to, and a few lines of aliases of aliases for more than fits into memory.

    Raises:
        ValueError: too much, too deep, a circle, or a key twice.
    """
    sizes: dict[str, int] = {}
    stack = [_Node(None, False)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        top = stack[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            if len(stack) > DEPTH:
                raise ValueError(f"line {line}: {_DEEP}")
            stack.append(_Node(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            node = stack.pop()
            size, anchor, top = node.entries, node.anchor, stack[-1]
        elif isinstance(event, yaml.AliasEvent):
            if any(node.anchor == event.anchor for node in stack):
                raise ValueError(f"line {line}: *{event.anchor} stands inside what it refers to")
            size, anchor = sizes.get(event.anchor, 1), None
        elif isinstance(event, yaml.ScalarEvent):
            size, anchor = 1, event.anchor
            if top.mapping and top.parts % 2 == 0 and event.value != "<<":
                if event.value in top.keys:
                    raise ValueError(f"line {line}: key {event.value!r:.200} stands there twice; keep one of them")
                top.keys.add(event.value)
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        top.entries += size
        top.parts += 1
        # Each open level counts what it holds only when it ends.
        if sum(node.entries for node in stack) > ENTRIES:
            raise ValueError(f"line {line}: more than {ENTRIES} values, with its aliases written out")
