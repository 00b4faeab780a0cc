"""Which programs there are, and which of them are legal.

An example is a configuration and a list of raw operations that know nothing of each other. :func:`legalize` reads the
list from front to back with a small model of the loop and makes a legal program of it: what makes no sense where it
stands is left out, a backward gets the forward that it needs, and the last window is brought to its step. So any part
of a list may be deleted and the rest is still a program, which is what makes failures shrink to a few lines. (A state
machine of hypothesis' own would run each operation as it is drawn. Here the engine lives in another process and a case
is sent there whole, and a rule that is drawn under a precondition shrinks worse.)

An operation is a dict: its name, ``op``, and the arguments of the method of that name of ``tests.lab.fuzz.Twin``.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["CONFIGURATIONS", "allowed", "configurations", "legalize", "operations"]

#: stage, offload
CONFIGURATIONS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
HEADS = [0, 1, 2]
PLACES = ["trunk", "heads"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap_comm": True, "reduce_bucket_size": 64},
    {"contiguous_gradients": False},
    {"reduce_scatter": False},
    {"round_robin_gradients": True},
    {"stage3_param_persistence_threshold": 10**6},
    {"stage3_prefetch_bucket_size": 0},
]


def _settings(stage: int) -> list[dict[str, Any]]:
    only3 = ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
    never = only3 if stage < 3 else ("round_robin_gradients",)
    return SETTINGS[:1] if stage == 0 else [s for s in SETTINGS if not any(key in s for key in never)]


def _dtypes(stage: int, offload: bool) -> list[str]:
    """``bf16-fp32`` adds gradients in fp32, with an optimizer of its own. DeepSpeed's fp16 without ZeRO divides by a
    loss scale that no backward has multiplied by."""
    dtypes = ["fp32", "fp32", "fp32", "bf16", "bf16"]
    if stage == 1 and not offload:
        dtypes += ["bf16-fp32"]
    return dtypes + (["fp16", "fp16-dynamic"] if stage else [])


@st.composite
def configurations(draw: st.DrawFn, stage: int, offload: bool, ranks: int, mode: str = "repair") -> dict[str, Any]:
    """``mode``: ``repair`` guards with all that there is, ``audit`` with gradient_audit alone, ``detect`` with the
    guards that repair, told not to."""
    optimizer, idle = "sgd", "zero_gradient"
    if mode == "repair":
        # With the default, momentum and weight decay act on an idle parameter, and Adam's step counter counts for all
        # (README, Limits); the reference does as much.
        pairs = [
            ("sgd", "zero_gradient"),
            ("sgd", "untouched"),
            ("momentum", "untouched"),
            ("adamw", "untouched"),
            ("momentum", "zero_gradient"),
        ]
        optimizer, idle = draw(st.sampled_from(pairs))
    dtype = draw(st.sampled_from(_dtypes(stage, offload)))
    low = dtype != "fp32"
    # The masters of round_robin_gradients cannot be read; and a loss is divided exactly by powers of two alone, so
    # that what the two sides round is the same.
    settings = [s for s in _settings(stage) if not (low and "round_robin_gradients" in s)]
    zero = draw(st.sampled_from(settings))
    managed = draw(st.sampled_from([True, True, True, False]))
    return {
        "stage": stage,
        "offload": offload,
        "ranks": ranks,
        "mode": mode,
        "gas": draw(st.sampled_from([1, 1, 1, 2, 2, 2 if low else 3, 4])),
        "dtype": dtype,
        # Where half a gradient is clipped to the length of the whole, a step may be exact that is rightly reported.
        "clip": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])) if mode == "repair" else 0.0,
        "optimizer": optimizer,
        "idle": idle,
        "managed": managed or (stage == 1 and "overlap_comm" in zero),  # DeepSpeed refuses the two together there
        "warm": draw(st.sampled_from([False, False, True])),
        "zero": zero,
    }


_slot = st.integers(0, 1)
_heads = st.sampled_from([HEADS, HEADS, [0], [1], [2], [0, 1], [1, 2], [0, 2]])
_terms = st.lists(st.tuples(_slot, st.sampled_from(HEADS)).map(list), min_size=1, max_size=3)
_by = st.sampled_from(["engine", "manual"])

#: what an operation shrinks to before it goes
_nothing = st.just({"op": "nothing"})
_step = st.fixed_dictionaries({"op": st.just("step"), "head": st.sampled_from(HEADS), "by": _by})
_backward = st.fixed_dictionaries({"op": st.just("backward"), "terms": _terms, "by": _by, "retain": st.booleans()})
_forward = st.fixed_dictionaries({"op": st.just("forward"), "slot": _slot, "heads": _heads})
_clearers = st.sampled_from(["engine", "optimizer", "module"])
_zero_grad = st.fixed_dictionaries({"op": st.just("zero_grad"), "by": _clearers})
_boundary = st.fixed_dictionaries({"op": st.just("boundary"), "value": st.booleans()})
_eval = st.fixed_dictionaries({"op": st.just("eval"), "mode": st.booleans(), "heads": _heads})
_stop = st.fixed_dictionaries({"op": st.just("stop"), "heads": _heads})
_boom = st.fixed_dictionaries(
    {"op": st.just("boom"), "heads": _heads, "by": _by, "place": st.sampled_from(PLACES), "clear": _clearers}
)
_freeze = st.fixed_dictionaries({"op": st.just("freeze"), "head": st.sampled_from(HEADS), "on": st.booleans()})
_others = [_zero_grad, _boundary, _eval, _stop, _boom, _freeze, st.just({"op": "save"}), st.just({"op": "load"})]
#: more than half of all operations are those of an ordinary loop
_any = st.one_of(_nothing, *[_step] * 4, *[_backward] * 4, *[_forward] * 2, *_others)


def operations(least: int = 12, most: int = 40) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Raw operations, for :func:`legalize`. Without a least length most lists would be of five or six."""
    return st.lists(_any, min_size=least, max_size=most)


