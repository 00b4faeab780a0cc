"""A plugin that was written for engine facts that no longer exist."""

from __future__ import annotations

from typing import Any, Literal

from zeroguard.guards.base import Choice, Guard, GuardModel


class ParamOrderConfig(GuardModel):
    """Options of the guard ``param_order``."""

    name: Literal["param_order"] = "param_order"
    """The guard's name."""


class ParamOrderGuard(Guard):
    """Loads, and fails when it is chosen."""

    name = "param_order"
    Config = ParamOrderConfig

    @classmethod
    def choose(cls, facts: Any, config: Any) -> Choice:
        """Raises AttributeError."""
        return Choice("selected", facts.order_of_parameters)

    def handlers(self) -> dict[Any, Any]:
        """Never asked."""
        return {}
