"""Test guards and training loops without a GPU, and mostly without DeepSpeed.

A guard is a state machine: events in, findings and repairs out. :class:`Script` writes the events of a loop,
:func:`replay` feeds them through a real session on a :class:`ScriptedEngine`, :func:`assert_finding` and
:func:`assert_silent` judge what came out::

    loop = Script().forward().backward().backward().step()
    session = replay(loop.events, guards=[{"name": "retained_graph", "action": "detect"}])
    assert_finding(session, guard="retained_graph", kind="second_backward", severity="error")

:func:`scripted_accelerator` is for tests with a DeepSpeed engine: with it, on a CPU, host reads of offloaded
gradients race every time. Importing this module imports neither deepspeed nor lightning nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as fields_of
from typing import Any, Literal

from zeroguard import events as ev
from zeroguard._scripted import ScriptedAccelerator, scripted_accelerator
from zeroguard.backends.base import (
    Action,
    BackwardState,
    Done,
    EngineFacts,
    GradientAudit,
    ParamStatus,
    Switched,
    UpdateAudit,
)
from zeroguard.config import GuardConfig, load_config
from zeroguard.errors import GradientsUnavailableError
from zeroguard.findings import Finding, Severity
from zeroguard.session import Session

__all__ = [
    "Script",
    "ScriptedAccelerator",
    "ScriptedEngine",
    "assert_finding",
    "assert_silent",
    "facts",
    "replay",
    "scripted_accelerator",
]

By = Literal["engine.backward", "loss.backward"]


def facts(**overrides: Any) -> EngineFacts:
    """Facts of an engine on which every guard for stages 1 and 2 has work: ZeRO-2, offloaded and pinned, on one GPU.

    ``overrides`` are fields of :class:`zeroguard.backends.base.EngineFacts`.
    """
    return EngineFacts(
        **{
            "stage": 2,
            "offload_optimizer": "cpu",
            "pin_memory": True,
            "dtype": "bfloat16",
            "accelerator": "cuda",
            "resolves_data_dependency": False,
            "optimizer": "DeepSpeedZeroOptimizer_Stage3" if overrides.get("stage") == 3 else "DeepSpeedZeroOptimizer",
            "deepspeed_version": "0.19.8",
            "own_copy_events": True,
            **overrides,
        }
    )


#: What a repair reports when nothing was put into ``ScriptedEngine.done`` and it has something to put right.
_KINDS = {
    Action.REARM_BACKWARD: "backward_rearmed",
    Action.RESTORE_COUNTERS: "module_counters_restored",
    Action.REST_BACKWARD: "backward_state_reset",
    Action.DROP_UNFINISHED: "unfinished_backward_dropped",
    Action.SETTLE: "gradient_recovered",
    Action.CLEAR: "accumulators_cleared",
    Action.DROP_IDLE: "stale_gradient_dropped",
    Action.RELEASE_IN_FLIGHT: "gather_released",
    Action.DIVIDE_ONCE: "divided_once",
}


class ScriptedEngine:
    """An :class:`zeroguard.backends.base.Engine` whose state a test writes down. LOCAL, all stages.

    Repairs change the state as DeepSpeed's would: ``rest_backward`` and ``drop_unfinished`` put ``state`` to
    rest, ``release_in_flight`` empties the registry of ``status`` but leaves its orphans and contradictions,
    ``drop_idle`` empties ``stale``, ``settle`` empties ``lost`` at a boundary, ``clear`` empties both.

    Attributes:
        facts: what the guards are chosen from.
        state: answer of :meth:`backward_state`.
        status: answer of :meth:`param_status`.
        stale: answer of :meth:`stale_parameters`.
        uncleared: answer of :meth:`uncleared_parameters`.
        partitioned: shape -> answer of :meth:`partitioned_parameters`.
        lost: answer of :meth:`lost_parameters`.
        idle: answer of :meth:`idle_parameters`.
        switched: answer of :meth:`switched_parameters`.
        spoiled: answer of :meth:`spoiled_step`.
        order: answer of :meth:`gradient_order`.
        norm: answer of :meth:`grad_norm`.
        norms: answer of :meth:`grad_norms`; None, as after a step, makes it raise.
        sticky: repairs change nothing.
        audit: answer of :meth:`audit_gradients`.
        update: answer of :meth:`audit_update`.
        requests: every repair asked for, in order: (name of the action, its arguments).
        done: what a repair returns, by name of the action. Not listed: one ``Done`` of the kind that
            DeepSpeed's backend reports if there was something to put right, else none; always none for
            ``carry``, ``flush_pending``, ``wait_copies`` and the two of the shelf.
    """

    def __init__(
        self,
        facts_: EngineFacts | None = None,
        *,
        state: BackwardState | None = None,
        status: ParamStatus | None = None,
        stale: tuple[str, ...] = (),
        lost: tuple[str, ...] = (),
        idle: tuple[str, ...] = (),
        norms: dict[str, float] | None = None,
        sticky: bool = False,
        done: dict[str, list[Done]] | None = None,
    ) -> None:
        self.facts = facts() if facts_ is None else facts_
        self.groups: tuple[Any, ...] = ()
        self.steps = 0
        self.busy = False
        self.state = state or BackwardState()
        self.status = status or ParamStatus()
        self.stale, self.lost, self.idle = stale, lost, idle
        self.norms = norms
        self.sticky = sticky
        self.requests: list[tuple[str, tuple[Any, ...]]] = []
        self.done = dict(done or {})
        self.audit, self.update = GradientAudit(), UpdateAudit()
        self.actions: Mapping[str, str] = {}
        self.switched = Switched()
        self.spoiled = 0
        self.order = 0
        self.norm: float | None = None
        self.uncleared: tuple[str, ...] = ()
        self.partitioned: dict[tuple[int, ...], tuple[str, ...]] = {}

    @property
    def asked(self) -> list[str]:
        """The names in ``requests``, in order."""
        return [name for name, _ in self.requests]

    # -- reads ---------------------------------------------------------------------------------------------------------

    def backward_state(self) -> BackwardState:
        return self.state

    def param_status(self, *, scan: bool = True) -> ParamStatus:
        return self.status

    def grad_norm(self) -> float | None:
        """LOCAL. The answer that a test wrote into ``norm``."""
        return self.norm

    def switched_parameters(self, *, every: bool = True) -> Switched:
        return self.switched

    def spoiled_step(self, *, last: bool = False) -> int:
        """LOCAL. The answer that a test wrote into ``spoiled``."""
        return self.spoiled

    def gradient_order(self) -> int:
        return self.order

    def grad_norms(self) -> dict[str, float]:
        """LOCAL here. The answer that a test wrote into ``norms``."""
        if self.norms is None:
            raise GradientsUnavailableError("scripted: there is no gradient to read")
        return dict(self.norms)

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """LOCAL here. Nothing is computed: it raises, whatever ``norms`` are."""
        raise GradientsUnavailableError("scripted: there are no tensors")

    def idle_parameters(self) -> tuple[str, ...]:
        return self.idle

    def stale_parameters(self) -> tuple[str, ...]:
        return self.stale

    def uncleared_parameters(self) -> tuple[str, ...]:
        return self.uncleared

    def partitioned_parameters(self, shape: Sequence[int]) -> tuple[str, ...]:
        return self.partitioned.get(tuple(shape), ())

    def lost_parameters(self) -> tuple[str, ...]:
        return self.lost

    # -- repairs -------------------------------------------------------------------------------------------------------

    def _repair(
        self, action: Action, *args: Any, needed: bool = True, names: tuple[str, ...] = (), routine: bool = False
    ) -> list[Done]:
        self.requests.append((action.value, args))
        if action.value in self.done:
            return list(self.done[action.value])
        return [Done(_KINDS[action], names, "Scripted.", routine)] if needed and action in _KINDS else []

    def _change(self, **values: Any) -> None:
        if not self.sticky:
            for name, value in values.items():
                setattr(self, name, value)

    def rearm_backward(self) -> Sequence[Done]:
        return self._repair(Action.REARM_BACKWARD)

    def restore_counters(self, forward: int) -> Sequence[Done]:
        return self._repair(Action.RESTORE_COUNTERS, forward, needed=self.facts.stage == 3)

    def rest_backward(self) -> Sequence[Done]:
        routine = self.state.at_rest
        self._change(state=BackwardState())
        return self._repair(Action.REST_BACKWARD, routine=routine)

    def drop_unfinished(self) -> Sequence[Done]:
        self._change(state=BackwardState(counters=self.state.counters))
        return self._repair(Action.DROP_UNFINISHED)

    def carry(self) -> Sequence[Done]:
        return self._repair(Action.CARRY)

    def flush_pending(self, boundary: bool) -> Sequence[Done]:
        return self._repair(Action.FLUSH_PENDING, boundary)

    def settle(self, boundary: bool) -> Sequence[Done]:
        lost = self.lost if boundary else ()
        if lost:
            self._change(lost=())
        return self._repair(Action.SETTLE, boundary, needed=bool(lost), names=lost)

    def clear(self) -> Sequence[Done]:
        self._change(stale=(), lost=())
        return self._repair(Action.CLEAR)

    def drop_idle(self) -> Sequence[Done]:
        stale = self.stale
        self._change(stale=())
        return self._repair(Action.DROP_IDLE, needed=bool(stale), names=stale)

    def shelve_idle(self) -> Sequence[Done]:
        return self._repair(Action.SHELVE_IDLE)

    def unshelve_idle(self) -> Sequence[Done]:
        return self._repair(Action.UNSHELVE_IDLE)

    def release_in_flight(self) -> Sequence[Done]:
        before = self.status
        # No gather to wait for, or one that contradicts the status: the backend does not guess at those.
        self._change(
            status=ParamStatus(
                in_flight=before.orphans,
                registry=len(before.contradictions),
                orphans=before.orphans,
                contradictions=before.contradictions,
                gathered=before.gathered,
            )
        )
        names = tuple(n for n in before.in_flight if n not in before.orphans) or before.active
        return self._repair(Action.RELEASE_IN_FLIGHT, needed=bool(names), names=names)

    def audit_gradients(self, elements: int, seed: int) -> GradientAudit:
        """LOCAL here. The answer that a test wrote into ``audit``."""
        self.requests.append(("audit_gradients", (elements, seed)))
        return self.audit

    def audit_update(self) -> Callable[[], UpdateAudit]:
        """LOCAL. The answer that a test wrote into ``update``."""
        return lambda: self.update

    def sample_gradients(self, elements: int, seed: int) -> Sequence[Done]:
        return self._repair(Action.SAMPLE_GRADIENTS, elements, seed, needed=False)

    def spoil_samples(self, why: str) -> Sequence[Done]:
        return self._repair(Action.SPOIL_SAMPLES, why, needed=False)

    def forget_samples(self) -> Sequence[Done]:
        return self._repair(Action.FORGET_SAMPLES, needed=False)

    def end_samples(self) -> Sequence[Done]:
        return self._repair(Action.END_SAMPLES, needed=False)

    def loop_raised(self, error: BaseException) -> None:
        """LOCAL. Nothing is left unseen here."""

    def switch_off(self, guard: str) -> None:
        self.actions = {name: action for name, action in self.actions.items() if name != guard}

    def divide_once(self) -> Sequence[Done]:
        return self._repair(Action.DIVIDE_ONCE)

    def wait_copies(self, tensors: Sequence[Any] = (), wait: str = "event") -> Sequence[Done]:
        return self._repair(Action.WAIT_COPIES, tensors, wait)


class Script:
    """Writes the events of a training loop, numbered as the DeepSpeed backend numbers them. Every method
    returns the script.

    Attributes:
        events: the events so far.
        repairing: whether the numbers are those of a session whose guards repair (the default) or only detect.
            Without repairs, zero_grad does not begin a new window, and a second backward does not make
            DeepSpeed forget the first.
    """

    def __init__(self, *, repairing: bool = True) -> None:
        self.events: list[ev.Event] = []
        self.repairing = repairing
        self._forwards = 0
        self._backwards = 0
        self._steps = 0
        self._over: dict[int, int] = {}
        self._latest: int | None = None
        self._since_reset = 0
        self._in_window = 0
        self._boundary_in_window = False
        self._unfinished = False
        self._pending_forward = False
        self._cleared = False

    def _add(self, *events: ev.Event) -> Script:
        self.events += events
        return self

    def forward(self, training: bool = True, grad: bool = True, *, nested: bool = False) -> Script:
        """engine.forward, from its begin to its end."""
        self._forwards += 1
        self._since_reset = 0
        if grad:
            self._latest = self._forwards
            self._over[self._forwards] = 0
            self._pending_forward = True
        return self._add(
            ev.ForwardBegin(self._forwards, training, grad, nested),
            ev.ForwardEnd(self._forwards, grad),
        )

    def _begin(self, by: By, boundary: bool, over: int | Sequence[int] | None) -> None:
        self._backwards += 1
        self._pending_forward = False
        again = self._since_reset
        if again and self.repairing:
            self._since_reset = 0
        self._add(ev.BackwardBegin(self._backwards, by, again, self._boundary_in_window, boundary))
        if over is None:
            reached: Sequence[int] = () if self._latest is None else (self._latest,)
        else:
            reached = (over,) if isinstance(over, int) else over
        for forward in reached:
            if forward not in self._over:
                raise ValueError(f"over: no forward {forward} with gradients so far; there are {sorted(self._over)}")
            self._add(ev.GraphReached(self._backwards, forward, self._over[forward]))
            self._over[forward] += 1

    def backward(
        self, by: By = "engine.backward", boundary: bool = True, over: int | Sequence[int] | None = None
    ) -> Script:
        """One backward with its epilogue.

        Args:
            by: who starts it.
            boundary: whether it runs at an accumulation boundary.
            over: numbers of the forwards whose graphs it reaches, from 1, in that order (autograd reaches the newest
                first); the latest one with gradients if left out.
        """
        self._begin(by, boundary, over)
        self._since_reset += 1
        self._in_window += 1
        self._boundary_in_window = self._boundary_in_window or boundary
        return self._add(ev.BackwardReduce(self._backwards, boundary), ev.BackwardEnd(self._backwards, boundary))

    def abort(
        self,
        error: str | BaseException | None = "RuntimeError: scripted",
        *,
        by: By = "engine.backward",
        boundary: bool = True,
        over: int | Sequence[int] | None = None,
        reducing: bool = False,
        twice: Sequence[str] = (),
    ) -> Script:
        """A backward that begins and does not reach its epilogue: it raises ``error``, or, with None, is only left.
        ``reducing`` and ``twice``: see :class:`zeroguard.events.BackwardAborted`."""
        self._begin(by, boundary, over)
        self._since_reset += 1
        self._unfinished = True
        if error is None:
            return self._add(ev.BackwardAborted(self._backwards, "it never reached its epilogue", raised=False))
        text = _text(error)
        aborted = ev.BackwardAborted(self._backwards, text, True, reducing, tuple(twice))
        return self._add(aborted, ev.Raised(ev.Phase.BACKWARD, text))

    def zero_grad(self, by: Literal["engine", "optimizer", "module"] = "engine") -> Script:
        """zero_grad. Like the backend, it says nothing when there is nothing to clear."""
        self._cleared = True
        if not (self._in_window or self._unfinished):
            return self
        self._add(ev.ZeroGrad(by, self._in_window))
        if self.repairing:
            self._in_window, self._boundary_in_window, self._unfinished = 0, False, False
        return self

    def step(self, applied: bool = True, by: Literal["engine.step", "optimizer.step"] = "engine.step") -> Script:
        """The ZeRO optimizer's step."""
        self._add(ev.StepBegin(self._steps, self._in_window, by, self._cleared))
        self._steps += 1
        self._cleared = False
        self._in_window, self._boundary_in_window = 0, False
        if self.repairing:
            self._since_reset, self._unfinished = 0, False
        return self._add(ev.StepEnd(self._steps, applied, self._pending_forward))

    def counted(self, open: int = 1) -> Script:
        """engine.step() at no boundary: ``open`` micro-batches of the window are over."""
        return self._add(ev.MicroBatchEnd(open))

    def epoch_end(self) -> Script:
        """A trainer's epoch is over."""
        return self._add(ev.EpochEnd())

    def clip(self, gradients: int = 0, limit: float | None = 1.0) -> Script:
        """torch.nn.utils.clip_grad_norm_ over all parameters, ``gradients`` of which have one."""
        return self._add(ev.GradientClip("torch.nn.utils.clip_grad_norm_", gradients, limit))

    def mode(self, training: bool) -> Script:
        """module.train(training)."""
        return self._add(ev.ModeChange(training))

    def host_read(self, what: str = "accumulated_grads_in_cpu") -> Script:
        """Python reads host memory."""
        return self._add(ev.HostRead(what))

    def checkpoint(self) -> Script:
        """engine.save_checkpoint begins."""
        return self._add(ev.CheckpointBegin())

    def raised(
        self, phase: ev.Phase = ev.Phase.FORWARD, error: str | BaseException = "RuntimeError: scripted"
    ) -> Script:
        """An exception passes through the engine."""
        return self._add(ev.Raised(phase, _text(error)))

    def close(self, failed: bool = False) -> Script:
        """The session closes; ``failed`` when the loop raised."""
        return self._add(ev.Close(failed))


