"""Everything a guard may know of, or ask from, a training engine.

Every method says LOCAL (this rank alone, no communication) or COLLECTIVE, and the ZeRO stages it holds for. Nothing
here is COLLECTIVE so far: what zeroguard repairs, each rank repairs for its own partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

__all__ = [
    "Action",
    "BackwardState",
    "Done",
    "Engine",
    "EngineFacts",
    "Evidence",
    "GradientAudit",
    "Mismatch",
    "ParamStatus",
    "Request",
    "Switched",
    "UpdateAudit",
]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine at attach; guards are chosen from it.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        offload_optimizer: device of the offloaded optimizer, ``none``, ``cpu`` or ``nvme``.
        pin_memory: whether the offloaded buffers are page-locked.
        overlap_comm: whether gradients are reduced on a stream of their own.
        accumulation_steps: micro-batches a step, as configured.
        managed_accumulation: whether DeepSpeed, not the caller, decides the accumulation boundary.
        dtype: the parameters' dtype, such as ``bfloat16``.
        world_size: data-parallel ranks.
        rank: this process's global rank.
        accelerator: DeepSpeed's name of the device, such as ``cuda``.
        resolves_data_dependency: whether the accelerator itself makes the host wait for pending copies.
        optimizer: class name of ``engine.optimizer``.
        deepspeed_version: release of DeepSpeed.
        torch_version: release of torch.
        output_hooks: whether DeepSpeed prepares a backward from hooks on the forward's outputs (from 0.18).
        trains: whether there is an optimizer to step; an engine that Lightning makes for test or predict has none.
        own_copy_events: whether DeepSpeed keeps events of its pending offload copies (from 0.19.8).
        loss_scale: ``none``, ``static``, or ``dynamic``, where skipped updates are how the scale is found.
        unasked_clipping: the norm at which gradients are clipped although the configuration does not mention clipping;
            0 where it does, and where nothing is clipped.
        adds_at_boundary: whether backwards at a boundary add up without an offloaded optimizer (before 0.17).
        checks_gradients: whether DeepSpeed itself leaves a step out where a gradient is not finite.
    """

    stage: int
    offload_optimizer: str = "none"
    pin_memory: bool = False
    overlap_comm: bool = False
    accumulation_steps: int = 1
    managed_accumulation: bool = True
    dtype: str = "float32"
    world_size: int = 1
    rank: int = 0
    accelerator: str = "cpu"
    resolves_data_dependency: bool = True
    optimizer: str = ""
    deepspeed_version: str = ""
    torch_version: str = ""
    output_hooks: bool = True
    own_copy_events: bool = False
    trains: bool = True
    loss_scale: str = "none"
    unasked_clipping: float = 0.0
    adds_at_boundary: bool = False
    checks_gradients: bool = True

    @property
    def offload(self) -> bool:
        """Whether the optimizer's state and gradients live outside the accelerator."""
        return self.offload_optimizer != "none"

    @property
    def layout(self) -> int | str:
        """Where gradients live: the stage, or ``bf16`` for BF16_Optimizer, which is a ZeRO-1 of its own."""
        return "bf16" if self.optimizer == "BF16_Optimizer" else self.stage

    @property
    def replaces_at_boundary(self) -> bool:
        """Whether a further backward at a boundary takes the place of the one before; measured, see rhythm.md."""
        if self.adds_at_boundary and not self.offload:
            return False
        return self.layout == 1 or (self.layout == 2 and not (self.offload and self.accumulation_steps > 1))

    def describe(self) -> str:
        """One phrase for texts, such as ``ZeRO-2, optimizer on cpu (pinned), bfloat16, 8 ranks``."""
        where = (
            f", optimizer on {self.offload_optimizer}{' (pinned)' if self.pin_memory else ''}" if self.offload else ""
        )
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"ZeRO-{self.stage}{where}, {self.dtype}, {ranks}"


