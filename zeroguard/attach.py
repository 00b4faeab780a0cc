"""Attach: an engine found, its guards chosen, a session opened on it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroguard import events as ev
from zeroguard.config import GUARDS, GuardConfig, choose
from zeroguard.errors import AlreadyGuardedError, EngineNotFoundError, GuardUnavailableError
from zeroguard.session import Session
from zeroguard.settings import known, resolve

__all__ = ["announce", "engine_of", "guard"]

_MARK = "_zeroguard_session"
_GO_ON = ", or set on_unavailable: warn to go on without this guard."


def guard(
    engine: Any,
    config: GuardConfig | dict[str, Any] | str | Path | None = None,
    *,
    sinks: Sequence[object] = (),
    **overrides: Any,
) -> Session:
    """Guard an engine. LOCAL. Use as ``with zeroguard.guard(engine) as session:``, on every rank of the engine: at the
    end of each optimizer step the ranks agree on whether to go on (unless ``agree`` is false or ``on_violation`` is not
    ``raise``), and a rank that is not guarded would be waited for.

    Args:
        engine: what ``deepspeed.initialize`` returned, or something that leads to it.
        config: a :class:`zeroguard.GuardConfig`, a dict, a path to a YAML, JSON or TOML file, or None. What it does
            not set comes from the environment, a file, the engine's DeepSpeed configuration and the defaults
            (:func:`zeroguard.settings.resolve`); ``session.origins`` says from where.
        sinks: further places for findings and repairs: functions of one argument, or objects with ``write`` and
            ``close``.
        overrides: fields of GuardConfig other than ``sinks``, such as ``on_violation="warn"``. They beat ``config``.

    Raises:
        EngineNotFoundError: there is no DeepSpeed engine; the message says what was looked at.
        AlreadyGuardedError: the engine has an open session.
        GuardUnavailableError: a guard that was asked for cannot act on this engine, or this DeepSpeed release lacks an
            attribute.
        ConfigError: the configuration is wrong.
    """
    return _open(engine, config, sinks, overrides, wrap=True)


def announce(
    engine: Any,
    config: GuardConfig | dict[str, Any] | str | Path | None = None,
    *,
    sinks: Sequence[object] = (),
    **overrides: Any,
) -> tuple[Session, Any]:
    """As :func:`guard`, but nothing of DeepSpeed is wrapped: the caller tells the backend, which is returned too, where
    the loop is (``zeroguard.backends.deepspeed.announced.Announced``).

    Raises:
        GuardUnavailableError: also where this DeepSpeed release cannot be guarded without wrapping.
    """
    session = _open(engine, config, sinks, overrides, wrap=False)
    return session, session._backend


def _open(engine: Any, config: Any, sinks: Sequence[object], overrides: dict[str, Any], *, wrap: bool) -> Session:
    from zeroguard.backends import deepspeed as door

    found = engine_of(engine)
    resolved = resolve(config, engine_config=door.config_of(found), **known(overrides))
    settings = resolved.config
    earlier = vars(found).get(_MARK)
    if earlier is not None and earlier.yields:
        earlier.close()
    elif earlier is not None:
        raise AlreadyGuardedError(
            "this engine already has an open zeroguard session; close it first (session.close()) or leave its "
            "'with' block"
        )
    facts = door.facts_of(found)
    reason = "" if wrap else door.cannot_announce(facts)
    if reason:
        raise GuardUnavailableError(f"wrap=False: {reason}. Leave wrap=True.", guard="accumulator_reset")
    # Before the backend, which already reads what may be missing.
    unavailable = _unavailable(door, found, facts, settings)
    backend = door.open_backend(found, facts)
    session = Session(backend, settings, sinks=sinks, unavailable=unavailable, origins=resolved.origins)
    vars(found)[_MARK] = session
    session._on_close.append(lambda: vars(found).pop(_MARK, None))
    session._on_close.append(lambda: _detach(backend))
    try:
        _attach(session, backend, wrap)
        session.start_heartbeat()
    except BaseException:
        session.close()
        raise
    return session


def engine_of(candidate: Any) -> Any:
    """LOCAL. The DeepSpeed engine that ``candidate`` is or leads to.

    Raises:
        EngineNotFoundError: there is none; the message says what was looked at.
    """
    from zeroguard.backends import deepspeed as door

    found, looked = door.find_engine(candidate)
    if found is None:
        raise EngineNotFoundError(
            f"no DeepSpeed engine in this {type(candidate).__name__}. Looked at: {', '.join(looked)}. "
            f"Give zeroguard.guard what deepspeed.initialize returned{_hint(candidate)}."
        )
    return found


def _hint(candidate: Any) -> str:
    """What else to try, by the name of what was given: none of their packages is imported for it."""
    kinds = {cls.__name__ for cls in type(candidate).__mro__}
    if "Accelerator" in kinds:
        return (
            ". This Accelerator has none: guard it after accelerator.prepare(); ACCELERATE_USE_CPU=true, or no "
            "deepspeed_plugin, leaves DeepSpeed out without a word"
        )
    if "Trainer" in kinds or "Fabric" in kinds:
        return (
            ". This one has none yet: a Trainer builds it in fit() or train(), a Fabric in setup(). Use zeroguard's "
            "callback for it (docs/lightning.md, docs/transformers.md)"
        )
    if "Module" in kinds:
        return ", or what accelerator.prepare, fabric.setup returned, not the model inside it"
    return ""


def _attach(session: Session, backend: Any, wrap: bool) -> None:
    options = {guard_.name: guard_.config for guard_ in session._guards}
    repairing = [name for name, option in options.items() if getattr(option, "action", "repair") == "repair"]
    reads = options.get("host_read")
    backend.before_step = session.before_step
    if reads is not None and reads.detect:
        backend.detect_reads()
    if not wrap:
        backend.announce(session.emit, guards=list(options), repairing=repairing)
        return
    backend.after_step = session.decide
    backend.copies.on_read = lambda what: session.emit(ev.HostRead(what))
    backend.attach(
        session.emit,
        list(session._table),
        guards=list(options),
        repairing=repairing,
        transparent_reads=reads is not None and reads.mode == "transparent",
    )


def _detach(backend: Any) -> None:
    left = backend.detach()
    if left:
        warnings.warn(
            f"zeroguard left {', '.join(left)} as they are: something else replaced them after zeroguard did. "
            "zeroguard's part of them only calls through now.",
            stacklevel=3,
        )


def _unavailable(door: Any, engine: Any, facts: Any, settings: GuardConfig) -> dict[str, str]:
    named = None if settings.automatic else {choice.name for choice in settings.guards or ()}
    never = door.cannot_guard(engine)
    out: dict[str, str] = {}
    for name, cls in GUARDS.items():  # the table of attributes knows no others
        listed = {choice.name for choice in settings.guards or ()}
        if name not in listed and (named is not None or cls.on_request):
            continue
        if choose(cls, facts, cls.Config()).status != "selected":
            continue
        gone = door.missing(engine, name, layout=facts.layout, version=facts.deepspeed_version, offload=facts.offload)
        if not gone and not never:
            continue
        what = "; ".join(f"{item.owner}.{item.name} ({item.lost})" for item in gone)
        text = (
            f"guard {name!r} is unavailable on DeepSpeed {facts.deepspeed_version}: missing {what}. "
            f"Verified releases: {', '.join(door.VERIFIED)}. Install one of them{_GO_ON}"
        )
        if never:
            text = f"guard {name!r} is unavailable on this engine: {never}{_GO_ON}"
        if settings.on_unavailable == "raise":
            raise GuardUnavailableError(text, guard=name, missing=[f"{i.owner}.{i.name}" for i in gone])
        text = text.replace(_GO_ON, ".")
        warnings.warn(text, stacklevel=3)
        out[name] = text
    return out