def _text(error: str | BaseException) -> str:
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}"


def replay(
    events: Iterable[ev.Event] | Script,
    *,
    guards: Sequence[Any] | None = None,
    config: GuardConfig | dict[str, Any] | None = None,
    engine: ScriptedEngine | None = None,
) -> Session:
    """LOCAL with one rank. Feed events through a real session and return it.

    Args:
        events: a script, or its events. A ``Close`` closes the session; without one it stays open.
        guards: names of guards, dicts with a name and options, or the guards' configs; left out, those that
            apply to the engine.
        config: the rest of the configuration. A dict is completed by ``sinks: []`` and ``on_violation: record``; a
            :class:`zeroguard.GuardConfig` is taken as it is, but for ``guards``.
        engine: the engine; a :class:`ScriptedEngine` with :func:`facts` if left out.

    Raises:
        GuardViolation: under ``on_violation: raise``, at the end of a step.
        ValueError: for an event after ``Close``.
    """
    if isinstance(config, GuardConfig):
        settings = config
    else:
        settings = load_config({"sinks": [], "on_violation": "record", **(config or {})})
    if guards is not None:
        chosen = [{"name": item} if isinstance(item, str) else item for item in guards]
        settings = settings.model_copy(update={"guards": load_config({"guards": chosen}).guards})
    session = Session(engine or ScriptedEngine(), settings)
    for event in events.events if isinstance(events, Script) else events:
        if session.closed:
            raise ValueError(f"{event!r} after Close: the session is closed by then")
        if isinstance(event, ev.Close):
            # As the with block does it.
            session.__exit__(RuntimeError if event.failed else None, None, None)
            continue
        session.emit(event)
        if isinstance(event, ev.StepEnd):
            session.decide()
    return session


