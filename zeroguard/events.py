"""The lifecycle of a training loop as events.

The backend turns what the engine does into these; guards see nothing else. One frozen, slotted dataclass an
event. Vocabulary: a *graph task* is one run of the autograd engine; a *backward* here is one root graph task (what
``engine.backward`` or ``loss.backward`` starts; the inner tasks of reentrant checkpointing belong to it); a *window* is
everything from one optimizer step, or one zero_grad, to the next optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

__all__ = [
    "BackwardAborted",
    "BackwardBegin",
    "BackwardEnd",
    "BackwardReduce",
    "CheckpointBegin",
    "Close",
    "EditLost",
    "EpochEnd",
    "Event",
    "ForwardBegin",
    "ForwardEnd",
    "GradientClip",
    "GradientEdit",
    "GradientRead",
    "GraphReached",
    "HostRead",
    "LossDivided",
    "MicroBatchEnd",
    "ModeChange",
    "Phase",
    "Raised",
    "ReadInFlight",
    "StepBegin",
    "StepEnd",
    "ZeroGrad",
]


class Phase(Enum):
    """Where a loop is. ``BETWEEN`` is everything outside the engine's own calls.

    A backward and a step inside a forward are legal: Lightning's manual optimization runs the whole training_step
    inside one engine.forward.
    """

    BETWEEN = "between"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class ForwardBegin(Event):
    """The engine's forward is about to run.

    ``forward`` numbers the forwards of this session from 1; ``nested`` is true inside another forward.
    """

    forward: int
    training: bool
    grad: bool
    nested: bool = False


@dataclass(frozen=True, slots=True)
class ForwardEnd(Event):
    """The engine's forward returned."""

    forward: int
    grad: bool = True


@dataclass(frozen=True, slots=True)
class BackwardBegin(Event):
    """A root graph task is about to run, or has just reached the engine's outputs.

    Attributes:
        backward: number of the backward in this session, from 1.
        by: who started it.
        again: backwards since DeepSpeed last reset its hook state (its forward does that); 0 for the first one.
        after_boundary: whether an earlier backward of this window already ran at an accumulation boundary.
        boundary: whether this one runs at an accumulation boundary.
        divisor: what DeepSpeed divides this loss by (its accumulation steps); 1 where it leaves it alone.
    """

    backward: int
    by: Literal["engine.backward", "loss.backward"]
    again: int = 0
    after_boundary: bool = False
    boundary: bool = True
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class LossDivided(Event):
    """A trainer says, before a backward, that it has divided this loss by ``divisor``, its number of micro-batches."""

    by: str
    divisor: int


@dataclass(frozen=True, slots=True)
class GraphReached(Event):
    """A backward reached the outputs of ``forward``; ``again`` earlier backwards did so before it. ``stepped`` says
    that an optimizer step has consumed one of those."""

    backward: int
    forward: int
    again: int
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class BackwardReduce(Event):
    """All gradients of a backward are there; DeepSpeed is about to reduce what is still pending."""

    backward: int
    boundary: bool


@dataclass(frozen=True, slots=True)
class BackwardEnd(Event):
    """A backward and its epilogue are done."""

    backward: int
    boundary: bool


@dataclass(frozen=True, slots=True)
class BackwardAborted(Event):
    """A backward ended without its epilogue. ``raised`` tells an exception from a backward whose gradients all arrived
    and that DeepSpeed never finished; ``reducing``, an exception of DeepSpeed's reduction from one of autograd's.
    ``twice`` are parameters of which that reduction got more than one gradient in this backward."""

    backward: int
    error: str
    raised: bool = True
    reducing: bool = False
    twice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ZeroGrad(Event):
    """The user called zero_grad. ``backwards`` is how many backwards this window had so far."""

    by: Literal["engine", "optimizer", "module"]
    backwards: int


@dataclass(frozen=True, slots=True)
class StepBegin(Event):
    """The ZeRO optimizer is about to consume the gradients. ``step`` counts completed steps; ``by`` is what the loop
    called; ``cleared`` says that it has called zero_grad since the last step, whether or not there was anything to
    clear."""

    step: int
    backwards: int
    by: Literal["engine.step", "optimizer.step"] = "engine.step"
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatchEnd(Event):
    """engine.step() was called where no boundary is: it has counted a micro-batch, and the optimizer has not stepped.
    ``open`` micro-batches of the window are counted by now; 0 where the loop itself says what a boundary is."""

    open: int


@dataclass(frozen=True, slots=True)
class StepEnd(Event):
    """The ZeRO optimizer's step returned. ``applied`` is false where it was skipped (overflow)."""

    step: int
    applied: bool
    pending_forward: bool = False


@dataclass(frozen=True, slots=True)
class ModeChange(Event):
    """module.train(mode) or module.eval() was called."""

    training: bool


@dataclass(frozen=True, slots=True)
class HostRead(Event):
    """Python is about to read host memory that the accelerator fills. ``what`` names it; ``tensors`` are the ones that
    the user named, none for all offloaded gradients."""

    what: str
    tensors: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadInFlight(Event):
    """The host has begun to read memory that a copy from the device was still filling. ``reader`` and ``copier`` are
    the lines that read and that started the copy, ``size`` its bytes. Only with ``detect`` of ``host_read``."""

    reader: str
    copier: str
    size: int


@dataclass(frozen=True, slots=True)
class GradientClip(Event):
    """The user clips by ``by``, a function of PyTorch's, which was given all parameters of the module: ``gradients`` of
    them have a gradient. ``limit`` is what it was told to clip at, if that could be seen."""

    by: str
    gradients: int
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class GradientEdit(Event):
    """The user says that gradients of this window are changed on purpose."""


@dataclass(frozen=True, slots=True)
class GradientRead(Event):
    """The user reads a whole gradient through DeepSpeed (``safe_get_full_grad``). ``backwards`` is how many backwards
    this window had so far: 0 after a step. ``early`` says that the latest one was not at a boundary."""

    what: str
    backwards: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class EditLost(Event):
    """ZeRO-3: the user has written to gathered ``parameters``, and DeepSpeed is about to drop what was written."""

    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EpochEnd(Event):
    """A trainer says that an epoch of the training data is over, and all of its steps."""


@dataclass(frozen=True, slots=True)
class CheckpointBegin(Event):
    """engine.save_checkpoint is about to run."""


@dataclass(frozen=True, slots=True)
class Raised(Event):
    """An exception passed through the engine in ``phase``."""

    phase: Phase
    error: str


@dataclass(frozen=True, slots=True)
class Close(Event):
    """The session is closing; ``failed`` when the loop raised."""

    failed: bool
