"""The entry points that Lightning asks for callbacks, at every ``Trainer()`` and ``Fabric()`` of an environment.

As long as ``ZEROGUARD`` is not set, nothing else may be imported here, so that an installation alone neither slows nor
breaks anybody's run. (``import zeroguard`` imports nothing either.)
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["callbacks"]

_OFF = ("", "0", "false", "no", "off")


def callbacks() -> list[Any]:
    """A guard for every run with ``ZEROGUARD=1``; nothing without."""
    if os.environ.get("ZEROGUARD", "").strip().lower() in _OFF:
        return []
    from zeroguard.integrations.lightning_installed import InstalledZeroGuardCallback

    return [InstalledZeroGuardCallback()]