class Action(Enum):
    """Repairs that a guard can ask for; the value is the name of the method of :class:`Engine`."""

    REARM_BACKWARD = "rearm_backward"
    RESTORE_COUNTERS = "restore_counters"
    REST_BACKWARD = "rest_backward"
    DROP_UNFINISHED = "drop_unfinished"
    CARRY = "carry"
    FLUSH_PENDING = "flush_pending"
    SETTLE = "settle"
    CLEAR = "clear"
    DROP_IDLE = "drop_idle"
    SHELVE_IDLE = "shelve_idle"
    UNSHELVE_IDLE = "unshelve_idle"
    RELEASE_IN_FLIGHT = "release_in_flight"
    WAIT_COPIES = "wait_copies"
    DIVIDE_ONCE = "divide_once"
    SAMPLE_GRADIENTS = "sample_gradients"
    SPOIL_SAMPLES = "spoil_samples"
    FORGET_SAMPLES = "forget_samples"
    END_SAMPLES = "end_samples"


@dataclass(frozen=True, slots=True)
class Request:
    """A repair that a guard asks the session for."""

    action: Action
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """What a repair changed. ``routine`` ones are counted but not listed in ``session.repairs``."""

    kind: str
    parameters: tuple[str, ...] = ()
    detail: str = ""
    routine: bool = False


