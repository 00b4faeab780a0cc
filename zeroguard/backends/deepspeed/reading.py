"""Gradients between the boundary backward and the step, the same on every rank: norms and whole gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

import torch

from zeroguard.backends.deepspeed.pieces import GradientPieces, Piece
from zeroguard.collective import add_up, gather_evenly
from zeroguard.errors import ConfigError, GradientsUnavailableError

__all__ = ["GradientReader"]

#: Elements (fp32) of a bucket of whole gradients: 64 MiB; on a CPU 16 MiB, as malloc gives larger blocks back to the
#: system at once, and their page faults cost more than the collective. A larger parameter has a bucket of its own.
BUCKET, BUCKET_CPU = 16 * 2**20, 4 * 2**20
#: Stage 3: from this size on (4 MiB) a collective of its own costs less than the copy out of a bucket.
ALONE = 2**20
#: Elements that the CPU may add up in float32: its norm of 10^8 elements at once is wrong by a percent.
CHUNK = 2**16
_BLIND = (
    " A loss.backward() is not seen here: select one of the guards retained_graph, accumulator_reset and accumulation, "
    "or call engine.backward(loss)."
)
_WHEN = "Gradients can be read from the end of a boundary backward to engine.step()."


class GradientReader(GradientPieces):
    """Reads of one engine's gradients that every rank makes together. Stages 0 to 3, and BF16_Optimizer."""

    # -- when, and whether at all --------------------------------------------------------------------------------------

    def check(self) -> None:
        """LOCAL, but the same on every rank of a healthy loop: there are gradients to read now.

        Raises:
            GradientsUnavailableError: there are none, with the reason and what to do.
        """
        reason = self._not_now() or self._never()
        if reason:
            raise GradientsUnavailableError(reason)

    def _not_now(self) -> str:
        state, tracker = self.state, self.state.tracker
        if tracker.running is not None:
            return f"a backward is running, and its gradients are not reduced yet. {_WHEN}"
        if state.in_step:
            return f"the optimizer is stepping, and has begun to consume the gradients. {_WHEN}"
        if tracker.at_boundary or (state.step_begins and tracker.in_window):
            return ""
        if tracker.unfinished and not tracker.in_window:
            return f"the last backward raised before its gradients were reduced. {_WHEN}"
        if not tracker.in_window:
            blind = "" if state.sees_backwards else _BLIND
            return f"no backward since the last optimizer step or zero_grad. {_WHEN}{blind}"
        if not self.facts.managed_accumulation:
            return (
                "managed_gradient_accumulation is false, so DeepSpeed finishes the gradients inside engine.step(): "
                "session.watch_norms() reads them there."
            )
        return (
            f"the accumulation window is open: {tracker.in_window} backward(s) since the last step, "
            f"{self.facts.accumulation_steps} micro-batch(es) a step, and the latest backward was not at the boundary; "
            f"DeepSpeed has not reduced all gradients yet. {_WHEN}"
        )

    def _never(self) -> str:
        if not self.engine.enable_backward_allreduce:
            return "DeepSpeed does not average gradients in this backward: its optimizer communicates compressed ones."
        return self.limits()

    # -- the same on every rank ----------------------------------------------------------------------------------------

    def _votes(self, stepped: Sequence[tuple[Any, str]], dtype: torch.dtype) -> torch.Tensor:
        reached = self.reached()
        flags = [float(id(param) in reached) for param, _ in stepped]
        return torch.tensor(flags, dtype=dtype, device=self.engine.device)

    def norms(self) -> dict[str, float]:
        """COLLECTIVE over the data-parallel group, stages 0 to 3: name -> 2-norm of the whole gradient, without the
        loss scale, before clipping, in the model's order. Parameters that no backward of this window reached are left
        out.

        One all-reduce of two float64 a parameter (float32 where the accelerator has no float64); none where every rank
        holds all gradients.

        Raises:
            GradientsUnavailableError: on every rank.
        """
        self.check()
        stepped = self.stepped()
        wide = torch.float64 if self.facts.accelerator in ("cpu", "cuda") else torch.float32
        place = {id(param): index for index, (param, _) in enumerate(stepped)}
        sums = torch.zeros(len(stepped), dtype=wide, device=self.engine.device)
        by_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for param, piece in self.held():
            indices, values = by_device.setdefault(piece.device, ([], []))
            indices.append(place[id(param)])
            values.append(piece)
        for indices, values in by_device.values():  # more than one where only a part of the optimizer is offloaded
            squares = _squares(values, wide).to(sums.device)
            sums.index_add_(0, torch.tensor(indices, device=sums.device), squares)
        both = torch.stack([sums, self._votes(stepped, wide)])
        if not self.replicated:
            add_up(both, group=self.group)
        totals, seen = both.tolist()
        scale = self.scale()
        norms = {name: total**0.5 / scale for (_, name), total in zip(stepped, totals, strict=True)}
        self._refuse_nothing(seen)
        present = {name for (_, name), one in zip(stepped, seen, strict=True) if one}
        return {name: norms[name] for name in self.state.names.values() if name in present}

    @staticmethod
    def _refuse_nothing(seen: Sequence[float]) -> None:
        if not any(seen):
            raise GradientsUnavailableError(
                f"no parameter has a gradient: zero_grad took them, or no backward of this window reached any. {_WHEN}"
            )

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """COLLECTIVE over the data-parallel group, with the same names on every rank; stages 0 to 3: name -> the whole
        gradient in fp32, in the parameter's shape, on the accelerator, without the loss scale, before clipping.

        All parameters in the model's order, or those that are named, in that order. Parameters that no backward of this
        window reached are left out, as PyTorch has None there. One small all-reduce, then an all-reduce (stages 1 and
        2) or an all-gather (stage 3) a bucket; none at all where every rank holds all gradients. The tensors of one
        bucket share memory.

        Raises:
            ConfigError: a name that the model does not have.
            GradientsUnavailableError: on every rank; also for a named parameter that the optimizer does not step.
        """
        stepped = self.stepped()
        order = self._order(names, {name for _, name in stepped})
        self.check()
        votes = self._votes(stepped, torch.float32)
        if not self.replicated:
            add_up(votes, group=self.group)
        seen = votes.tolist()
        self._refuse_nothing(seen)
        chosen = set(order)
        wanted = [item for item, one in zip(stepped, seen, strict=True) if one and item[1] in chosen]
        held = {id(piece.param): piece for piece in self.pieces()}
        whole: dict[str, torch.Tensor] = {}
        size = BUCKET_CPU if self.facts.accelerator == "cpu" else BUCKET
        for bucket in _buckets(wanted, size, ALONE if self.layout == 3 else size):
            whole.update(self._gathered(bucket, held) if self.layout == 3 else self._added_up(bucket, held))
        if self.facts.offload and not self.facts.resolves_data_dependency:
            # Copies from page-locked memory may be on their way, and the step is about to write there.
            self.state.accelerator().current_stream().synchronize()
        return {name: whole[name] for name in order if name in whole}

    def _order(self, names: Sequence[str] | None, stepped: set[str]) -> list[str]:
        known = list(self.state.names.values())
        if names is None:
            return [name for name in known if name in stepped]
        asked = [names] if isinstance(names, str) else list(names)
        for name in asked:
            if name not in known:
                near = get_close_matches(name, known, 1, 0.0)
                raise ConfigError(
                    f"gradients(names=...): the model has no parameter {name!r}; the nearest is {near[0]!r}."
                )
            if name not in stepped:
                raise GradientsUnavailableError(f"{name} is frozen: the optimizer does not step it.")
        return asked

    def _added_up(self, bucket: Sequence[tuple[Any, str]], held: dict[int, Piece]) -> dict[str, torch.Tensor]:
        """Each rank writes what it holds into zeros."""
        starts = list(accumulate((param.numel() for param, _ in bucket), initial=0))
        pieces = [(start, held.get(id(param))) for start, (param, _) in zip(starts, bucket, strict=False)]
        flat = self._filled(starts[-1], [(start + p.offset_in_param, p.values) for start, p in pieces if p is not None])
        if not self.replicated:
            add_up(flat, group=self.group)
        return {
            name: flat.narrow(0, start, param.numel()).view(param.shape)
            for start, (param, name) in zip(starts, bucket, strict=False)
        }

    def _gathered(self, bucket: Sequence[tuple[Any, str]], held: dict[int, Piece]) -> dict[str, torch.Tensor]:
        """Stage 3: every rank holds an equally long part of each parameter, the last one padded."""
        sizes = [param.partition_numel() for param, _ in bucket]
        starts = list(accumulate(sizes, initial=0))
        pieces = [(start, held.get(id(param))) for start, (param, _) in zip(starts, bucket, strict=False)]
        mine = self._filled(starts[-1], [(start, piece.values) for start, piece in pieces if piece is not None])
        rows = gather_evenly(mine, group=self.group).split(sizes, dim=1)
        return {  # reshape copies, but for a bucket of one parameter
            name: part.reshape(-1).narrow(0, 0, param.ds_numel).view(param.ds_shape)
            for (param, name), part in zip(bucket, rows, strict=True)
        }

    def _filled(self, numel: int, values: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Each tensor, whatever its dtype and device, at its place among zeros, with the loss scale taken out."""
        whole = sum(value.numel() for _, value in values) == numel
        make = torch.empty if whole else torch.zeros
        flat = make(numel, dtype=torch.float32, device=self.engine.device)
        if values:
            places = [flat.narrow(0, start, value.numel()) for start, value in values]
            torch._foreach_copy_(places, [value for _, value in values], non_blocking=True)
        scale = self.scale()
        return flat if scale == 1.0 else flat.div_(scale)


def _buckets(wanted: Sequence[tuple[Any, str]], most: int, alone: int) -> Iterator[list[tuple[Any, str]]]:
    """In order, of ``most`` elements; a parameter of ``alone`` elements or more by itself."""
    bucket: list[tuple[Any, str]] = []
    size = 0
    for param, name in wanted:
        numel = getattr(param, "ds_numel", param.numel())
        if numel >= alone:
            yield [(param, name)]
            continue
        if bucket and size + numel > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((param, name))
        size += numel
    if bucket:
        yield bucket


def _squares(values: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of squares of each, on their device: in float32 within a piece (on the host: a chunk), then in dtype."""
    if values[0].device.type != "cpu":
        # What clip_grad_norm_ uses: one kernel for many tensors, which adds up in chunks by itself.
        return torch.stack(torch._foreach_norm(values, 2, dtype=torch.float32)).to(dtype).square_()
    chunks = [value.split(CHUNK) if value.numel() > CHUNK else (value,) for value in values]
    norms = [torch.linalg.vector_norm(chunk, dtype=torch.float32) for parts in chunks for chunk in parts]
    squares = torch.stack(norms).to(dtype).square_()
    if len(norms) == len(values):
        return squares
    owner = torch.tensor([index for index, parts in enumerate(chunks) for _ in parts])
    return torch.zeros(len(values), dtype=dtype).index_add_(0, owner, squares)
