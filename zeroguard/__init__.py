"""zeroguard makes a DeepSpeed ZeRO training loop trustworthy.

::

    with zeroguard.guard(engine) as session:
        ...
    print(session.summary())

Importing this package imports nothing else: each name is fetched when it is first used. Lightning asks an entry point
of this package at every ``Trainer()`` of an environment in which it is installed; that must cost, and break, nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroguard.attach import guard
    from zeroguard.config import GuardConfig, load_config
    from zeroguard.errors import (
        AlreadyGuardedError,
        ConfigError,
        EngineNotFoundError,
        GradientsUnavailableError,
        GuardUnavailableError,
        GuardViolation,
        NotGuardedError,
        SessionClosedError,
        ZeroGuardError,
    )
    from zeroguard.findings import Finding, Repair
    from zeroguard.session import Session

__version__ = "0.1.0"

__all__ = [
    "AlreadyGuardedError",
    "ConfigError",
    "EngineNotFoundError",
    "Finding",
    "GradientsUnavailableError",
    "GuardConfig",
    "GuardUnavailableError",
    "GuardViolation",
    "NotGuardedError",
    "Repair",
    "Session",
    "SessionClosedError",
    "ZeroGuardError",
    "guard",
    "load_config",
]

_HOMES = {
    "guard": "attach",
    "GuardConfig": "config",
    "load_config": "config",
    "Finding": "findings",
    "Repair": "findings",
    "Session": "session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zeroguard' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"zeroguard.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
