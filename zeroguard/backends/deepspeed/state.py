"""What the parts of the backend share: one engine, what was wrapped on it, and where its loop is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zeroguard import events as ev
from zeroguard.backends.base import EngineFacts
from zeroguard.backends.deepspeed.backward import BackwardTracker, Forward
from zeroguard.backends.deepspeed.copies import HostCopies
from zeroguard.backends.deepspeed.params import ParamWatch
from zeroguard.backends.deepspeed.plain import Accumulators
from zeroguard.backends.deepspeed.reading import GradientReader
from zeroguard.backends.deepspeed.wrapping import Patches

__all__ = ["BackendState", "Emit", "Make"]

Emit = Callable[[ev.Event], None]
#: Takes the original method and gives the one that replaces it.
Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def _groups(engine: Any) -> list[Any]:
    """The process groups whose ranks train together: data-parallel, then model-parallel where there is one."""
    group = getattr(engine, "seq_data_parallel_group", None) or getattr(engine, "data_parallel_group", None)
    groups = [] if group is None else [group]
    mpu = getattr(engine, "mpu", None)
    if mpu is not None and hasattr(mpu, "get_model_parallel_group") and mpu.get_model_parallel_world_size() > 1:
        groups.append(mpu.get_model_parallel_group())
    return groups


class BackendState:
    """One engine under guard. LOCAL throughout."""

    def __init__(self, engine: Any, facts: EngineFacts, accelerator: Callable[[], Any]) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.facts = facts
        self.accelerator = accelerator
        self.names = {id(p): name for name, p in engine.module.named_parameters()}
        self.patches = Patches()
        self._current: Forward | None = None
        #: DeepSpeed's own scaling of an output's gradient, and its preprocess of a backward; None before 0.18
        self._per_tensor: Any = None
        self._prologue: Any = None
        self.emit: Emit = lambda event: None
        self.steps = int(getattr(engine, "global_steps", 0))
        self.in_step = False
        self.step_depth = 0
        self.stepped = False
        self._divide_once = False
        #: the loop announces itself (LoopCallback, wrap=False)
        self.wraps_nothing = False
        #: attached after some of a window's micro-batches
        self.joined_in_window = facts.managed_accumulation and (
            int(getattr(engine, "micro_steps", 0)) % facts.accumulation_steps != 0
        )
        self.repairing: frozenset[str] = frozenset()
        self.actions: Mapping[str, str] = {}
        #: zero_grad was called since the last step; the order of gradients since then; idle parameters are put back
        self.cleared = False
        self.order = 0
        self.shelves_idle = False
        self.after_step: Callable[[], None] = lambda: None
        #: called on every rank while the gradients of a window wait for its step; ``step_begins`` is true while it runs
        self.before_step: Callable[[], None] = lambda: None
        self.step_begins = False
        #: whether every backward is seen, with the parameters that it reaches, and every copy to the host
        self.sees_backwards = False
        self.sees_copies = False
        self.groups = _groups(engine)
        self.tracker = BackwardTracker(engine, facts.stage)
        self.copies = HostCopies(self.optimizer, accelerator, own_events=facts.own_copy_events)
        self.params = ParamWatch(engine) if facts.stage == 3 else None
        self.accumulators = Accumulators(engine, self.names)
        self.reading = GradientReader(self)

    def master_weights(self) -> list[Any]:
        """LOCAL, stages 1 to 3 and BF16_Optimizer: the flat fp32 weights that this rank steps, in the order of
        ``reading.partition()``."""
        if self.facts.layout == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        if self.facts.layout == "bf16":
            return list(self.optimizer.fp32_groups_flat_partition)
        with self.copies.inside():
            return list(self.optimizer.single_partition_of_fp32_groups)

    def _discard(self) -> None:
        """zero_grad was called, and the guards have done what they do: what is left is thrown away, as the loop sees
        it."""
        self.accumulators.discard()
        self.tracker.unfinished = False

    def _abort(self, error: BaseException | None) -> None:
        """The running backward ended without its epilogue. See Course."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward is running."""
        return self.tracker.depth > 0 or self.tracker.running is not None
