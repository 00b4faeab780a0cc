"""The configuration from all its sources, field by field, and where each field's value came from.

From the strongest to the weakest: keyword arguments, ``ZEROGUARD_*`` environment variables, a file, the key
``zeroguard`` of the DeepSpeed configuration, defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from zeroguard.config import GuardConfig, explain, read_file, wrong_kind
from zeroguard.errors import ConfigError
from zeroguard.files import json_of, plain
from zeroguard.findings import shown
from zeroguard.guards.base import unknown_keys

__all__ = ["ENGINE_KEY", "FILES", "OTHER_VARIABLES", "PREFIX", "Resolved", "known", "resolve", "variables"]

PREFIX = "ZEROGUARD_"
#: Variables that are no field: what each holds.
OTHER_VARIABLES = {
    f"{PREFIX}CONFIG": "path of the configuration file",
    f"{PREFIX}REPORT": "folder of the reports; read by the launcher",
}
#: The files that are looked for; pyproject.toml comes after them.
FILES = ("zeroguard.yaml", "zeroguard.yml", "zeroguard.json", "zeroguard.toml")
#: The key at the top level of the DeepSpeed configuration.
ENGINE_KEY = "zeroguard"

_PYPROJECT = "pyproject.toml"
_KEYWORDS = "keyword arguments"
_ENGINE = f'key "{ENGINE_KEY}" of the DeepSpeed configuration'


@dataclass(frozen=True)
class Resolved:
    """A configuration, and where each of its fields came from.

    Attributes:
        config: the configuration.
        origins: field of :class:`zeroguard.GuardConfig` -> its source, such as ``environment variable
            ZEROGUARD_AGREE`` or ``default``.
    """

    config: GuardConfig
    origins: dict[str, str]


@dataclass(frozen=True)
class _Layer:
    """One source. ``origin`` is what a value is said to come from, ``where`` what stands before an error in it."""

    origin: str
    where: str
    values: Mapping[str, Any]


def resolve(
    source: GuardConfig | dict[str, Any] | str | Path | None = None,
    *,
    engine_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    **overrides: Any,
) -> Resolved:
    """Merge all sources, field by field of :class:`zeroguard.GuardConfig`; the strongest that has a field gives all of
    it. Each source is validated, also where a stronger one covers its mistake.

    Args:
        source: a path is the file, and none is looked for. A dict, or the fields that were set in a GuardConfig, are
            keyword arguments. A GuardConfig in which every field was set, as jsonargparse (LightningCLI) makes them,
            counts where it differs from the defaults.
        engine_config: the DeepSpeed configuration as a dict.
        environ: the environment; ``os.environ`` if left out.
        directory: where files are looked for; the working directory if left out.
        overrides: fields of GuardConfig. They beat ``source``.

    Raises:
        ConfigError: a line for each mistake, with the source that it is in.
    """
    environment = _environment(os.environ if environ is None else environ)
    path = Path(source) if isinstance(source, str | Path) else None
    layers = [
        _Layer(_KEYWORDS, _KEYWORDS, {**_given(source), **overrides}),
        *environment.layers,
        *_file(path, environment.path, directory),
        *_engine(engine_config),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(GuardConfig.model_fields, "default")
    wrong: list[str] = []
    for layer in layers:
        try:
            valid = GuardConfig.model_validate(dict(layer.values))
        except ValidationError as error:
            wrong += [f"{layer.where}: {line}" for line in explain(error)]
            continue
        for name in GuardConfig.model_fields:
            if name in valid.model_fields_set and name not in values:
                values[name] = getattr(valid, name)
                origins[name] = layer.origin
    if wrong:
        raise ConfigError("\n".join(wrong))
    return Resolved(GuardConfig(**values), origins)


def known(overrides: dict[str, Any]) -> dict[str, Any]:
    """The same, if each is a field of GuardConfig. For functions that hand keyword arguments on to :func:`resolve`,
    whose own arguments must not be mistaken for fields.

    Raises:
        ConfigError: naming the keyword and the nearest field.
    """
    try:
        unknown_keys(GuardConfig, overrides)
    except ValueError as error:
        raise ConfigError(f"{_KEYWORDS}: {error}") from error
    return overrides


def _given(source: Any) -> dict[str, Any]:
    """What code has set."""
    if source is None or isinstance(source, str | Path):
        return {}
    if isinstance(source, dict):
        return source
    if not isinstance(source, GuardConfig):
        raise ConfigError(wrong_kind(source))
    values = {name: getattr(source, name) for name in GuardConfig.model_fields if name in source.model_fields_set}
    if len(values) == len(GuardConfig.model_fields):
        # jsonargparse sets every field. Taken literally, that would switch all weaker sources off without a word.
        default = GuardConfig()
        values = {name: value for name, value in values.items() if value != getattr(default, name)}
    return values


# -- the environment -------------------------------------------------------------------------------------------------


def variables() -> dict[str, str]:
    """Every legal ``ZEROGUARD_*`` variable: the field that it sets; empty for ``ZEROGUARD_CONFIG`` and such."""
    return {**{PREFIX + name.upper(): name for name in GuardConfig.model_fields}, **dict.fromkeys(OTHER_VARIABLES, "")}


@dataclass(frozen=True)
class _Environment:
    layers: tuple[_Layer, ...]
    path: Path | None


def _environment(environ: Mapping[str, str]) -> _Environment:
    mine = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    legal = variables()
    wrong = [_unknown(name, legal) for name in mine if name not in legal]
    wrong += [
        f"environment variable {name} is empty; give it a value or unset it"
        for name, text in mine.items()
        if name in legal and not text
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    path = mine.get(f"{PREFIX}CONFIG")
    return _Environment(tuple(_variable_layers(mine)), Path(path) if path else None)


def _unknown(name: str, legal: Mapping[str, str]) -> str:
    # Without the prefix, in which they are all alike.
    ends = [known.removeprefix(PREFIX) for known in legal]
    near = get_close_matches(name.removeprefix(PREFIX).upper(), ends, n=1, cutoff=0.5)
    hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
    return f"unknown environment variable {name}; allowed: {', '.join(sorted(legal))}{hint}"


def _variable_layers(mine: Mapping[str, str]) -> Iterator[_Layer]:
    """One layer a variable, read by pydantic-settings."""
    from pydantic_settings import EnvSettingsSource

    # Any model will do; the class only has to have model_fields and model_config.
    source = EnvSettingsSource(cast(Any, GuardConfig), case_sensitive=False, env_prefix=PREFIX)
    source.env_vars = {name.lower(): value for name, value in mine.items()}
    for name, field in GuardConfig.model_fields.items():
        text, _, is_json = source.get_field_value(field, name)
        if text is None:
            continue
        where = f"environment variable {PREFIX}{name.upper()}"
        value: Any = text
        if is_json or source.field_is_complex(field):
            # Not through the source's own call: it drops "null", which here means the automatic choice.
            try:
                value = plain(json_of, text)
            except ValueError as error:
                raise ConfigError(
                    f"{where}: {shown(text)} is not valid JSON ({error}); allowed: JSON text, such as "
                    f"{PREFIX}{name.upper()}='{_EXAMPLES.get(name, '...')}'"
                ) from error
        yield _Layer(where, where, {name: value})


_EXAMPLES = {"guards": '[{"name": "host_read"}]', "sinks": '[{"name": "logging"}]'}


# -- files -----------------------------------------------------------------------------------------------------------


def _file(given: Path | None, named: Path | None, directory: Path | None) -> Iterator[_Layer]:
    """The file: the one given, else the one that ZEROGUARD_CONFIG names, else the one that is found."""
    if given is not None:
        yield _read(given)
    elif named is not None:
        try:
            yield _read(named)
        except ConfigError as error:
            raise ConfigError(f"environment variable {PREFIX}CONFIG: {error}") from error
    else:
        yield from _discover(directory or Path())


def _discover(folder: Path) -> Iterator[_Layer]:
    # lexists: one that cannot be read is told, and not passed over.
    found = [folder / name for name in FILES if os.path.lexists(folder / name)]
    if len(found) > 1:
        # Which of them would count cannot be seen in either.
        raise ConfigError(f"{' and '.join(map(str, found))}: more than one configuration file; keep one of them")
    if found:
        yield _read(found[0])
    elif (folder / _PYPROJECT).is_file() and _table(read_file(folder / _PYPROJECT)) is not None:
        yield _read(folder / _PYPROJECT)


def _read(path: Path) -> _Layer:
    data = read_file(path)
    if path.name != _PYPROJECT:
        return _Layer(f"file {path}", str(path), data)
    label = f"[tool.zeroguard] in {path}"
    table = _table(data)
    if not isinstance(table, dict):
        what = "there is no such table" if table is None else f"is {shown(table)}, not a table"
        raise ConfigError(f"{label}: {what}")
    return _Layer(label, label, table)


def _table(pyproject: Mapping[str, Any]) -> Any:
    tool = pyproject.get("tool")
    return tool.get("zeroguard") if isinstance(tool, dict) else None


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


def _engine(config: Mapping[str, Any] | None) -> Iterator[_Layer]:
    if config is None or ENGINE_KEY not in config:
        return
    values = config[ENGINE_KEY]
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{_ENGINE}: holds {type(values).__name__} ({shown(values)}); a mapping of keys to values is needed"
        )
    wrong = [f"{_ENGINE}: {key}: {_AUTO}" for key in _autos(values)]
    if wrong:
        raise ConfigError("\n".join(wrong))
    yield _Layer(_ENGINE, _ENGINE, values)


_AUTO = (
    "'auto' is not allowed in this file: Accelerate and Transformers take it for a value of their own to fill in. "
    "Leave the key out to have zeroguard choose"
)


def _autos(value: Any, key: str = "") -> Iterator[str]:
    """The dotted keys under which the word stands."""
    if value == "auto":
        yield key
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for part, inner in items:
        yield from _autos(inner, f"{key}.{part}" if key else str(part))
