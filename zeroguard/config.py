"""The configuration: one frozen pydantic model that composes the guards' own.

:func:`load_config` reads it from one source; :mod:`zeroguard.settings` from all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from zeroguard.backends.base import Engine, EngineFacts
from zeroguard.errors import ConfigError
from zeroguard.files import parse, read_text
from zeroguard.findings import said, shown
from zeroguard.guards.accumulation import AccumulationGuard
from zeroguard.guards.accumulator_reset import AccumulatorResetGuard
from zeroguard.guards.base import Choice, Guard, GuardModel
from zeroguard.guards.gradient_audit import GradientAuditGuard
from zeroguard.guards.host_read import HostReadGuard
from zeroguard.guards.param_status import ParamStatusGuard
from zeroguard.guards.retained_graph import RetainedGraphGuard
from zeroguard.plugins import Plugin, plugins
from zeroguard.sinks import JsonLinesSinkConfig, LoggingSinkConfig

__all__ = ["GUARDS", "GuardConfig", "choose", "found_plugins", "load_config", "registry", "start"]

#: The built-in guards, in the order in which events reach them: what prepares a backward comes before what reads its
#: gradients.
GUARDS: dict[str, type[Guard]] = {
    guard.name: guard
    for guard in (
        HostReadGuard,
        RetainedGraphGuard,
        AccumulatorResetGuard,
        ParamStatusGuard,
        AccumulationGuard,
        GradientAuditGuard,
    )
}


#: An entry of ``guards`` that is no guard.
AUTOMATIC = "automatic"


class AutomaticConfig(GuardModel):
    """Not a guard: the guards that the engine needs are chosen, as without a list; the other entries give options for
    those of them that are chosen."""

    name: Literal["automatic"] = "automatic"
    """The entry's name."""


def found_plugins() -> tuple[Plugin, ...]:
    """Every guard that another distribution brings, the broken ones too. Imports them on the first call."""
    return plugins((*GUARDS, AUTOMATIC))


def registry() -> dict[str, type[Guard]]:
    """Every guard that can be chosen, by name: the built-in ones, then those of plugins.

    Imports the plugins on the first call, which warns of each one that cannot be used.
    """
    return {**GUARDS, **_healthy()}


@cache
def _healthy() -> dict[str, type[Guard]]:
    for plugin in found_plugins():
        if plugin.guard is None:
            warnings.warn(f"zeroguard: {plugin.describe()}. Other guards are not affected.", stacklevel=2)
    return {plugin.name: plugin.guard for plugin in found_plugins() if plugin.guard is not None}


def choose(guard: type[Guard], facts: EngineFacts, options: Any) -> Choice:
    """``guard.choose(facts, options)``; for a plugin's that raises, not applicable."""
    try:
        choice = guard.choose(facts, options)
        if not isinstance(choice, Choice):
            raise TypeError(f"it returned {choice!r}, not a zeroguard.guards.base.Choice")
    except Exception as error:
        return _left_out(guard, "choose()", error)
    if not facts.trains and not (guard.evaluates and choice.status == "selected"):
        return Choice("not_needed", "this engine has no optimizer; it only evaluates")
    return choice


def start(guard: type[Guard], options: Any, engine: Engine, choice: Choice) -> tuple[Choice, Guard | None]:
    """The guard, made for this engine, beside the choice that selected it; for a plugin's that raises, not applicable
    and none."""
    try:
        made = guard(options, engine)
        made.handlers()
    except Exception as error:
        return _left_out(guard, "making", error), None
    return choice, made


def _left_out(guard: type[Guard], what: str, error: Exception) -> Choice:
    """For ``error`` out of ``what`` of a guard: one of a plugin is left out, with a warning that names its
    distribution, so that the other guards work; for a built-in one the error is raised again."""
    who = [plugin.distribution for plugin in found_plugins() if plugin.guard is guard]
    if not who:
        raise error
    reason = f"{what} of {guard.__name__}, from {who[0]}, raised {said(error)}"
    warnings.warn(
        f"zeroguard: guard {guard.name!r} is left out: {reason}. Other guards are not affected.", stacklevel=3
    )
    return Choice("not_applicable", reason)


@cache
def _guard_models() -> TypeAdapter[Any]:
    return _union([AutomaticConfig, *(guard.Config for guard in registry().values())])


@cache
def _sink_models() -> TypeAdapter[Any]:
    return _union((LoggingSinkConfig, JsonLinesSinkConfig))


def _union(models: Iterable[type[GuardModel]]) -> TypeAdapter[Any]:
    union: Any = tuple(models)
    return TypeAdapter(Annotated[Union[union], Field(discriminator="name")])  # noqa: UP007 (of a tuple)


def _guard(value: Any) -> Any:
    """One entry of ``guards`` as its guard's model."""
    name = value.get("name") if isinstance(value, dict) else None
    for plugin in found_plugins():
        if plugin.name == name and plugin.guard is None and name not in GUARDS:
            raise ValueError(plugin.describe())
    return _guard_models().validate_python(value)


def _sink(value: Any) -> Any:
    return _sink_models().validate_python(value)


@dataclass(frozen=True)
class _Named:
    """Makes of a field of type Any a choice by name, out of models that are looked up when the first value is
    validated, or the schema asked for: guards may come from plugins.

    Readers of annotations, such as jsonargparse, see Any and leave the value to pydantic.
    """

    validate: Callable[[Any], Any]
    models: Callable[[], TypeAdapter[Any]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self.models().core_schema)


GuardChoice = Annotated[Any, _Named(_guard, _guard_models)]
SinkChoice = Annotated[Any, _Named(_sink, _sink_models)]