@dataclass(frozen=True, slots=True)
class BackwardState:
    """The state that a backward leaves behind. At rest every number is 0 and ``unfinished`` is false.

    Attributes:
        depth: backwards that DeepSpeed believes to be running; not counted are those that it entered once more because
            one loss was made of several forwards, which is harmless.
        hooks: parameter gradients that it still expects in the backward that it believes to be running.
        counters: modules whose backward counters are not zero (ZeRO-3).
        unfinished: a backward began and its epilogue never ran.
        half_reduced: gradients of such a backward stand in DeepSpeed's buckets, or are marked there as reduced.
    """

    depth: int = 0
    hooks: int = 0
    counters: int = 0
    unfinished: bool = False
    half_reduced: bool = False

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left over that a healthy loop would not leave."""
        return self.depth == 0 and self.hooks == 0 and not self.unfinished


@dataclass(frozen=True, slots=True)
class ParamStatus:
    """ZeRO-3 parameters that are not simply partitioned or gathered and at rest.

    Attributes:
        in_flight: parameters whose status is INFLIGHT.
        registry: parameters in the coordinator's registry of running gathers.
        orphans: INFLIGHT and not in the registry: their gather's handle is gone.
        contradictions: in the registry but not INFLIGHT.
        active: parameters that a submodule still claims.
        gathered: (name, bytes) of parameters that are AVAILABLE although not persistent.
    """

    in_flight: tuple[str, ...] = ()
    registry: int = 0
    orphans: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    gathered: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an engine that is not wrapped shows of steps and backwards that nobody announced.

    Attributes:
        gradients: parameter gradients that arrived outside an announced backward, since the last look.
        steps: engine.step() calls that stepped the optimizer, since the last look.
    """

    gradients: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A parameter whose consumed gradient is not what autograd delivered.

    Attributes:
        name: the parameter.
        kind: ``lost``, ``stale``, ``overwritten``, ``duplicated``, ``scaled``, ``not_reduced``, ``missing_on_rank``,
            ``not_finite`` or ``differs``.
        error: norm of the difference over the larger of both norms, of the sampled elements of this rank.
        factor: consumed over delivered, where one number fits all samples.
    """

    name: str
    kind: str
    error: float
    factor: float | None = None


@dataclass(frozen=True, slots=True)
class GradientAudit:
    """One comparison.

    Attributes:
        audited: parameters of which this rank compared samples.
        mismatches: those that differ by more than rounding.
        skipped: why nothing was compared; empty where it was.
        tolerance: the relative error that rounding can make here.
        edited: parameters whose low-precision weight is, before the step, not the master weight, rounded.
    """

    audited: int = 0
    mismatches: tuple[Mismatch, ...] = ()
    skipped: str = ""
    tolerance: float = 0.0
    edited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Switched:
    """Parameters whose requires_grad says another thing than the optimizer does.

    Attributes:
        frozen: not to be trained, and moved by the optimizer.
        unfrozen: to be trained, frozen when the engine was guarded, and not in the optimizer.
        left_out: to be trained, without a gradient in this window, and moved by the optimizer all the same.
    """

    frozen: tuple[str, ...] = ()
    unfrozen: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateAudit:
    """What a step did to the sampled weights of this rank.

    Attributes:
        unmoved: parameters with a gradient and a learning rate whose master weights did not change.
        not_cast: parameters whose low-precision copy is not the master weight, rounded.
    """

    unmoved: tuple[str, ...] = ()
    not_cast: tuple[str, ...] = ()


class Engine(Protocol):
    """A training engine as guards see it. Implemented by the DeepSpeed backend and by ``zeroguard.testing``.

    Attributes:
        facts: what is known of it since attach.
        groups: the process groups whose ranks train together, for the agreement on stopping; empty on one rank.
        steps: optimizer steps completed.
        actions: guard -> its ``action`` (``repair`` for one without that option), of all guards that act on it; set by
            the session.
    """

    facts: EngineFacts
    groups: Sequence[Any]
    steps: int
    actions: Mapping[str, str]

    @property
    def busy(self) -> bool:
        """LOCAL: whether a forward or a backward is running."""
        ...

    def loop_raised(self, error: BaseException) -> None:
        """LOCAL: the loop ends by this exception, which may have left a loss.backward() unseen."""
        ...

    def switch_off(self, guard: str) -> None:
        """LOCAL, between two steps: this guard broke; do without it what is done without it."""
        ...

    # -- reads ---------------------------------------------------------------------------------------------------

    def backward_state(self) -> BackwardState:
        """LOCAL, stages 1 to 3: what the backwards so far have left behind. No device synchronization."""
        ...

    def param_status(self, *, scan: bool = True) -> ParamStatus:
        """LOCAL, stage 3: a look at the registry, and with ``scan`` one pass over the parameters."""
        ...

    def idle_parameters(self) -> tuple[str, ...]:
        """LOCAL, stages 1 to 3: trainable parameters whose gradient did not arrive in this window."""
        ...

    def stale_parameters(self) -> tuple[str, ...]:
        """LOCAL, stages 1 to 3: idle parameters whose accumulators still hold an earlier window's gradient."""
        ...

    def uncleared_parameters(self) -> tuple[str, ...]:
        """LOCAL, stages 1 to 3: parameters of which zero_grad threw a gradient away in this window, and step() would
        consume it all the same."""
        ...

    def partitioned_parameters(self, shape: Sequence[int]) -> tuple[str, ...]:
        """LOCAL, stage 3: parameters of that shape that are partitioned now, and so empty; frozen ones, if there are
        any."""
        ...

    def lost_parameters(self) -> tuple[str, ...]:
        """LOCAL, stages 1 and 2 offloaded, 3 offloaded: reached in this window, but not what step() consumes."""
        ...

    def audit_gradients(self, elements: int, seed: int) -> GradientAudit:
        """COLLECTIVE, stages 0 to 3, right before the step of every rank: compare the samples of this window (made
        with the same arguments) with what the optimizer is about to consume."""
        ...

    def audit_update(self) -> Callable[[], UpdateAudit]:
        """LOCAL, stages 1 to 3, right after an audited step that was applied: compares the sampled weights, before and
        after. To call what it returns waits for the device; later it need not wait."""
        ...

    def switched_parameters(self, *, every: bool = True) -> Switched:
        """LOCAL, stages 0 to 3, before a step: one pass over requires_grad of all parameters, or, without ``every``, of
        those that no backward of this window reached (none where that is not known: stage 0)."""
        ...

    def spoiled_step(self, *, last: bool = False) -> int:
        """LOCAL, stages 0 to 3, not with NVMe: look at samples of the master weights; the first look, before the first
        step, tells which are finite then. Returns the step after which one no longer was, 0 for none so far. On an
        accelerator the answer comes with the next look, which waits for nothing; ``last``: with no look."""
        ...

    def gradient_order(self) -> int:
        """LOCAL, stages 1 and 2 on several ranks: a number of 31 bits, at least 1, that stands for the parameters whose
        gradients entered DeepSpeed's reduction in this window, in their order; 0 where it is not known, or may differ
        between ranks."""
        ...

    def grad_norm(self) -> float | None:
        """LOCAL, stages 0 to 3: the last step's global gradient norm, before clipping, if DeepSpeed computed one."""
        ...

    def grad_norms(self) -> dict[str, float]:
        """COLLECTIVE over the data-parallel group, stages 0 to 3: name -> 2-norm of the gradient that waits for the
        step. Raises GradientsUnavailableError on every rank."""
        ...

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """COLLECTIVE over the data-parallel group, stages 0 to 3: name -> that gradient, whole, in fp32. Raises
        GradientsUnavailableError on every rank, and ConfigError for a name that the model does not have."""
        ...

    # -- repairs -------------------------------------------------------------------------------------------------

    def rearm_backward(self) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: let DeepSpeed treat the running backward as a micro-step of its own."""
        ...

    def restore_counters(self, forward: int) -> Sequence[Done]:
        """LOCAL, stage 3: give the modules back the backward visits that this forward had announced."""
        ...

    def rest_backward(self) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: put the backward state back to rest at a step boundary."""
        ...

    def drop_unfinished(self) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: forget the half-reduced gradients of a backward that raised."""
        ...

    def carry(self) -> Sequence[Done]:
        """LOCAL, stages 1 and 2: set aside what earlier boundary backwards of this window produced, to be added."""
        ...

    def flush_pending(self, boundary: bool) -> Sequence[Done]:
        """Before DeepSpeed's epilogue. Same collectives as DeepSpeed's own reduction; stage 1 with overlap_comm:
        reduce gradients that only non-boundary backwards produced."""
        ...

    def settle(self, boundary: bool) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: after a backward, make the accumulators hold this window's sum and nothing else."""
        ...

    def clear(self) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: clear what ZeRO accumulated outside ``.grad``, as zero_grad promises."""
        ...

    def drop_idle(self) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: before a step, zero what idle parameters would be stepped with."""
        ...

    def shelve_idle(self) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: before a step, copy the master weights and optimizer state of idle parameters."""
        ...

    def unshelve_idle(self) -> Sequence[Done]:
        """LOCAL, stages 1 to 3: after the step, put those copies back."""
        ...

    def release_in_flight(self) -> Sequence[Done]:
        """LOCAL, stage 3: wait for gathers that were already launched and release their parameters."""
        ...

    def sample_gradients(self, elements: int, seed: int) -> Sequence[Done]:
        """LOCAL, stages 0 to 3: the backward that is beginning is sampled, ``elements`` of each parameter (0 for all)
        at the places that ``seed`` gives on every rank."""
        ...

    def spoil_samples(self, why: str) -> Sequence[Done]:
        """LOCAL: the samples of this window cannot be judged, on no rank."""
        ...

    def forget_samples(self) -> Sequence[Done]:
        """LOCAL: zero_grad; the window's samples begin again."""
        ...

    def end_samples(self) -> Sequence[Done]:
        """LOCAL: the step is over; no hook stays."""
        ...

    def divide_once(self) -> Sequence[Done]:
        """LOCAL, stages 0 to 3: let the engine.backward that is beginning leave the loss as the trainer divided it."""
        ...

    def wait_copies(self, tensors: Sequence[Any] = (), wait: str = "event") -> Sequence[Done]:
        """LOCAL: return once the copies that fill these host tensors (all offloaded gradients, if none is given) have
        landed. Tensors that DeepSpeed does not fill are waited for on the current stream."""
        ...
