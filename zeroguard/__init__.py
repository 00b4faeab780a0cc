"""zeroguard makes a DeepSpeed ZeRO training loop trustworthy.

::

    with zeroguard.guard(engine) as session:
        ...
    print(session.summary())

Importing this package imports neither deepspeed nor lightning nor transformers.
"""

from zeroguard.attach import guard
from zeroguard.config import GuardConfig, load_config
from zeroguard.errors import (
    AlreadyGuardedError,
    ConfigError,
    EngineNotFoundError,
    GuardUnavailableError,
    GuardViolation,
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
    "GuardConfig",
    "GuardUnavailableError",
    "GuardViolation",
    "Repair",
    "Session",
    "SessionClosedError",
    "ZeroGuardError",
    "guard",
    "load_config",
]
