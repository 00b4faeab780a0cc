"""The table of every foreign attribute that zeroguard touches, and the probe that reads it.

DeepSpeed's internals move between patch releases. An attribute that is not in this table may not be used in this
package (``tests/contract`` compares the table with the code), and one that is missing on the engine at hand
makes the guards that need it unavailable, loudly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["TABLE", "VERIFIED", "Attribute", "missing", "trains", "version_tuple"]

#: Releases that the contract tests run against.
VERIFIED = ("0.16.9", "0.17.6", "0.18.5", "0.19.2", "0.19.6", "0.19.8")

#: Not a guard: session.grad_norms() and session.gradients(). The audit needs all that they need, and more.
READ = "reading"
AUDIT = "gradient_audit"
#: Those that are told of each backward and of zero_grad.
GRADIENT = frozenset({"accumulation", "retained_graph", "accumulator_reset", AUDIT})
ALL = GRADIENT | {"host_read", "param_status", AUDIT, READ}
#: Those that change what DeepSpeed does with gradients.
REPAIRING = frozenset({"retained_graph", "accumulator_reset"})


@dataclass(frozen=True, slots=True)
class Attribute:
    """One foreign attribute.

    Attributes:
        owner: ``engine``, ``optimizer``, ``hook_state`` (the optimizer's), ``module`` or ``param``.
        name: the attribute; private names of classes in their mangled form.
        guards: the guards that cannot act without it.
        stages: the layouts where it must exist: a ZeRO stage, or ``bf16`` for BF16_Optimizer.
        lost: what cannot be done without it.
        since: first release that has it; on older ones it is not asked for, and ``lost`` says what is missing there.
        until: first release that no longer has it.
        offload: whether it is needed only with an offloaded optimizer (True), only without (False), or both (None).
    """

    owner: str
    name: str
    guards: frozenset[str]
    stages: frozenset[int | str]
    lost: str
    since: str = ""
    until: str = ""
    offload: bool | None = None

    def wanted(self, guard: str, layout: int | str, version: str, offload: bool) -> bool:
        """Whether ``guard`` needs this attribute on an engine of that layout, release and offload."""
        here = version_tuple(version)
        return (
            (guard in self.guards or (guard == AUDIT and READ in self.guards))
            and layout in self.stages
            and (not self.since or here >= version_tuple(self.since))
            and (not self.until or here < version_tuple(self.until))
            and self.offload in (None, offload)
        )


def version_tuple(version: str) -> tuple[int, ...]:
    """``0.19.8+unknown`` as ``(0, 19, 8)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _a(
    owner: str,
    name: str,
    guards: Iterable[str],
    stages: Iterable[int | str],
    lost: str,
    since: str = "",
    until: str = "",
    offload: bool | None = None,
) -> Attribute:
    return Attribute(owner, name, frozenset(guards), frozenset(stages), lost, since, until, offload)


_Z = (1, 2, 3)
_B = (*_Z, "bf16")
_S3 = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"

TABLE: tuple[Attribute, ...] = (
    # -- the engine ----------------------------------------------------------------------------------------------
    _a("engine", "forward", ALL, (0, *_B), "no forward is seen"),
    _a("engine", "backward", ALL, (0, *_B), "no engine.backward is seen"),
    _a("engine", "step", ALL, (0, *_B), "a violation cannot be raised after the step's bookkeeping"),
    _a("engine", "zero_grad", GRADIENT, (0, *_B), "engine.zero_grad leaves the accumulators as they are"),
    _a("engine", "_backward_epilogue", GRADIENT, (0, *_B), "the end of a backward is not seen"),
    _a(
        "engine",
        "_backward_prologue",
        GRADIENT,
        (0, *_B),
        "a second loss.backward() cannot be re-armed",
        since="0.18.0",
    ),
    _a(
        "engine",
        "_backward_prologue_per_tensor",
        GRADIENT,
        (0, *_B),
        "a second loss.backward() is not seen",
        since="0.18.0",
    ),
    _a(
        "engine",
        "_support_torch_style_backward",
        {"retained_graph"},
        (0,),
        "loss.backward() stays refused",
        since="0.18.0",
    ),
    _a("engine", "_running_engine_backward", {"retained_graph"}, (0,), "loss.backward() stays refused", since="0.18.0"),
    _a("engine", "is_gradient_accumulation_boundary", GRADIENT, (0, *_B), "boundary backwards cannot be told apart"),
    _a("engine", "save_checkpoint", {"param_status"}, (3,), "no check before a checkpoint"),
    _a("engine", "get_global_grad_norm", {AUDIT}, (0, *_B), "the norm by which DeepSpeed clips is not known"),
    _a("engine", "gradient_clipping", {AUDIT}, (0, *_B), "the norm at which DeepSpeed clips is not known"),
    _a("engine", "communication_data_type", {AUDIT}, (0, *_B), "it is not known how gradients are rounded"),
    _a("engine", "device", {READ}, (0, *_B), "it is not known where gradients are wanted"),
    # -- the ZeRO optimizer --------------------------------------------------------------------------------------
    _a("optimizer", "step", ALL, (0, *_B), "no optimizer step is seen"),
    _a("optimizer", "zero_grad", GRADIENT, _B, "optimizer.zero_grad leaves the accumulators as they are"),
    _a("optimizer", "micro_step_id", REPAIRING, _Z, "accumulating and overwriting backwards cannot be told apart"),
    _a(
        "optimizer",
        "reduce_independent_p_g_buckets_and_remove_grads",
        GRADIENT,
        _Z,
        "it is not known which parameters received a gradient",
    ),
    _a(
        "optimizer", "clear_backward_seen_flag", {"retained_graph"}, _B, "a backward cannot be re-armed", since="0.18.0"
    ),
    _a("optimizer", "_backward_hook_state", {"retained_graph"}, _B, "the backward state is not seen", since="0.18.0"),
    _a("hook_state", "backward_active_depth", GRADIENT, _B, "a backward cannot be left", since="0.18.0"),
    _a("hook_state", "remaining_grad_acc_hooks", GRADIENT, _B, "a backward cannot be left", since="0.18.0"),
    _a("hook_state", "reset_for_new_step", GRADIENT, _B, "a backward reaches the next step", since="0.18.0"),
    _a("optimizer", "optimizer", {AUDIT}, _Z, "learning rates are not known"),
    _a("optimizer", "ipg_buckets", {"accumulator_reset"}, _Z, "half-reduced gradients stay behind", since="0.17.0"),
    _a("optimizer", "params_already_reduced", {"accumulator_reset"}, _Z, "half-reduced gradients stay behind"),
    # stages 1 and 2
    _a("optimizer", "ready_for_gradients", REPAIRING, (1, 2), "backwards without parameter gradients crash"),
    _a("optimizer", "get_gradient_for_reduction", REPAIRING, (1, 2), "backwards without parameter gradients crash"),
    _a(
        "engine", "enable_backward_allreduce", {"retained_graph"}, (1, 2), "backwards without parameter gradients crash"
    ),
    _a("optimizer", "bit16_groups", {*GRADIENT, READ}, (1, 2), "parameters cannot be listed"),
    _a("optimizer", "partition_gradients", {"accumulator_reset"}, (1, 2), "ZeRO-1 and ZeRO-2 cannot be told apart"),
    _a("optimizer", "params_in_partition", {"accumulator_reset", READ}, (1, 2), "this rank's parameters are not known"),
    _a("optimizer", "get_param_id", {"accumulator_reset", READ}, (1, 2), "parameters cannot be told apart"),
    _a("optimizer", "grad_start_offset", {READ}, (1, 2), "a parameter's piece is not known"),
    _a("optimizer", "grad_partition_insertion_offset", {READ}, (1, 2), "a parameter's slice is not known"),
    _a("optimizer", "partition_size", {READ}, (1, 2), "a parameter's slice is not known"),
    _a("optimizer", "real_dp_process_group", {READ}, (1, 2, "bf16"), "it is not known which ranks share a partition"),
    _a(
        "optimizer",
        "single_partition_of_fp32_groups",
        {"accumulator_reset", "host_read", READ},
        (1, 2),
        "the gradient that the optimizer consumes is not seen",
    ),
    _a("optimizer", "averaged_gradients", {"accumulator_reset", READ}, (1, 2), "boundary gradients cannot be added up"),
    _a("optimizer", "_release_ipg_buffers", {"accumulator_reset"}, (1, 2), "half-reduced gradients stay behind"),
    _a(
        "optimizer",
        "reduce_ready_partitions_and_remove_grads",
        {"accumulator_reset"},
        (1,),
        "gradients of non-boundary backwards are lost under overlap_comm",
    ),
    _a(
        "optimizer",
        "accumulated_grads_in_cpu",
        {"accumulator_reset", "host_read"},
        (1, 2),
        "the CPU accumulators are not seen",
        offload=True,
    ),
    _a(
        "optimizer",
        "grad_position",
        {"accumulator_reset", READ},
        (1, 2, 3),
        "a parameter's slice is not known",
        offload=True,
    ),
    _a("optimizer", "norm_for_param_grads", {"accumulator_reset"}, _Z, "the gradient norm is wrong", offload=True),
    _a("optimizer", "local_overflow", {"accumulator_reset"}, (1, 2), "an overflow outlives zero_grad", offload=True),
    _a("optimizer", "offload_gradient_dict", {"host_read"}, (1, 2), "safe_get_full_grad does not wait", offload=True),
    _a(
        "optimizer",
        "async_accumulate_grad_in_cpu_via_gpu",
        {"host_read"},
        (1, 2),
        "DeepSpeed's own reads cannot be told from the user's",
        offload=True,
    ),
    _a("optimizer", "copy_grads_in_partition", {"host_read"}, (1, 2), "copies are not seen", offload=True),
    _a(
        "optimizer",
        "_wait_for_offload_copies",
        {"host_read"},
        (1, 2),
        "DeepSpeed's own events cannot be used",
        since="0.19.8",
        offload=True,
    ),
    # BF16_Optimizer
    _a(
        "optimizer",
        "bf16_groups",
        {"accumulation", "accumulator_reset", READ},
        ("bf16",),
        "parameters cannot be listed",
    ),
    _a("optimizer", "fp32_groups_has_gradients", {"accumulator_reset", READ}, ("bf16",), "idle ones are not known"),
    _a("optimizer", "fp32_groups_gradient_flat_partition", {READ}, ("bf16",), "the fp32 gradients are not seen"),
    _a("optimizer", "clear_lp_grads", {"accumulator_reset"}, ("bf16",), "bf16 gradients stay behind"),
    _a("optimizer", "clear_hp_grads", {"accumulator_reset"}, ("bf16",), "fp32 gradients stay behind"),
    _a("optimizer", "fp32_groups_flat_partition", {"accumulator_reset"}, ("bf16",), "master weights are not seen"),
    # stage 3
    _a(
        "optimizer",
        "fp16_groups",
        {"accumulation", "accumulator_reset", "param_status", READ},
        (3,),
        "parameters cannot be listed",
    ),
    _a("optimizer", "sub_group_to_group_id", {AUDIT}, (3,), "learning rates are not known"),
    _a("optimizer", _S3, {"accumulator_reset", READ}, (3,), "the gradient partitions are not seen"),
    _a("optimizer", "grad_partitions_flat_buffer", {"accumulator_reset"}, (3,), "the gradient partitions are not seen"),
    _a(
        "optimizer",
        "fp32_partitioned_groups_flat",
        {"accumulator_reset", READ},
        (3,),
        "the gradient that the optimizer consumes is not seen",
    ),
    _a("optimizer", "partition_grads", {"host_read"}, (3,), "copies are not seen", offload=True),
    _a(
        "optimizer",
        "_get_fp32_grad_state_partition",
        {"host_read"},
        (3,),
        "gradient reads do not wait",
        since="0.17.0",
        offload=True,
    ),
    _a("optimizer", "get_fp32_grad_partitions", {"host_read"}, (3,), "gradient reads do not wait", offload=True),
    _a(
        "optimizer", "_constant_buffered_norm2", {"accumulator_reset"}, (3,), "the gradient norm is wrong", offload=True
    ),
    _a("optimizer", "parameter_offload", {"param_status"}, (3,), "gathers are not seen"),
    _a("optimizer", "get_fp32_grad_for_param", {"accumulation"}, (3,), "late gradient reads are not seen"),
    # -- modules and parameters ------------------------------------------------------------------------------------
    _a("module", "ds_inflight_param_registry", {"param_status"}, (3,), "running gathers are not seen"),
    _a("param", "ds_status", {"param_status"}, (3,), "a parameter's status is not seen"),
    _a("param", "ds_active_sub_modules", {"param_status"}, (3,), "claims of submodules are not seen"),
    _a("param", "ds_persist", {"param_status"}, (3,), "persistent parameters cannot be told apart"),
    _a("param", "ds_tensor", {"accumulator_reset"}, (3,), "a parameter's partition is not seen"),
    _a("param", "ds_id", {"accumulator_reset", READ}, (3,), "a parameter's gradient partition is not found"),
    _a("param", "ds_numel", {"param_status", READ}, (3,), "a parameter's size is not known"),
    _a("param", "ds_shape", {READ}, (3,), "a parameter's shape is not known"),
    _a("param", "ds_process_group", {READ}, (3,), "it is not known which ranks share a parameter"),
    _a("param", "partition", {"accumulation"}, (3,), "writes to gathered weights that are lost are not seen"),
    _a("param", "partition_numel", {READ}, (3,), "the size of a partition is not known"),
)


def trains(optimizer: Any) -> bool:
    """LOCAL. Whether this is an optimizer. An engine that only evaluates has None in its place, or under ZeRO-3 what
    gathers the parameters."""
    # Not step alone: a release that calls it something else must not pass for an engine that evaluates.
    return any(hasattr(optimizer, name) for name in ("step", "zero_grad", "param_groups"))


def _owner(name: str, engine: Any) -> Any:
    if name == "engine":
        return engine
    if name == "optimizer":
        return engine.optimizer
    if name == "module":
        return engine.module
    if name == "hook_state":
        return getattr(engine.optimizer, "_backward_hook_state", None)
    return next(iter(engine.module.parameters()), None)


def missing(engine: Any, guard: str, *, layout: int | str, version: str, offload: bool) -> list[Attribute]:
    """LOCAL. The attributes that ``guard`` needs on this engine and that are not there. An engine that only evaluates
    has no optimizer, and is not asked for its parts."""
    gone, training = [], trains(engine.optimizer)
    for item in TABLE:
        if not item.wanted(guard, layout, version, offload) or (item.owner == "optimizer" and not training):
            continue
        owner = _owner(item.owner, engine)
        # A part that is itself gone is named by a row of its own.
        if owner is not None and not hasattr(owner, item.name):
            gone.append(item)
    return gone
