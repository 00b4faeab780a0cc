"""The pieces of gradients that one rank holds between the boundary backward and the step.

Where a gradient waits for the optimizer step, read from DeepSpeed's runtime/zero/stage_1_and_2.py and stage3.py,
runtime/bf16_optimizer.py and runtime/engine.py, releases 0.16.9 to 0.19.8:

* stage 0: ``.grad``, averaged by the boundary backward, the same on every rank;
* stages 1 and 2: ``averaged_gradients``, a tensor a parameter, cut where this rank's partition begins and ends, or
  (fp32 accumulation of lower-precision parameters) slices of one flat tensor; offloaded: slices of the fp32 partition's
  ``.grad``;
* stage 3: each parameter's slice of one flat buffer; offloaded: of the fp32 partition's ``.grad``;
* BF16_Optimizer: whole fp32 gradients, averaged by the boundary backward, of which each rank steps its partition.

All of them are averages over the ranks, multiplied by the loss scale (fp16) and not clipped yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zeroguard.backends.deepspeed.attributes import missing
from zeroguard.backends.deepspeed.sections import Members, Section, SharedMemory

if TYPE_CHECKING:
    from zeroguard.backends.deepspeed.state import BackendState

__all__ = ["GradientPieces", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of one parameter's gradient, as the optimizer step will consume it.

    Attributes:
        name: the parameter's name in the engine's module; a tied one's first name.
        param: the parameter.
        offset_in_param: where the piece begins in the flattened parameter, in elements.
        values: flat; a view of DeepSpeed's own memory, on the accelerator or the host, in DeepSpeed's dtype, multiplied
            by the loss scale. Never to be written to or kept.
    """

    name: str
    param: Any
    offset_in_param: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Where this rank's piece of a parameter lies: elements ``start`` to ``start + numel`` of the flattened parameter,
    at ``dest`` in its group's partition."""

    name: str
    param: Any
    start: int
    dest: int
    numel: int