def assert_finding(
    session: Session,
    *,
    guard: str,
    kind: str,
    severity: Severity | None = None,
    count: int = 1,
    **fields: Any,
) -> list[Finding]:
    """The session has exactly ``count`` findings of this guard and kind; they are returned.

    Args:
        session: what :func:`replay` or :func:`zeroguard.guard` returned.
        guard: the guard's name.
        kind: the finding's kind.
        severity: their severity, if it matters.
        count: how many.
        fields: further fields of :class:`zeroguard.findings.Finding` and their values. A ``str`` value is
            searched for in a field that holds text, every other value must be equal.

    Raises:
        AssertionError: with the text of everything that the session found.
    """
    known = {item.name for item in fields_of(Finding)}
    if unknown := sorted(fields.keys() - known):
        raise TypeError(f"a finding has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    found = [item for item in session.findings if (item.guard, item.kind) == (guard, kind)]
    wanted = {**({} if severity is None else {"severity": severity}), **fields}
    for item in found:
        for name, value in wanted.items():
            have = getattr(item, name)
            same = (
                value in have if isinstance(value, str) and name not in ("guard", "kind", "severity") else value == have
            )
            if not same:
                raise AssertionError(f"{guard}/{kind}: {name} is {have!r}, expected {value!r}\n\n{_all(session)}")
    if len(found) != count:
        raise AssertionError(f"{len(found)} finding(s) {guard}/{kind}, expected {count}\n\n{_all(session)}")
    return found


def assert_silent(session: Session) -> None:
    """The session found nothing. Repairs are no findings; ``session.repairs`` lists them.

    Raises:
        AssertionError: with the text of everything that the session found.
    """
    if session.findings:
        raise AssertionError(f"expected silence, but there are {len(session.findings)} finding(s)\n\n{_all(session)}")


def _all(session: Session) -> str:
    return "\n\n".join(item.text() for item in session.findings) or "The session has no findings."
