"""The callback that ``ZEROGUARD=1`` adds to every Trainer and Fabric, without a change of code."""

from __future__ import annotations

import logging
from typing import Any

from zeroguard.errors import AlreadyGuardedError
from zeroguard.integrations.base import Keeper
from zeroguard.integrations.lightning import ZeroGuardCallback
from zeroguard.session import Session

__all__ = ["InstalledZeroGuardCallback"]

logger = logging.getLogger("zeroguard")


class InstalledZeroGuardCallback(ZeroGuardCallback):
    """Configured by files and the environment alone. Steps aside for a ZeroGuardCallback in the code and for the code's
    own session, and says nothing where there is no DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self._aside = False
        self._set_up = False

    @property
    def state_key(self) -> str:
        """The explicit callback's, as soon as it is known that there is none. ``Trainer()`` refuses two callbacks with
        state under one key, and asks before this one can look."""
        return super().state_key if self._set_up and not self._aside else type(self).__qualname__

    def setup(self, trainer: Any = None, pl_module: Any = None, stage: str = "", **kwargs: Any) -> None:
        """The first hook with a trainer, and with the callbacks that its module brings."""
        super().setup(trainer, pl_module, stage, **kwargs)
        self._set_up = True
        others = [callback for callback in getattr(trainer, "callbacks", ()) if callback is not self]
        self._aside = any(isinstance(other, ZeroGuardCallback) for other in others)

    def _open(self, keeper: Keeper, candidate: Any, owner: Any) -> Session | None:
        if self._aside:
            return None
        try:
            session = super()._open(keeper, candidate, owner)
        except AlreadyGuardedError:
            return None
        if session is not None:
            session.yields = True
        return session

    def _no_engine(self, owner: Any) -> None:
        logger.debug("zeroguard: ZEROGUARD is set, and there is no DeepSpeed engine to guard")