class GradientPieces:
    """What this rank holds of each gradient. LOCAL throughout; stages 0 to 3, and BF16_Optimizer.

    Attributes:
        replicated: whether every rank holds and steps all gradients whole (stage 0).
    """

    def __init__(self, state: BackendState) -> None:
        self.state = state
        self.engine = state.engine
        self.optimizer = state.optimizer
        self.facts = state.facts
        self.layout = state.facts.layout
        self.replicated = self.layout == 0
        #: group -> this rank's parts; made at the first read: DeepSpeed's partitioning does not change
        self._parts: list[list[_Part]] | None = None
        self._limits: str | None = None
        self._memory: dict[int, SharedMemory] = {}

    @property
    def group(self) -> Any:
        """The data-parallel group; None for the default one."""
        return self.state.groups[0] if self.state.groups else None

    def scale(self) -> float:
        """LOCAL. What the gradients are multiplied by: the loss scale of fp16, else 1."""
        optimizer = self.optimizer
        scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
        scaler = scaler or getattr(self.engine, "torch_autocast_z0_gradscaler", None)
        if scaler is not None:
            return float(scaler.get_scale())
        if getattr(optimizer, "custom_loss_scaler", False) and optimizer.external_loss_scale:
            return float(optimizer.external_loss_scale)
        config = getattr(optimizer, "loss_scale_config", None)
        return float(getattr(optimizer if config is None else config, "cur_scale", 1.0))

    def pieces(self) -> Iterator[Piece]:
        """LOCAL, stages 0 to 3. What this rank holds, without a copy; waits for pending copies to the host.

        Frozen parameters, and parameters of which this rank owns nothing, have no piece; a parameter that no backward
        reached may have one: what DeepSpeed is about to step it with. Parameters come in the optimizer's order.
        """
        if self.layout == 0:
            yield from (Piece(name, param, 0, values) for name, param, values in self._whole())
        else:
            yield from (Piece(part.name, part.param, part.start, values) for part, values in self.parts())

    def held(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """LOCAL, stages 0 to 3. Parameter and flat values of each of :meth:`pieces`."""
        if self.layout == 0:
            return ((param, values) for _, param, values in self._whole())
        return ((part.param, values) for part, values in self.parts())

    def parts(self) -> Iterator[tuple[_Part, torch.Tensor]]:
        """LOCAL, stages 1 to 3. As :meth:`pieces`, by this rank's parts."""
        for _, parts, held in self._by_group():
            if isinstance(held, torch.Tensor):
                flat = held.view(-1)
                held = [flat.narrow(0, part.dest, part.numel) for part in parts]
            for part, values in zip(parts, held, strict=False):
                if self._stepped_with(part):
                    flat = values.detach().reshape(-1)
                    yield part, flat if flat.numel() == part.numel else flat.narrow(0, 0, part.numel)

    def sections(self) -> Iterator[Section]:
        """LOCAL, stages 0 to 3. The same as :meth:`pieces`, by the memory that the pieces share: for reads of a few
        elements of many parameters."""
        if self.layout == 0:
            for _, param, values in self._whole():
                yield values, Members([(id(param), 0, values.numel(), 0)])
            return
        for group, parts, held in self._by_group():
            taken = [part for part in parts if self._stepped_with(part)]
            if isinstance(held, torch.Tensor):
                yield held.view(-1), Members([(id(p.param), p.start, p.numel, p.dest) for p in taken])
                continue
            if len(taken) != len(parts):
                held = [values for part, values in zip(parts, held, strict=False) if self._stepped_with(part)]
            pieces = [(id(p.param), p.start, p.numel) for p, _ in zip(taken, held, strict=False)]
            yield from self._memory.setdefault(group, SharedMemory()).sections(pieces, held)

    def _by_group(self) -> Iterator[tuple[int, list[_Part], torch.Tensor | Sequence[torch.Tensor]]]:
        """Group, this rank's parts, and what :meth:`_held` says of them. What DeepSpeed's lists would wait for has been
        waited for."""
        if self.facts.offload:
            self._wait()
        with self.state.copies.inside():
            for group, parts in enumerate(self.partition()):
                yield group, parts, self._held(group, parts)

    def _stepped_with(self, part: _Part) -> bool:
        """Whether the optimizer is about to step this with what is held (stage 3 steps frozen ones with zeros)."""
        return bool(part.name) and (part.param.requires_grad or self.layout != 3 or bool(self.facts.offload))

    def _wait(self) -> None:
        state = self.state
        if state.sees_copies or self.facts.own_copy_events or state.copies.unseen:
            state.copies.wait()
        elif not self.facts.resolves_data_dependency:
            state.accelerator().synchronize()

    def _whole(self) -> Iterator[tuple[str, Any, torch.Tensor]]:
        for param, name in self.stepped():
            grad = param.grad
            if grad is not None:
                yield name, param, (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)

    def _held(self, group: int, parts: Sequence[_Part]) -> torch.Tensor | Sequence[torch.Tensor]:
        """The gradients of a group: one flat tensor, or contiguous tensors that begin as ``parts`` do; nothing where
        DeepSpeed has none."""
        opt = self.optimizer
        if self.layout == "bf16":
            held = opt.fp32_groups_gradient_flat_partition[group]
        elif self.facts.offload:
            held = self.state.master_weights()[group].grad
        elif self.layout == 3:
            table = opt._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            return [table[part.param.ds_id] for part in parts]
        else:
            averaged = opt.averaged_gradients.get(group)
            held = None if averaged is None else getattr(averaged, "flat_partition", None)
            if averaged is not None and held is None:
                # One tensor a parameter, cut as the parts are, and paddings, which have no part.
                return [t for t in averaged if not getattr(t, "_zero_padding", False)]
        return () if held is None else held

    def partition(self) -> list[list[_Part]]:
        """Where this rank's piece of each parameter lies, by group of the optimizer (stage 3: by sub-group); not at
        stage 0."""
        if self._parts is None:
            make = {3: self._parts3, "bf16": self._parts_bf16}.get(self.layout, self._parts12)
            self._parts = [list(parts) for parts in make()]
        return self._parts

    def _parts12(self) -> Iterator[list[_Part]]:
        opt, names = self.optimizer, self.state.names
        for group, params in enumerate(opt.params_in_partition):
            rank = self._rank(opt.real_dp_process_group[group])
            starts, dests = opt.grad_start_offset[group][rank], opt.grad_partition_insertion_offset[group][rank]
            parts = []
            for param in params:
                key = opt.get_param_id(param)
                start, dest = int(starts[key]), int(dests[key])
                numel = int(min(param.numel() - start, opt.partition_size[group] - dest))
                parts.append(_Part(names.get(id(param), ""), param, start, dest, numel))
            yield parts

    def _parts3(self) -> Iterator[list[_Part]]:
        opt, names = self.optimizer, self.state.names
        for params in opt.fp16_groups:
            parts, dest = [], 0
            for param in params:
                size = param.partition_numel()
                start = self._rank(param.ds_process_group) * size
                numel = min(size, param.ds_numel - start)  # the last partition is padded
                if numel > 0:
                    parts.append(_Part(names.get(id(param), ""), param, start, dest, numel))
                dest += size
            yield parts

    def _parts_bf16(self) -> Iterator[list[_Part]]:
        opt, names = self.optimizer, self.state.names
        for group, params in enumerate(opt.bf16_groups):
            size = opt.fp32_groups_gradient_flat_partition[group].numel()
            begin = self._rank(opt.real_dp_process_group[group]) * size
            parts, offset = [], 0  # offset: of the parameter in the flat group
            for param in params:
                start, end = max(begin - offset, 0), min(begin + size - offset, param.numel())
                if start < end:
                    parts.append(_Part(names.get(id(param), ""), param, start, offset + start - begin, end - start))
                offset += param.numel()
            yield parts

    # -- the same on every rank of a healthy loop ----------------------------------------------------------------------

    def stepped(self) -> list[tuple[Any, str]]:
        """(parameter, name) of all that the optimizer steps, in its order."""
        if self.layout == 0:
            return [(p, name) for name, p in self.engine.module.named_parameters() if p.requires_grad]
        table = {3: "fp16_groups", "bf16": "bf16_groups"}.get(self.layout, "bit16_groups")
        names = self.state.names
        return [(p, names[id(p)]) for group in getattr(self.optimizer, table) for p in group if id(p) in names]

    def reached(self) -> set[int]:
        """Keys of parameters that a backward of this window reached, as far as this rank knows."""
        if self.layout == 0:
            return {id(p) for p, _ in self.stepped() if p.grad is not None}
        if self.layout == "bf16":
            flags = zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_has_gradients, strict=True)
            return {id(p) for params, has in flags for p, one in zip(params, has, strict=True) if one}
        accumulators = self.state.accumulators
        if not self.state.sees_backwards or accumulators.unknown:
            return {id(p) for p, _ in self.stepped()}
        return accumulators.entered | accumulators.now

    # -- what cannot be read -------------------------------------------------------------------------------------------

    def limits(self) -> str:
        """Why this engine's gradients cannot be read at all; empty where they can. Worked out once, but for what may
        begin later."""
        compiled = getattr(self.engine, "is_deepcompile_active", None)
        if compiled is not None and compiled():
            return "DeepCompile keeps the gradients in buffers of its own."
        if self._limits is None:
            self._limits = self._find_limits()
        return self._limits

    def _find_limits(self) -> str:
        engine, optimizer, facts = self.engine, self.optimizer, self.facts
        gone = missing(engine, "reading", layout=self.layout, version=facts.deepspeed_version, offload=facts.offload)
        groups = getattr(optimizer, "param_groups", ())
        if gone:
            names = ", ".join(f"{item.owner}.{item.name} ({item.lost})" for item in gone)
            return f"DeepSpeed {facts.deepspeed_version} lacks {names}."
        if getattr(engine, "pipeline_parallelism", False):
            return "a pipeline engine reduces and steps inside train_batch(); there is no moment in between."
        if facts.offload_optimizer == "nvme":
            return "the gradients have been swapped out to NVMe."
        if getattr(optimizer, "zenflow", False):
            return "ZenFlow steps a part of the gradients earlier than the rest."
        if self.layout in (1, 2, 3) and any(group.get("use_muon") for group in groups):
            return "Muon has put its update in the gradient's place (ZeRO-1 and 2), or will in mid-step."
        return self._other_groups()

    def _other_groups(self) -> str:
        """Experts and MiCS: parameters that are averaged or partitioned over other ranks than the rest."""
        if self.replicated:
            moe = getattr(self.engine, "has_moe_layers", False)
            return "the experts' gradients differ between the ranks of the data-parallel group." if moe else ""
        if self.layout == 3:
            used = {id(p.ds_process_group): p.ds_process_group for p, _ in self.stepped()}.values()
        else:
            used = self.optimizer.real_dp_process_group
        size = self._size(self.group)
        if any(self._size(group) != size for group in used):
            return (
                "some parameters are partitioned over fewer ranks than the data-parallel group has (expert parallelism "
                "or MiCS): the ranks' pieces do not add up to one gradient."
            )
        return ""

    @staticmethod
    def _size(group: Any) -> int:
        return torch.distributed.get_world_size(group=group) if torch.distributed.is_initialized() else 1

    @staticmethod
    def _rank(group: Any) -> int:
        return torch.distributed.get_rank(group=group) if torch.distributed.is_initialized() else 0