class GuardConfig(GuardModel):
    """What zeroguard does with one engine."""

    # Sequence: jsonargparse appends to no tuple ("--config.guards+=..."). The values are tuples all the same.
    guards: Sequence[GuardChoice] | None = None
    """The guards, each with its options; left out, the ones that the engine needs are chosen. With an entry named
    ``automatic`` they are chosen too, and the other entries only give options."""
    on_violation: Literal["raise", "warn", "record"] = "raise"
    """What a finding of severity error does: ``raise`` a GuardViolation on every rank at the end of the step, ``warn``
    through the logger, or only ``record`` it in ``session.findings`` and the other sinks. What is found when the
    session closes is never raised: another rank could be left waiting."""
    on_unavailable: Literal["raise", "warn"] = "raise"
    """What happens when a guard cannot act on this DeepSpeed release: ``raise`` an error that names the missing
    attribute, or ``warn`` and go on without it."""
    on_guard_error: Literal["disable", "raise"] = "disable"
    """What happens when zeroguard itself breaks: a guard or a sink raises. ``disable``: a finding of severity warning
    holds the traceback, the guard is switched off on all ranks together, and training goes on as if it had never been
    there. ``raise``: the exception comes through, for who writes a guard or a sink."""
    agree: bool = True
    """Whether ranks agree on stopping, with one all-reduce of eight bytes a rank at the end of each step, which also
    compares what they did. Only ``on_violation: raise`` on several ranks needs it. With ``false`` zeroguard does not
    communicate, by the heartbeat either, but for ``gradient_audit`` at an audited step."""
    agree_every_n_steps: int = Field(default=1, ge=1)
    """Ranks agree at the end of each n-th step, the same n on all of them. With more than 1 a finding stops the run up
    to n - 1 steps later, and what ranks did is compared at the n-th steps only."""
    heartbeat: bool = True
    """Whether each rank says in the job's store, once a second and from a thread of its own, where its loop is, so that
    an exception out of a collective can name the rank that is missing. Needs ``agree: true``, several ranks and a
    TCPStore, as torchrun and DeepSpeed's launcher set it up."""
    max_findings: int = Field(default=1000, ge=1)
    """How many findings, and how many repairs, are kept; later ones are only counted."""
    # A list of dicts: what jsonargparse appends to, and can write into the configuration that LightningCLI saves.
    sinks: Sequence[SinkChoice] = Field(default=[{"name": "logging"}], validate_default=True)
    """Where findings go besides ``session.findings``."""

    @field_validator("guards", "sinks", mode="after")
    @classmethod
    def _frozen(cls, items: Sequence[Any] | None) -> tuple[Any, ...] | None:
        return None if items is None else tuple(items)

    @property
    def automatic(self) -> bool:
        """Whether the guards that the engine needs are chosen."""
        return self.guards is None or any(choice.name == AUTOMATIC for choice in self.guards)

    @field_validator("guards", mode="after")
    @classmethod
    def _once_each(cls, guards: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        names = [choice.name for choice in guards or ()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            # Which of the two would count cannot be seen in the file.
            raise ValueError(
                f"{', '.join(map(repr, twice))} stands there twice; allowed: each guard once, with all its options"
            )
        return guards


def load_config(source: GuardConfig | dict[str, Any] | str | Path | None) -> GuardConfig:
    """A configuration from one source alone: a model, a dict, a path to a YAML, JSON or TOML file, or None for the
    defaults. No environment variable and no other file is read; :func:`zeroguard.settings.resolve` does that.

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
        source = read_file(Path(source))
    elif not isinstance(source, dict):
        raise ConfigError(wrong_kind(source))
    try:
        return GuardConfig.model_validate(source)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}{line}" for line in explain(error))) from error


def wrong_kind(source: object) -> str:
    """The text for something that cannot hold a configuration."""
    return f"a configuration is a GuardConfig, a dict, a path or None, not {type(source).__name__} ({shown(source)})"


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML, JSON or TOML file, not validated.

    Raises:
        ConfigError: naming the file.
    """
    data = parse(path, read_text(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__} ({shown(data)}); a mapping of keys to values is needed")
    return data


#: What pydantic calls an entry of a list of guards or sinks that does not say which one it is, and no list at all.
_UNNAMED = ("union_tag_not_found", "model_attributes_type")
_NO_LIST = ("is_instance_of", "sequence_str")


def explain(error: ValidationError) -> Iterable[str]:
    """One line an error: the key, the value, what is allowed."""
    for item in error.errors(include_url=False):
        place = item["loc"]
        key = ".".join(str(part) for part in place) or "configuration"
        context = item.get("ctx", {})
        allowed = context.get("expected") or context.get("expected_tags")
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in _UNNAMED and _names(place):
            names = ", ".join(map(repr, _names(place)))
            yield f"{key}: {shown(item['input'])} has no key 'name'; allowed: a mapping with a name out of {names}"
        elif item["type"] in _NO_LIST and len(place) == 1:
            names = ", ".join(map(repr, _names(place)))
            yield f"{key}: {shown(item['input'])} is not a list; allowed: a list of mappings with a name out of {names}"
        elif allowed:
            yield f"{key}: {shown(item['input'])} is not allowed; allowed: {allowed}"
        elif item["type"] == "value_error":
            yield f"{key}: {message}"
        else:
            yield f"{key}: {shown(item['input'])}: {message}"


def _names(place: Sequence[int | str]) -> tuple[str, ...]:
    """The names that an entry of the list at this place may have."""
    if place and place[0] == "guards":
        return (AUTOMATIC, *registry())
    return ("logging", "jsonl") if place and place[0] == "sinks" else ()