class _Loop:
    """Where the loop is: just enough to say what is legal next."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.program: list[dict[str, Any]] = []
        self.graphs: dict[int, list[int]] = {}  # live graphs: slot -> heads that ran
        self.frozen: set[int] = set()
        self.micro = 0
        self.explicit: bool | None = None
        self.steps = 2 if config["warm"] else 0
        self.saved: set[int] | None = None  # what was frozen then
        self.waiting = 0  # backwards since the last step or zero_grad
        self.at_boundary = False  # the last of them was at a boundary
        self.cleared = False
        if config["warm"]:
            self.micro = 2 * config["gas"] if config["managed"] else 2

    def emit(self, op: str, **arguments: Any) -> None:
        self.program.append({"op": op, **arguments})

    @property
    def boundary_now(self) -> bool:
        """Whether a backward now is at a boundary, as DeepSpeed sees it."""
        if self.explicit is not None:
            return self.explicit
        return self.config["managed"] and (self.micro + 1) % self.config["gas"] == 0

    def forward(self, slot: int, heads: list[int]) -> None:
        self.graphs[slot] = heads
        self.emit("forward", slot=slot, heads=heads)

    def backward(self, terms: list[list[int]], by: str, retain: bool) -> None:
        if by == "manual" and self.config["stage"] == 0 and self.config["mode"] != "repair":
            by = "engine"  # DeepSpeed refuses loss.backward() there
        chosen: list[list[int]] = []
        for slot, head in terms:
            if slot not in self.graphs:
                self.forward(slot, HEADS)
            term = [slot, head if head in self.graphs[slot] else self.graphs[slot][0]]
            if term not in chosen:
                chosen.append(term)
        self.emit("backward", terms=chosen, by=by, retain=retain)
        if not retain:  # the trunk's part of the graph is gone, which all losses share
            for slot in {slot for slot, _ in chosen}:
                del self.graphs[slot]
        self.waiting += 1
        self.at_boundary = self.boundary_now
        self.cleared = False

    def nothing(self) -> None:
        pass

    def step(self, head: int, by: str) -> None:
        """A step; where it would not be legal, a backward first."""
        applies = self.boundary_now or not self.config["managed"]
        if not applies:
            self.micro += 1
            self.emit("step", applies=False)
            return
        # The last backward before the step has to be at the boundary: DeepSpeed's documentation of
        # set_gradient_accumulation_boundary. A step without any backward is a mistake that zeroguard reports.
        ready = self.waiting and (self.at_boundary or not self.config["managed"])
        # After zero_grad nothing moves; but without ZeRO DeepSpeed's clip fails where there is no gradient at all.
        empty = self.cleared and self.steps and (self.config["stage"] or not self.config.get("clip"))
        if not ready and not empty:
            self.backward([[0, head]], by, False)
        self.micro += 1
        self.steps += 1
        self.emit("step", applies=True)
        self.graphs.clear()  # the weights have changed in place: PyTorch refuses a backward over them
        self.waiting, self.at_boundary, self.cleared = 0, False, False

    def zero_grad(self, by: str) -> None:
        self.emit("zero_grad", by=by)
        self.cleared = self.cleared or self.waiting > 0
        self.waiting, self.at_boundary = 0, False

    def boundary(self, value: bool) -> None:
        if self.config["managed"]:
            self.explicit = value
            self.emit("boundary", value=value)

    def eval(self, mode: bool, heads: list[int]) -> None:
        self.emit("eval", mode=mode, heads=heads)

    def stop(self, heads: list[int]) -> None:
        self.emit("stop", heads=heads)

    def boom(self, heads: list[int], by: str, place: str, clear: str) -> None:
        """A backward that raises, and the zero_grad with which a loop goes on after it."""
        if self.config["mode"] != "repair":  # half of a gradient is DeepSpeed's affair then
            return
        self.graphs.clear()
        self.emit("boom", heads=heads, by=by, place=place)
        # On a CPU that has no streams the ZeRO-3 optimizer's own zero_grad fails where a .grad is left.
        self.zero_grad("engine" if clear == "optimizer" and self.config["stage"] == 3 else clear)

    def freeze(self, head: int, on: bool) -> None:
        # In mid-window PyTorch would step with the gradient that is there; a graph keeps what was trainable when it
        # was built. And with the default for idle parameters momentum moves a frozen one, which is reported.
        moves = self.config["optimizer"] == "momentum" and self.config["idle"] == "zero_gradient"
        # Without ZeRO a low precision's optimizer moves it with any weight decay.
        moves = moves or not (self.config["stage"] or self.config.get("dtype", "fp32") == "fp32")
        if self.waiting or moves or on == (head in self.frozen):
            return
        self.frozen.symmetric_difference_update({head})
        self.graphs.clear()
        self.emit("freeze", head=head, on=on)

    def save(self) -> None:
        if self.waiting or not self.steps:  # what a window has accumulated is not saved
            return
        self.saved = set(self.frozen)
        self.emit("save")

    def load(self) -> None:
        if self.waiting or self.saved is None:
            return
        # DeepSpeed's load_checkpoint raises KeyError on stages 2 and 3 when more is frozen than there was at the save.
        if self.config["stage"] >= 2 and not self.frozen <= self.saved:
            return
        self.graphs.clear()
        self.emit("load")

    def finish(self) -> None:
        """To the next step, with a loss that reaches everything."""
        before = self.steps
        if self.program and self.program[-1] == {"op": "step", "applies": True}:
            return
        if self.explicit is False:
            self.boundary(True)
        while self.steps == before:
            self.step(0, "engine")


def legalize(config: dict[str, Any], raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The legal program that a list of raw operations means."""
    loop = _Loop(config)
    for entry in raw:
        arguments = dict(entry)
        getattr(loop, arguments.pop("op"))(**arguments)
    loop.finish()
    return loop.program


def allowed(config: dict[str, Any], program: list[dict[str, Any]]) -> set[str]:
    """Findings that the documentation promises for loops that are exact all the same."""
    kinds = set()
    if any(entry["op"] == "zero_grad" for entry in program):
        kinds.add("cleared_every_micro_batch")
    if config["idle"] == "zero_gradient":
        kinds |= {"idle_parameter_moves", "frozen_parameter_moves"}
    return kinds
