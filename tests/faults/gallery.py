"""The fault gallery: what is known of each public fault, what it does, and what zeroguard is expected to make of it.

A program is a function of ``tests/lab/gallery``; its nearest healthy neighbour is the same function. A place is a ZeRO
stage, with an ``o`` where the optimizer is offloaded to the CPU. Steps count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["FAULTS", "HEALTHY", "INSTALLED", "NOT_HERE", "Case", "Control", "Fault", "Program", "Report", "by_audit"]

#: The release that the project is installed with; the others are in ``.releases``.
INSTALLED = "0.19.8"
EVERY = ("0.16.9", "0.17.6", "0.18.5", "0.19.2", INSTALLED)
#: where it is the same on the oldest and the newest release, and nothing is repaired
ENDS = ("0.16.9", INSTALLED)
SINCE_18 = EVERY[2:]
ALL = "1 1o 2 2o 3 3o"
OFFLOADED = "1o 2o 3o"

AUDIT = "gradient_audit"
RESET = "accumulator_reset"
RHYTHM = "accumulation"
#: how to have repaired on request what is not repaired by itself
UNTOUCHED = {"guards": [{"name": "automatic"}, {"name": RESET, "idle": "untouched"}]}
DIVIDE_ONCE = {"guards": [{"name": "automatic"}, {"name": RHYTHM, "action": "repair"}]}


@dataclass(frozen=True)
class Program:
    """What is run: ``<module>.<function>`` of the gallery, and where."""

    program: str
    where: str
    ranks: int = 1
    dtype: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    releases: tuple[str, ...] = (INSTALLED,)

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(self.where.split())


@dataclass(frozen=True)
class Case(Program):
    """A fault in places that have it alike.

    Attributes:
        shows: what happens without zeroguard: ``wrong`` is silent, ``crash`` and ``hang`` are loud.
        first: the step at which it first shows.
        found: the findings, ``<guard>.<kind>``, that are expected: of the automatic choice of guards and the audit of
            gradients beside it; where the automatic choice repairs, of guards that only detect and the audit.
        at: the step at which they come, if not at ``first``.
        repaired: the automatic choice of guards makes the run exact.
        on_request: the configuration that does, where the automatic choice does not.
        variant: what tells it from the fault's other cases.
        why: why it is missed, found late or not repaired.
        not_run: why zeroguard is not run on it.
    """

    shows: Literal["wrong", "crash", "hang"] = "wrong"
    first: int = 1
    found: tuple[str, ...] = ()
    at: int = 0
    repaired: bool = False
    on_request: dict[str, Any] | None = None
    variant: str = ""
    why: str = ""
    not_run: str = ""

    @property
    def silent(self) -> bool:
        return self.shows == "wrong"

    @property
    def found_at(self) -> int:
        return self.at or self.first


def by_audit(finding: str) -> bool:
    """Whether the guard that runs on request only has to be there for it."""
    return finding.startswith(f"{AUDIT}.")


@dataclass(frozen=True)
class Fault:
    """A public fault. ``reports`` are paths below https://github.com/, ``page`` is one of ``docs/faults``, ``measure``
    says what the size of the symptom is."""

    name: str
    title: str
    reports: tuple[str, ...]
    cases: tuple[Case, ...]
    page: str = ""
    measure: str = "parameters off by {:.1e}"


@dataclass(frozen=True)
class Report:
    """Reports that have no program here."""

    reports: tuple[str, ...]
    why: str


def ds(*numbers: str) -> tuple[str, ...]:
    """Paths of DeepSpeed issues, and of pull requests where a number begins with ``p``."""
    return tuple(f"deepspeedai/DeepSpeed/{'pull' if n[0] == 'p' else 'issues'}/{n.lstrip('p')}" for n in numbers)


_OVERWRITTEN = (f"{RESET}.overwritten_gradient",)
_STALE = (f"{RESET}.stale_gradient", f"{AUDIT}.gradient_stale")
_SECOND = ("retained_graph.second_backward",)

FAULTS: tuple[Fault, ...] = (
    # -- several backwards over one graph ------------------------------------------------------------------------------
    Fault(
        "two_losses",
        "One forward, two losses, engine.backward for each",
        ds("7352", "p8045", "p8135"),
        (
            Case(
                "graph.two_losses",
                "1 1o 2 2o",
                releases=SINCE_18,
                found=(*_SECOND, *_OVERWRITTEN),
                repaired=True,
            ),
            Case("graph.two_losses", "3 3o", shows="crash", found=_SECOND, repaired=True),
            Case("graph.two_losses", "3 3o", releases=("0.18.5", "0.19.2"), found=_SECOND, repaired=True),
            Case(
                "graph.two_losses", "3 3o", releases=("0.16.9", "0.17.6"), first=2, at=1, found=_SECOND, repaired=True
            ),
        ),
        page="retained_graph",
    ),
    Fault(
        "two_losses_by_loss",
        "One forward, two losses, loss.backward() for each",
        ds("7352", "p8135"),
        (
            Case("graph.two_losses", "1 2", options={"by": "loss"}, shows="crash", found=_SECOND, repaired=True),
            Case("graph.two_losses", "1o 2o", options={"by": "loss"}, found=_SECOND, repaired=True),
            Case(
                "graph.two_losses",
                "3 3o",
                releases=SINCE_18,
                options={"by": "loss"},
                shows="crash",
                found=_SECOND,
                repaired=True,
            ),
        ),
        page="retained_graph",
    ),
    Fault(
        "step_between",
        "A step after each of two losses of one forward, as accelerator.backward does",
        ("huggingface/accelerate/issues/2951",),
        (
            Case(
                "graph.step_between",
                "1 1o 2 2o",
                releases=ENDS,
                found=(f"{RHYTHM}.step_between_backwards", f"{RHYTHM}.idle_parameter_moves"),
                why="A step that was taken cannot be taken back.",
            ),
            Case(
                "graph.step_between",
                "3 3o",
                releases=ENDS,
                shows="crash",
                found=(f"{RHYTHM}.step_between_backwards", f"{RHYTHM}.idle_parameter_moves"),
                why="A step that was taken cannot be taken back.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "shared_checkpoint",
        "A module that runs twice in a forward, in reentrant checkpoints",
        (
            *ds("988"),
            "huggingface/transformers/issues/18330",
            "OpenRLHF/OpenRLHF/issues/94",
            "deepspeedai/DeepSpeedExamples/issues/458",
            "OpenBMB/MiniCPM-V/issues/1003",
        ),
        (
            Case(
                "graph.shared_checkpoint",
                "2 2o 3 3o",
                releases=ENDS,
                shows="crash",
                found=("retained_graph.gradient_in_parts",),
                why="Each checkpoint runs a backward of its own, and the gradient comes in parts; DeepSpeed reduces "
                "the first and refuses the second. Use `use_reentrant=False`.",
            ),
        ),
        page="retained_graph",
    ),
    Fault(
        "backward_raises",
        "A backward that raises, a zero_grad, and on with the next batch",
        ds("1496"),
        (
            Case(
                "graph.backward_raises",
                "2 2o 3 3o",
                releases=EVERY,
                shows="crash",
                first=4,
                found=("retained_graph.unfinished_backward",),
                repaired=True,
            ),
        ),
        page="retained_graph",
    ),
    # -- accumulation --------------------------------------------------------------------------------------------------
    Fault(
        "plain_gas_loop",
        "The documented loop with several accumulation steps",
        (
            *ds("7718", "p7967", "p6550"),
            "huggingface/trl/issues/4540",
            "huggingface/trl/issues/4631",
        ),
        (
            Case(
                "windows.plain_gas_loop",
                "2",
                releases=("0.17.6",),
                found=(f"{AUDIT}.gradient_overwritten",),
                repaired=True,
            ),
            Case(
                "windows.plain_gas_loop",
                "2o",
                releases=("0.16.9", "0.17.6", "0.18.5"),
                found=(f"{AUDIT}.gradient_differs",),
                repaired=True,
            ),
        ),
        page="stale_gradient",
    ),
    Fault(
        "many_backwards_one_step",
        "PyTorch's own accumulation: several backwards, then one step",
        (
            "allenai/open-instruct/pull/1498",
            *ds("8183", "7629"),
            "huggingface/accelerate/issues/1970",
            "OpenRLHF/OpenRLHF/issues/1131",
        ),
        (
            Case("windows.many_backwards_one_step", "1 1o 2 2o", releases=SINCE_18, found=_OVERWRITTEN, repaired=True),
            Case(
                "windows.many_backwards_one_step",
                "1 2",
                releases=("0.17.6",),
                shows="crash",
                found=_OVERWRITTEN,
                repaired=True,
            ),
            Case(
                "windows.many_backwards_one_step",
                "1o 2o",
                releases=("0.16.9", "0.17.6"),
                found=_OVERWRITTEN,
                repaired=True,
            ),
        ),
        page="stale_gradient",
    ),
    Fault(
        "lost_at_the_boundary",
        "A branch that only the first micro-batch of a window uses",
        ds("5241"),
        (
            Case(
                "windows.lost_at_the_boundary",
                "2o 3o",
                found=(f"{RESET}.lost_gradient", f"{AUDIT}.gradient_lost"),
                repaired=True,
            ),
        ),
        page="stale_gradient",
    ),
    Fault(
        "boundary_unreduced",
        "bf16 that accumulates in fp32: the window's last micro-batch is added after the reduction",
        ds("p7985"),
        (
            Case(
                "windows.boundary_unreduced",
                "1",
                ranks=2,
                dtype="bf16",
                releases=("0.18.5",),
                found=(f"{AUDIT}.gradient_differs",),
                why="What BF16_Optimizer adds after its reduction would have to be reduced once more. Leave "
                "`grad_accum_dtype` out, or use 0.19.2 or newer.",
            ),
        ),
    ),
    Fault(
        "divided_by_a_trainer",
        "A trainer divides the loss by the accumulation steps, and engine.backward again",
        ("huggingface/transformers/issues/45305", "huggingface/transformers/pull/35808"),
        (
            Case(
                "windows.divided_by_the_loop",
                ALL,
                options={"told": True},
                found=(f"{RHYTHM}.double_division",),
                on_request=DIVIDE_ONCE,
                why="On request only: the learning rate of a run that works was found with the fault in place.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "divided_by_the_loop",
        "The loop divides the loss by the accumulation steps, and engine.backward again",
        ("huggingface/transformers/issues/45305", "huggingface/transformers/pull/35808"),
        (
            Case(
                "windows.divided_by_the_loop",
                ALL,
                why="A loss is what the loop says it is: one that was divided looks like any other. Only a trainer's "
                "integration knows.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "not_to_be_divided",
        "scale_wrt_gas=False is not obeyed",
        ("huggingface/accelerate/issues/3877",),
        (
            Case(
                "windows.not_to_be_divided",
                ALL,
                releases=("0.18.3",),
                not_run="Not run: 0.18.3 is no verified release; zeroguard says so where it attaches, and stops. "
                "0.17.6, 0.18.2 and 0.18.4 obey.",
            ),
        ),
    ),
    Fault(
        "epoch_ends_early",
        "An epoch ends inside an accumulation window",
        (*ds("7439"), "Lightning-AI/pytorch-lightning/issues/19987"),
        (
            Case(
                "windows.epoch_ends_early",
                ALL,
                first=2,
                at=1,
                found=(f"{RHYTHM}.open_window",),
                variant="a trainer says so",
                why="Whether the rest of an epoch is to be dropped or trained is the loop's to say; found where an "
                "integration says that the epoch is over, or where the session closes.",
            ),
            Case(
                "windows.epoch_ends_early",
                ALL,
                first=2,
                at=6,
                found=(f"{RHYTHM}.short_window",),
                options={"clear": True},
                variant="the loop calls zero_grad there",
                why="Late, at the third time: zero_grad drops the rest, DeepSpeed counts on, and the next window is "
                "short. A loop that skips a bad micro-batch looks the same once, and means it.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "thrown_away",
        "A backward that zero_grad is to throw away",
        ds("1496", "7439"),
        (
            Case(
                "windows.thrown_away",
                "1o 2o 3 3o",
                releases=EVERY,
                found=(f"{RESET}.zero_grad_incomplete", f"{AUDIT}.gradient_stale"),
                repaired=True,
            ),
        ),
        page="stale_gradient",
    ),
    Fault(
        "double_step",
        "engine.step() twice for one backward",
        ("Lightning-AI/pytorch-lightning/issues/6170",),
        (
            Case("windows.double_step", OFFLOADED, releases=EVERY, found=(f"{RHYTHM}.second_step",), repaired=True),
            Case(
                "windows.double_step",
                "1 2 3",
                releases=ENDS,
                shows="crash",
                found=(f"{RHYTHM}.second_step",),
                why="DeepSpeed has freed the gradients, and finds none.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "double_step_by_the_optimizer",
        "engine.step(), and the optimizer's step() after it",
        ("Lightning-AI/pytorch-lightning/issues/6170",),
        (
            Case(
                "windows.double_step",
                OFFLOADED,
                releases=EVERY,
                options={"by": "optimizer"},
                found=(f"{RHYTHM}.second_step", f"{RHYTHM}.bypassed_engine_step"),
                repaired=True,
            ),
            Case(
                "windows.double_step",
                "1 2 3",
                releases=ENDS,
                options={"by": "optimizer"},
                shows="crash",
                found=(f"{RHYTHM}.second_step", f"{RHYTHM}.bypassed_engine_step"),
                why="DeepSpeed has freed the gradients, and finds none.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "past_the_engine",
        "The optimizer is stepped and engine.step() never called, with several accumulation steps",
        (),
        (
            Case(
                "windows.past_the_engine",
                OFFLOADED,
                found=(f"{RHYTHM}.bypassed_engine_step", f"{AUDIT}.gradient_lost"),
                why="DeepSpeed counts micro-batches in engine.step(), and in nothing else.",
            ),
            Case(
                "windows.past_the_engine",
                "1 2",
                shows="crash",
                found=(f"{RHYTHM}.bypassed_engine_step",),
                why="DeepSpeed counts micro-batches in engine.step(), and in nothing else.",
            ),
        ),
        page="rhythm",
    ),
    # -- parameters that a step does not reach -------------------------------------------------------------------------
    Fault(
        "left_out",
        "A branch that is left out of later steps is stepped again with an old gradient",
        ds("5241"),
        (Case("idle.left_out", "1o 2o 3 3o", releases=EVERY, first=3, found=_STALE, repaired=True),),
        page="stale_gradient",
    ),
    Fault(
        "frozen_in_mid_run",
        "A layer that is frozen in mid-run is stepped again with an old gradient",
        (*ds("4055"), "modelscope/ms-swift/issues/2872"),
        (Case("idle.frozen_in_mid_run", OFFLOADED, releases=EVERY, first=3, found=_STALE, repaired=True),),
        page="stale_gradient",
    ),
    Fault(
        "left_out_and_decayed",
        "A branch that is left out is moved by momentum and weight decay (AdamW)",
        ds("5241"),
        (
            Case(
                "idle.left_out",
                ALL,
                options={"optimizer": "adamw"},
                first=3,
                found=(f"{RHYTHM}.idle_parameter_moves",),
                on_request=UNTOUCHED,
                why="Its gradient is zero for DeepSpeed, not absent, and a zero gradient is stepped. The old gradient, "
                "where there is one, is dropped; the rest is put right with `idle: untouched` only, as many models "
                "leave something out on purpose.",
            ),
        ),
        page="stale_gradient",
    ),
    Fault(
        "frozen_and_decayed",
        "A layer that is frozen in mid-run is moved by momentum and weight decay (AdamW)",
        (*ds("4055"), "modelscope/ms-swift/issues/2872"),
        (
            Case(
                "idle.frozen_in_mid_run",
                ALL,
                options={"optimizer": "adamw"},
                first=3,
                found=(f"{RHYTHM}.frozen_parameter_moves",),
                on_request=UNTOUCHED,
                why="Put right with `idle: untouched` only.",
            ),
        ),
        page="stale_gradient",
    ),
    # -- values --------------------------------------------------------------------------------------------------------
    Fault(
        "non_finite_skipped",
        "One gradient is not finite: the update is left out, and the loop goes on",
        ds("8415"),
        (
            Case(
                "values.non_finite",
                ALL,
                dtype="bf16",
                first=2,
                found=(f"{RHYTHM}.skipped_update",),
                why="There is no right update of an infinite gradient.",
            ),
        ),
        page="rhythm",
        measure="an update left out",
    ),
    Fault(
        "non_finite_applied",
        "One gradient is not finite, and is applied",
        ds("8415", "p8035"),
        (
            Case(
                "values.non_finite",
                "1 2 3",
                dtype="bf16",
                releases=("0.16.9", "0.19.2"),
                first=2,
                found=(f"{RHYTHM}.weights_not_finite",),
                why="A step that was taken cannot be taken back. Use 0.19.8, or set `check_grad_overflow` in the "
                "section `bf16` of DeepSpeed's configuration.",
            ),
        ),
        page="rhythm",
        measure="all weights inf or NaN",
    ),
    Fault(
        "clip_by_hand",
        "torch.nn.utils.clip_grad_norm_ between backward and step",
        (*ds("6767"), "huggingface/accelerate/issues/3807"),
        (
            Case(
                "values.clip_by_hand",
                ALL,
                releases=ENDS,
                found=(f"{RHYTHM}.clipped_nothing",),
                why="Whose clip counts, the loop's or the configuration's, is the user's to say.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "clipping_left_out",
        "gradient_clipping is not in the configuration, and its default has changed",
        (*ds("p8068"), "EleutherAI/gpt-neox/issues/1432"),
        (
            Case(
                "values.clipping_left_out",
                ALL,
                found=(f"{RHYTHM}.unconfigured_clipping",),
                why="Either default may be what is wanted.",
            ),
        ),
        page="rhythm",
    ),
    Fault(
        "rank_order",
        "Ranks run layers in different orders, and reduce one layer's gradient with another's",
        ds("2343"),
        (
            Case(
                "values.rank_order",
                "2 2o",
                ranks=2,
                found=(f"{RHYTHM}.rank_order", f"{AUDIT}.gradient_differs"),
                why="The sum of two layers' gradients cannot be taken apart.",
            ),
        ),
        page="rhythm",
    ),
    # -- reads and writes past the optimizer ---------------------------------------------------------------------------
    Fault(
        "read_after_step",
        "A gradient is read after the step",
        (
            *ds("2329", "1098"),
            "mosaicml/composer/issues/1501",
            "huggingface/transformers/issues/11850",
            "huggingface/accelerate/issues/3303",
            "huggingface/transformers/issues/31033",
        ),
        (
            Case(
                "reading.read_after_step",
                "1o 2o 3 3o",
                releases=ENDS,
                found=(f"{RHYTHM}.late_gradient_read",),
                why="The gradient is gone by then.",
            ),
            Case(
                "reading.read_after_step",
                "1 2",
                releases=ENDS,
                shows="crash",
                found=(f"{RHYTHM}.late_gradient_read",),
                why="The gradient is gone by then.",
            ),
        ),
        page="rhythm",
        measure="the last step's gradient, up to {:.1e}",
    ),
    Fault(
        "read_in_mid_window",
        "A gradient is read before its accumulation window is full",
        ds("2329"),
        (
            Case(
                "reading.read_in_mid_window",
                "2o 3o",
                ranks=2,
                releases=ENDS,
                found=(f"{RHYTHM}.early_gradient_read",),
                why="DeepSpeed has zeros there, or the last window's gradient. Read after the window's last backward, "
                "or with `session.gradients()`, which refuses.",
            ),
            Case(
                "reading.read_in_mid_window",
                "2",
                shows="crash",
                releases=("0.18.5", INSTALLED),
                found=(f"{RHYTHM}.early_gradient_read",),
                why="DeepSpeed has nothing there. Read after the window's last backward, or with "
                "`session.gradients()`, which refuses.",
            ),
            Case(
                "reading.read_in_mid_window",
                "1 1o",
                ranks=2,
                why="On ZeRO-1 `safe_get_full_grad` returns `param.grad`, which is this rank's own sum until the "
                "window's last backward; nothing of DeepSpeed's is called for it. `session.gradients()` refuses.",
            ),
        ),
        page="rhythm",
        measure="a gradient off by {:.1e}",
    ),
    Fault(
        "edit_without_modifier",
        "Weights are written under GatheredParameters without modifier_rank",
        (*ds("1046", "7811"), "OpenRLHF/OpenRLHF/pull/1357"),
        tuple(
            Case(
                "reading.edit_without_modifier",
                "3 3o",
                ranks=2,
                options={"how": how},
                releases=ENDS,
                variant=variant,
                first=2,
                found=(f"{RHYTHM}.lost_edit",),
                why="DeepSpeed drops the gathered copy, and with it what was written; nothing that it keeps has "
                f"changed, and which rank's copy counts is the loop's to say. {note}",
            )
            for how, variant, note in (
                ("data", "through .data", "A write through `.data` does not move the version counter either."),
                ("copy", "in place", 'DeepSpeed\'s own `"enable_sanity_checks": true` reports a write in place.'),
            )
        ),
        page="rhythm",
    ),
    Fault(
        "edit_of_the_copy",
        "Weights are written where the forward reads them, and the next step undoes it",
        ds("2424", "6411"),
        (
            Case(
                "reading.edit_of_the_copy",
                ALL,
                ranks=2,
                first=2,
                found=(f"{AUDIT}.copy_differs",),
                why="Which of the two weights is meant cannot be known.",
            ),
        ),
    ),
    # -- ZeRO-3 --------------------------------------------------------------------------------------------------------
    Fault(
        "eval_stops_early",
        "An evaluation that stops part way leaves parameters in flight",
        ds("3068", "3156", "5381", "5648", "4533"),
        (Case("zero3.eval_stops_early", "3 3o", ranks=2, found=("param_status.in_flight",), repaired=True),),
        page="in_flight",
        measure="{:.0f} parameters in flight",
    ),
    Fault(
        "frozen_in_checkpoint",
        "Frozen modules in checkpoints that are not reentrant",
        ("huggingface/transformers/issues/47254", "huggingface/trl/issues/2514"),
        (
            Case(
                "zero3.frozen_in_checkpoint",
                "3 3o",
                shows="crash",
                releases=("0.16.9", "0.19.2"),
                found=("param_status.recomputed_without_parameter",),
                why="The recomputation inside the backward finds the frozen parameters partitioned; to gather them is "
                "DeepSpeed's part, and pull request 8148 does it. Use 0.19.8.",
            ),
        ),
        page="in_flight",
    ),
    Fault(
        "weight_penalty",
        "A penalty over parameters that are partitioned",
        ds("7464"),
        (
            Case(
                "zero3.weight_penalty",
                "3 3o",
                releases=ENDS,
                shows="crash",
                found=("param_status.partitioned_parameter_used",),
                why="The penalty is made of empty tensors, in the loop's own code, and PyTorch refuses the gradient. "
                "Compute it from outputs, or leave it to the optimizer's weight decay.",
            ),
        ),
        page="in_flight",
    ),
    Fault(
        "calls_differ",
        "A layer runs a different number of times on each rank",
        ds("7998", "7461"),
        (
            Case(
                "zero3.calls_differ",
                "3",
                ranks=2,
                shows="hang",
                why="The ranks wait for each other inside collectives that do not belong together, and nothing of "
                "zeroguard's is called any more.",
                not_run="a hang is a hang",
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Control(Program):
    """A healthy program. ``reports``: why it was tried; ``allowed``: what may be found in it, because it is true."""

    reports: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()


HEALTHY: tuple[Control, ...] = (
    Control("controls.plain", ALL, options={"gas": 1}),
    Control("controls.plain", ALL),
    Control("controls.bf16", ALL, dtype="bf16"),
    Control("controls.checkpointing", ALL, options={"reentrant": False}),
    Control("controls.checkpointing", ALL, options={"reentrant": True}),
    Control("controls.eval_between", ALL),
    Control("controls.frozen_tied_unused", ALL),
    Control("controls.loss_backward", ALL),
    Control("controls.two_forwards", ALL),
    Control("controls.handled_exception", ALL),
    Control("controls.summed_backwards", "3 3o"),
    # Up to 0.19.2 the first module keeps a claim on its parameters between two micro-batches.
    Control("controls.plain", "3 3o", releases=("0.19.2",)),
    Control("windows.skipped_batch", ALL, reports=ds("1496")),
    Control(
        "values.overflow_then_train",
        ALL,
        dtype="bf16",
        reports=("EleutherAI/DeeperSpeed/pull/66",),
        allowed=(f"{RHYTHM}.skipped_update",),
    ),
    Control("reading.gradient_is_set", ALL, reports=ds("7117")),
    Control("zero3.inference_mode", "3 3o", reports=("snowflakedb/ArcticTraining/pull/265",)),
)

NOT_HERE: tuple[Report, ...] = (
    Report(
        ds("8061", "p7898", "7188", "4298"),
        "Reductions that do not wait for the stream that fills their bucket. They need a GPU, and several streams.",
    ),
    Report(
        ds("p3097"),
        "A host read of memory that the GPU still fills. It needs a GPU: [host_read.md](faults/host_read.md).",
    ),
    Report(
        ds("671", "966", "4922", "7354"),
        "Reported of releases before 0.16.9, the oldest that zeroguard is verified with; not tried.",
    ),
    Report(ds("p4321"), "Fixed in 2023; a sweep over bucket sizes on 0.19.8 found nothing."),
    Report(ds("7415"), "Costs time only."),
    Report(
        ds("7205", "6793"),
        "DeepSpeed refuses, in its own words: a trace that does not fit, `no_sync` with partitioned gradients.",
    ),
    Report(
        ("huggingface/trl/issues/1543",), "A trainer removes and adds DeepSpeed's hooks in mid-trace; fixed in trl."
    ),
)
