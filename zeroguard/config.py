"""The configuration: one frozen pydantic model that composes the guards' own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from zeroguard.errors import ConfigError
from zeroguard.guards.accumulator_reset import AccumulatorResetConfig, AccumulatorResetGuard
from zeroguard.guards.base import Guard, GuardModel
from zeroguard.guards.host_read import HostReadConfig, HostReadGuard
from zeroguard.guards.param_status import ParamStatusConfig, ParamStatusGuard
from zeroguard.guards.retained_graph import RetainedGraphConfig, RetainedGraphGuard
from zeroguard.sinks import JsonLinesSinkConfig, LoggingSinkConfig

__all__ = ["GUARDS", "GuardConfig", "load_config"]

#: Every guard, in the order in which events reach them: what prepares a backward comes before what reads its gradients.
GUARDS: dict[str, type[Guard]] = {
    guard.name: guard for guard in (HostReadGuard, RetainedGraphGuard, AccumulatorResetGuard, ParamStatusGuard)
}

GuardChoice = Annotated[
    HostReadConfig | RetainedGraphConfig | AccumulatorResetConfig | ParamStatusConfig, Field(discriminator="name")
]
SinkChoice = Annotated[LoggingSinkConfig | JsonLinesSinkConfig, Field(discriminator="name")]


class GuardConfig(GuardModel):
    """What zeroguard does with one engine."""

    guards: tuple[GuardChoice, ...] | None = None
    """The guards, each with its options; left out, the ones that the engine needs are chosen."""
    on_violation: Literal["raise", "warn", "record"] = "raise"
    """What a finding of severity error does: ``raise`` a GuardViolation on every rank at the end of the step, ``warn``
    through the logger, or only ``record`` it in ``session.findings`` and the other sinks. What is found when the
    session closes is never raised: another rank could be left waiting."""
    on_unavailable: Literal["raise", "warn"] = "raise"
    """What happens when a guard cannot act on this DeepSpeed release: ``raise`` an error that names the missing
    attribute, or ``warn`` and go on without it."""
    agree: bool = True
    """Whether ranks agree on stopping, with one all-reduce of one byte a rank at the end of each step. Only
    ``on_violation: raise`` on several ranks needs it."""
    max_findings: int = Field(default=1000, ge=1)
    """How many findings, and how many repairs, are kept; later ones are only counted."""
    sinks: tuple[SinkChoice, ...] = (LoggingSinkConfig(),)
    """Where findings go besides ``session.findings``."""

    @field_validator("guards", mode="after")
    @classmethod
    def _once_each(cls, guards: tuple[GuardChoice, ...] | None) -> tuple[GuardChoice, ...] | None:
        names = [choice.name for choice in guards or ()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            # Which of the two would count cannot be seen in the file.
            raise ValueError(
                f"{', '.join(map(repr, twice))} stands there twice; allowed: each guard once, with all its options"
            )
        return guards


def load_config(source: GuardConfig | dict[str, Any] | str | Path | None) -> GuardConfig:
    """A configuration from a model, a dict, a path to a YAML, JSON or TOML file, or None for the automatic choice.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    if source is None:
        return GuardConfig()
    if isinstance(source, GuardConfig):
        return source
    where = ""
    if isinstance(source, str | Path):
        where = f"{source}: "
        source = _read(Path(source))
        if not isinstance(source, dict):
            raise ConfigError(
                f"{where}holds {type(source).__name__} ({source!r}); a mapping of keys to values is needed"
            )
    if not isinstance(source, dict):
        raise ConfigError(
            f"a configuration is a GuardConfig, a dict, a path or None, not {type(source).__name__} ({source!r})"
        )
    try:
        return GuardConfig.model_validate(source)
    except ValidationError as error:
        lines = [f"{where}{line}" for line in _explain(error)]
        raise ConfigError("\n".join(lines)) from error


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a .yaml, .yml, .json or .toml file")
    suffix = path.suffix.lower()
    try:
        text = path.read_text(encoding="utf-8")
        if suffix == ".json":
            return json.loads(text)
        if suffix == ".toml":
            return _toml(text)
        if suffix in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped]

            data = yaml.safe_load(text)
            return {} if data is None else data  # an empty file; not "or", which takes [] and false for one too
    except ImportError as error:
        raise ConfigError(f"{path}: reading this file needs a package that is missing: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {suffix[1:].upper()}: {error}") from error
    except Exception as error:  # yaml's errors share no base with ValueError
        if type(error).__module__.startswith("yaml"):
            raise ConfigError(f"{path}: not valid YAML: {error}") from error
        raise
    raise ConfigError(f"{path}: unknown kind of file {suffix!r}; allowed: .yaml, .yml, .json, .toml")


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


#: What pydantic calls an entry of a list of guards or sinks that does not say which one it is.
_UNNAMED = ("union_tag_not_found", "model_attributes_type")
_NAMES = {"guards": tuple(GUARDS), "sinks": ("logging", "jsonl")}


def _explain(error: ValidationError) -> Iterable[str]:
    """One line an error: the key, the value, what is allowed."""
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "configuration"
        context = item.get("ctx", {})
        allowed = context.get("expected") or context.get("expected_tags")
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in _UNNAMED and item["loc"] and item["loc"][0] in _NAMES:
            names = ", ".join(map(repr, _NAMES[item["loc"][0]]))
            yield f"{key}: {item['input']!r} has no key 'name'; allowed: a mapping with a name out of {names}"
        elif allowed:
            yield f"{key}: {item['input']!r} is not allowed; allowed: {allowed}"
        elif item["type"] == "value_error":
            yield f"{key}: {message}"
        else:
            yield f"{key}: {item['input']!r}: {message}"
