"""Gradients by sample: what autograd delivered, beside what the optimizer is about to consume.

In a window that is audited, a prehook on each parameter's AccumulateGrad node copies a few elements of the gradient
that autograd delivers, the same global elements on every rank, into one row a backward. Before the step the rows are
summed, averaged over the ranks in one all-reduce, and compared with the same elements of what the optimizer consumes,
each rank for the elements that it owns. The node, and not a hook on the tensor, because torch.autograd.grad with
respect to a parameter passes that one, too, and accumulates nothing. (ZeRO-3 has to do with the tensor's hook.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroguard.backends.base import GradientAudit, Mismatch, UpdateAudit
from zeroguard.collective import mean_over

__all__ = ["GradientSamples", "Sections", "Values"]

#: (id of the parameter, offset in it, flat values)
Values = Iterable[tuple[int, int, torch.Tensor]]
#: Flat tensors, each with the parameters in it: (id, first element of the parameter, elements, where they begin there).
Sections = Iterable[tuple[torch.Tensor, Iterable[tuple[int, int, int, int]]]]


@dataclass(slots=True)
class _Place:
    """A parameter's samples: ``count`` elements from ``start`` in every row, at ``offset + i * stride`` of the
    parameter."""

    name: str
    param: Any
    start: int
    count: int
    stride: int = 1
    offset: int = 0


#: A parameter's place, the first of its samples, and how many.
Span = tuple[_Place, int, int]


def _unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


class GradientSamples:
    """The samples of one engine. LOCAL but for :meth:`compare`.

    Args:
        params: (name, parameter) of everything that the optimizer steps, in the same order on every rank.
        device: where the rows live.
        ranks: data-parallel ranks that DeepSpeed averages over.
        groups: their process group, in a list; empty on one rank.
        dtypes: every dtype that a gradient passes on its way to the optimizer.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, Any]],
        device: torch.device,
        ranks: int,
        groups: Sequence[Any],
        dtypes: Iterable[torch.dtype],
    ) -> None:
        self.params = params
        self.device = device
        self.ranks = ranks
        self.groups = groups
        self.dtypes = tuple(set(dtypes))
        self.armed = False
        self.places: list[_Place] = []
        self.rows: list[torch.Tensor] = []
        self.fired: set[int] = set()
        #: why this window cannot be judged; empty where it can
        self.spoilt = ""
        self._open = False
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._by_param: dict[int, int] = {}
        self._before: dict[str, Any] = {}

    # -- sampling ----------------------------------------------------------------------------------------------------

    def arm(self, elements: int, seed: int) -> None:
        """Sample this window: ``elements`` of each parameter, 0 for all of them. The same places on every rank, other
        ones for another ``seed``."""
        self.disarm()
        self.armed = True
        self.places = self._layout(elements, seed)
        self._by_param = {id(place.param): number for number, place in enumerate(self.places)}
        for place in self.places:
            if not place.param.requires_grad:
                continue
            if hasattr(place.param, "ds_id"):
                # ZeRO-3: asking for the node of a parameter that is partitioned would make one for its empty shape.
                hook = self._hook(place)
                self._handles.append(place.param.register_hook(lambda grad, hook=hook: hook((grad,))))
                continue
            node = torch.autograd.graph.get_gradient_edge(place.param).node
            self._nodes.append(node)  # nothing else may keep it alive, and a new one would not have the hook
            self._handles.append(node.register_prehook(self._hook(place)))

    def _layout(self, elements: int, seed: int) -> list[_Place]:
        places: list[_Place] = []
        start = 0
        for number, (name, param) in enumerate(self.params):
            size = int(getattr(param, "ds_numel", 0) or param.numel())
            if not size:
                continue
            count = size if elements == 0 else min(elements, size)
            stride = size // count
            if stride > 2:
                # Not the widest stride: that would meet the same column of a matrix again and again.
                stride -= (seed * 7 + number) % (stride // 2)
            slack = size - (count - 1) * stride
            offset = (seed * 2654435761 + number * 40503) % slack
            places.append(_Place(name, param, start, count, stride, offset))
            start += count
        self.size = start
        return places

    def _hook(self, place: _Place) -> Any:
        start, count, stride, offset = place.start, place.count, place.stride, place.offset

        def arrived(grads: tuple[torch.Tensor | None, ...]) -> None:
            grad = grads[0]
            if not self._open or grad is None:
                return
            if grad.is_sparse:
                self.spoilt = self.spoilt or f"{place.name} has a sparse gradient"
                return
            flat = grad if grad.is_contiguous() else grad.contiguous()
            values = flat.as_strided((count,), (stride,), flat.storage_offset() + offset)
            target = self.rows[-1].narrow(0, start, count)
            if start in self.fired:
                target.add_(values)  # reentrant checkpointing: a parameter's gradient may come in parts
            else:
                self.fired.add(start)
                target.copy_(values)

        return arrived

    def began(self) -> None:
        """A backward begins: a row for it."""
        self.rows.append(torch.zeros(self.size, dtype=torch.float32, device=self.device))
        self.fired.clear()
        self._open = True

    def ended(self) -> None:
        """The backward is over."""
        self._open = False

    def spoil(self, why: str) -> None:
        """This window cannot be judged."""
        self.spoilt = self.spoilt or why
        self._open = False

    def clear(self) -> None:
        """zero_grad: the window begins again, maybe with other parameters that are trained."""
        self.disarm()

    def disarm(self) -> None:
        """The step is over: no hook stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self.rows.clear()
        self._before.clear()
        self.spoilt = ""
        self.armed = self._open = False

    # -- comparing -----------------------------------------------------------------------------------------------------

    def tolerance(self) -> float:
        """The relative error, of the sum of absolute contributions, that rounding can make.

        With B backwards, W ranks and u the largest unit roundoff of the dtypes that a gradient passes: each of the B
        contributions is rounded once and added (B + 1 roundings), W of these sums are cast, scaled, added and scaled
        again (W + 3 roundings), each relative to partial sums that are at most the sum of absolute values. The audit's
        own float32 sums add B + W roundings of theirs.
        """
        u = max(_unit(dtype) for dtype in self.dtypes)
        b, w = max(len(self.rows), 1), self.ranks
        return (b + 1 + w + 3) * u + (b + w) * _unit(torch.float32)

    def floor(self) -> float:
        """The absolute error that underflow can make: half the smallest number of the narrowest dtype, once for each
        rounding."""
        smallest = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in self.dtypes)
        return (len(self.rows) + self.ranks + 4) * smallest

    def compare(self, pieces: Values, masters: Sections = (), copies: Sections = ()) -> GradientAudit:
        """COLLECTIVE, one all-reduce of three floats a sample, and one wait for the device.

        Args:
            pieces: what this rank's optimizer is about to consume, as (id of the parameter, offset in it, flat values).
            masters: the flat fp32 partitions of this rank; none where there are none to look at.
            copies: the same elements of the weights that the forward uses.
        """
        rows = self.rows or [torch.zeros(self.size, dtype=torch.float32, device=self.device)]
        stacked = torch.stack(rows)
        spoilt = torch.full((1,), 1.0 if self.spoilt else 0.0, device=self.device)
        mine = torch.cat([stacked.sum(0), stacked.abs().sum(0), rows[-1], spoilt])
        local = mine.narrow(0, 0, self.size).clone()
        mean_over(mine, self.groups, self.ranks)
        expected, bound, last = mine[:-1].view(3, self.size).unbind(0)
        seen, owned = self._pull(pieces)
        limit = bound * self.tolerance() + self.floor()
        mask = self._mask(owned).to(self.device)
        wrong = ~((seen - expected).abs() <= limit) & mask
        edited = self._edited(masters, copies)
        facts = [mine[-1] > 0, ~torch.isfinite(bound).all(), wrong.any(), edited.any()]
        others, overflow, any_wrong, any_edited = torch.stack(facts).tolist()
        if self.spoilt or others:
            return GradientAudit(skipped=self.spoilt or "another rank cannot judge this window")
        if overflow:
            return GradientAudit(skipped="autograd delivered gradients that are not finite (overflow)")
        self._before["gradient"] = seen
        vectors = (expected, limit, last, local, seen)
        mismatches = self._mismatches(vectors, owned) if any_wrong else ()
        names = self._named(edited) if any_edited else ()
        return GradientAudit(len(owned), mismatches, "", self.tolerance(), names)

    def _inside(self, key: int, start: int, size: int) -> tuple[_Place, int, int] | None:
        """The samples of a parameter that lie in its elements ``start`` to ``start + size``: the place, the first one,
        and how many."""
        number = self._by_param.get(key)
        if number is None or not size:
            return None
        place = self.places[number]
        first = max(0, -(-(start - place.offset) // place.stride))
        last = min(place.count - 1, (start + size - 1 - place.offset) // place.stride)
        return None if last < first else (place, first, last - first + 1)

    def _pull(self, pieces: Values) -> tuple[torch.Tensor, list[Span]]:
        """The values at the sampled places, and the spans of samples that this rank owns."""
        out = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        owned: list[Span] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for key, start, values in pieces:
            found = self._inside(key, start, values.numel())
            if found is None:
                continue
            place, first, count = found
            inside = place.offset + first * place.stride - start
            # One view instead of two slices: there may be thousands of them. Pieces are flat and contiguous.
            sources.append(values.as_strided((count,), (place.stride,), values.storage_offset() + inside))
            targets.append(out.narrow(0, place.start + first, count))
            owned.append((place, first, count))
        if targets and sources[0].device == self.device:
            torch._foreach_copy_(targets, sources)
        elif targets:  # in host memory: one transfer, not one a parameter
            host = torch.cat([source.float() for source in sources]).to(self.device)
            torch._foreach_copy_(targets, list(host.split([source.numel() for source in sources])))
        return out, owned

    def _gather(self, sections: Sections) -> tuple[torch.Tensor, list[Span]]:
        """As :meth:`_pull`, from a few flat tensors that hold many parameters each: one gather a tensor."""
        out = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        owned: list[Span] = []
        for flat, members in sections:
            starts, strides, counts, places = [], [], [], []
            for key, start, size, base in members:
                found = self._inside(key, start, size)
                if found is None:
                    continue
                place, first, count = found
                starts.append(base + place.offset + first * place.stride - start)
                strides.append(place.stride)
                counts.append(count)
                places.append(place.start + first)
                owned.append(found)
            if not counts:
                continue
            table = torch.tensor([starts, strides, places, [0, *itertools.accumulate(counts)][:-1]])
            start_, stride_, place_, before = table.repeat_interleave(torch.tensor(counts), dim=1)
            within = torch.arange(before.numel()) - before
            source = (start_ + stride_ * within).to(flat.device, non_blocking=True)
            target = (place_ + within).to(self.device, non_blocking=True)
            out[target] = flat[source].to(self.device, torch.float32)
        return out, owned

    def _mask(self, owned: list[Span]) -> torch.Tensor:
        mask = torch.zeros(self.size, dtype=torch.bool)
        for place, first, count in owned:
            mask[place.start + first : place.start + first + count] = True
        return mask

    def _edited(self, masters: Sections, copies: Sections) -> torch.Tensor:
        """Where a low-precision weight is not its master weight, rounded; remembers the master weights."""
        high, owned = self._gather(masters)
        self._before = {"masters": high, "owned": owned}
        if not owned:
            return torch.zeros(self.size, dtype=torch.bool, device=self.device)
        return self._not_the_cast(high, copies)

    def _not_the_cast(self, high: torch.Tensor, copies: Sections) -> torch.Tensor:
        low, _ = self._gather(copies)
        kinds = {place.param.dtype for place in self.places}
        rounded = high
        if len(kinds) == 1:
            rounded = high.to(kinds.pop()).float()
        else:
            rounded = torch.cat([high.narrow(0, p.start, p.count).to(p.param.dtype).float() for p in self.places])
        return (rounded != low) & ~(torch.isnan(rounded) & torch.isnan(low))

    def _named(self, where: torch.Tensor) -> tuple[str, ...]:
        flags = where.cpu()
        return tuple(p.name for p in self.places if bool(flags.narrow(0, p.start, p.count).any()))

    def _mismatches(self, vectors: tuple[torch.Tensor, ...], owned: list[Span]) -> tuple[Mismatch, ...]:
        there = [vector.cpu() for vector in vectors]
        out = []
        for place, first, count in owned:
            start = place.start + first
            e, t, newest, mine, s = (vector.narrow(0, start, count).double() for vector in there)
            if not bool(((s - e).abs() <= t).all()):
                out.append(self._classify(place.name, e, t, newest, mine, s))
        return tuple(out)

    def _classify(
        self, name: str, e: torch.Tensor, t: torch.Tensor, last: torch.Tensor, mine: torch.Tensor, s: torch.Tensor
    ) -> Mismatch:
        """What kind of wrong; the simplest explanation that fits all samples within their limits."""
        size = max(float(e.norm()), float(s.norm()))
        error = float((s - e).norm()) / size if size > 0 else 0.0

        def fits(other: torch.Tensor, slack: float = 1.0) -> bool:
            return bool(((s - other).abs() <= slack * t).all())

        if not bool(torch.isfinite(s).all()):
            return Mismatch(name, "not_finite", error=float("inf"))
        if bool((e == 0).all()) and bool((t <= 2 * self.floor()).all()):
            return Mismatch(name, "stale", error=error)
        if not bool(s.any()):
            return Mismatch(name, "lost", error=error, factor=0.0)
        if len(self.rows) > 1 and fits(last):
            return Mismatch(name, "overwritten", error=error)
        if self.ranks > 1:
            if fits(mine / self.ranks, self.ranks) or fits(mine, self.ranks):
                return Mismatch(name, "not_reduced", error=error)
            if fits(e - mine / self.ranks, 2.0):
                return Mismatch(name, "missing_on_rank", error=error)
        factor = float(s @ e) / float(e @ e) if bool(e.any()) else 0.0
        if factor and fits(factor * e, 2 * max(1.0, abs(factor))):
            return Mismatch(name, "duplicated" if abs(factor - 2) < 0.02 else "scaled", error=error, factor=factor)
        return Mismatch(name, "differs", error=error)

    # -- after the step ------------------------------------------------------------------------------------------------

    def moved(self, masters: Sections, copies: Sections, rates: dict[int, float], factor: float) -> UpdateAudit:
        """After the step, LOCAL, one wait for the device.

        ``unmoved`` are parameters whose sampled master weights did not change in a single bit although a nonzero
        gradient and a learning rate should have moved them by more than rounding: by rate * gradient (SGD) or by rate
        (Adam), whichever is less.

        Args:
            masters, copies: as for :meth:`compare`.
            rates: learning rates by id of the parameter.
            factor: what the gradients were multiplied by on their way into the step (clipping, loss scale).
        """
        if not self._before or "gradient" not in self._before:
            return UpdateAudit()
        before, owned = self._before["masters"], self._before["owned"]
        after, _ = self._gather(masters)
        counts = torch.tensor([place.count for place in self.places])
        rate = torch.tensor([rates.get(id(place.param), 0.0) for place in self.places]).repeat_interleave(counts)
        index = torch.arange(len(self.places)).repeat_interleave(counts).to(self.device)
        mask = self._mask(owned).to(self.device)
        gradient = (self._before["gradient"].abs() * factor).clamp(max=1.0)
        felt = (rate.to(self.device) * gradient > before.abs() * 2.0**-18) & mask
        changed = (after != before) & mask
        differs = self._not_the_cast(after, copies) & mask
        sums = torch.zeros(3, len(self.places), device=self.device)
        sums.index_add_(1, index, torch.stack([felt, changed, differs]).float())
        unmoved, not_cast = [], []
        for place, can, did, off in zip(self.places, *sums.tolist(), strict=True):
            if can and not did:
                unmoved.append(place.name)
            if off:
                not_cast.append(place.name)
        return UpdateAudit(tuple(unmoved), tuple(not_cast))
