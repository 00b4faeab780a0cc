"""Gradients by sample: what autograd delivered, beside what the optimizer is about to consume.

In a window that is audited, a prehook on each parameter's AccumulateGrad node copies a few elements of the gradient
that autograd delivers, the same global elements on every rank, into one row a backward. Before the step the rows are
summed, averaged over the ranks in one all-reduce, and compared with the same elements of what the optimizer consumes,
each rank for the elements that it owns. The node, and not a hook on the tensor, because torch.autograd.grad with
respect to a parameter passes that one, too, and accumulates nothing. (ZeRO-3 has to do with the tensor's hook.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zeroguard.backends.base import GradientAudit, Mismatch, UpdateAudit
from zeroguard.backends.deepspeed.mismatch import Seen, classify
from zeroguard.backends.deepspeed.samples import Place, Places, Sampled
from zeroguard.backends.deepspeed.sections import Section
from zeroguard.collective import mean_over

__all__ = ["MOST", "GradientSamples"]

#: Samples of an audited step in all, each of which takes up to 200 bytes on the way: a model with more than 4096
#: parameters is audited at fewer places of each than 64.
MOST = 2**18


def _unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


class _Arrival:
    """A hook of the backward: a parameter's gradient is there. As little as can be, in time and in memory: there are as
    many as parameters, for a step."""

    __slots__ = ("number", "place", "samples")

    def __init__(self, samples: GradientSamples, number: int, place: Place) -> None:
        self.samples = samples
        self.number = number
        self.place = place

    def __call__(self, given: Any) -> None:
        # A node hands on a tuple, a tensor's hook gets the gradient itself.
        grad = given if isinstance(given, torch.Tensor) else given[0]
        samples, place = self.samples, self.place
        if not samples.open or grad is None:
            return
        if grad.is_sparse:
            samples.spoilt = samples.spoilt or f"{place.name} has a sparse gradient"
            return
        flat = grad if grad.is_contiguous() else grad.contiguous()
        values = flat.as_strided((place.count,), (place.stride,), flat.storage_offset() + place.offset)
        if self.number in samples.fired:
            samples.targets[self.number].add_(values)  # reentrant checkpointing: a gradient may come in parts
        else:
            samples.fired.add(self.number)
            samples.targets[self.number].copy_(values)


class GradientSamples:
    """The samples of one engine. LOCAL but for :meth:`compare`.

    Args:
        params: gives (parameter, name) of everything that the optimizer steps, in the same order on every rank.
        device: where the rows live.
        ranks: data-parallel ranks that DeepSpeed averages over.
        groups: their process group, in a list; empty on one rank.
        dtypes: every dtype that a gradient passes on its way to the optimizer.
    """

    def __init__(
        self,
        params: Callable[[], Sequence[tuple[Any, str]]],
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
        self._nowhere = self.places = Places((), 0, 0, device)
        self.rows: list[torch.Tensor] = []
        #: numbers of the parameters that have got a gradient in this backward
        self.fired: set[int] = set()
        #: why this window cannot be judged; empty where it can
        self.spoilt = ""
        self.open = False
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._unwatched: list[tuple[int, Place]] = []
        #: the newest row, by parameter
        self.targets: Sequence[torch.Tensor] = ()
        #: what the optimizer was about to consume, and the master weights
        self._before: tuple[Sampled, Sampled] | None = None

    # -- sampling ----------------------------------------------------------------------------------------------------

    def arm(self, elements: int, seed: int) -> None:
        """Sample this window: ``elements`` of each parameter, 0 for all of them. The same places on every rank, other
        ones for another ``seed``."""
        spoilt = self.spoilt  # said before the window's first backward
        self.disarm()
        self.armed, self.spoilt = True, spoilt
        params = self.params()
        if elements:
            elements = max(1, min(elements, MOST // max(1, len(params))))
        self.places = Places(params, elements, seed, self.device)
        self._unwatched = list(enumerate(self.places.all))
        self._watch()

    def _watch(self) -> None:
        """Hook what is trained by now; a loop may freeze parameters for one backward and not for the next."""
        places, self._unwatched = self._unwatched, []
        for number, place in places:
            if not place.param.requires_grad:
                self._unwatched.append((number, place))
                continue
            if hasattr(place.param, "ds_id"):
                # ZeRO-3: asking for the node of a parameter that is partitioned would make one for its empty shape.
                self._handles.append(place.param.register_hook(_Arrival(self, number, place)))
                continue
            with torch.enable_grad():  # PyTorch 2.4 finds no node without it, and a hook of a backward has it off
                node = torch.autograd.graph.get_gradient_edge(place.param).node
            self._nodes.append(node)  # nothing else may keep it alive, and a new one would not have the hook
            self._handles.append(node.register_prehook(_Arrival(self, number, place)))

    def began(self) -> None:
        """A backward begins: a row for it."""
        if self._unwatched:
            self._watch()
        self.rows.append(self.places.zeros())
        self.targets = self.rows[-1].split([place.count for place in self.places.all])
        self.fired = set()
        self.open = True

    def ended(self) -> None:
        """The backward is over."""
        self.open = False

    def spoil(self, why: str) -> None:
        """This window cannot be judged."""
        self.spoilt = self.spoilt or why
        self.open = False

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
        self.targets = ()
        self._before = None
        self._unwatched = []
        self.fired = set()
        self.places = self._nowhere  # tables, and memory that they know of
        self.spoilt = ""
        self.armed = self.open = False

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

    def compare(
        self, gradients: Iterable[Section], masters: Iterable[Section] = (), copies: Iterable[Section] = ()
    ) -> GradientAudit:
        """COLLECTIVE, one all-reduce of three floats a sample, and one wait for the device.

        Args:
            gradients: what this rank's optimizer is about to consume.
            masters: the flat fp32 partitions of this rank; none where there are none to look at.
            copies: the same elements of the weights that the forward uses.
        """
        size = self.places.size
        rows = self.rows or [self.places.zeros()]
        stacked = torch.stack(rows)
        spoilt = torch.full((1,), 1.0 if self.spoilt else 0.0, device=self.device)
        mine = torch.cat([stacked.sum(0), stacked.abs().sum(0), rows[-1], spoilt])
        local = mine.narrow(0, 0, size).clone()
        mean_over(mine, self.groups, self.ranks)
        expected, bound, last = mine[:-1].view(3, size).unbind(0)
        seen = self.places.gather(gradients)
        limit = bound * self.tolerance() + self.floor()
        wrong = ~((seen.values - expected).abs() <= limit) & seen.mask
        high = self.places.gather(masters)
        edited = self._not_the_cast(high, copies)
        overflow = ~torch.isfinite(bound).all()
        if torch.float16 in self.dtypes:
            # Finite gradients may add up to more than float16 holds; the loss scale is there to have that skipped.
            overflow |= ~torch.isfinite(seen.values).all()
        facts = [mine[-1] > 0, overflow, wrong.any(), edited.any()]
        others, overflown, any_wrong, any_edited = torch.stack(facts).tolist()
        if self.spoilt or others:
            return GradientAudit(skipped=self.spoilt or "another rank cannot judge this window")
        if overflown:
            return GradientAudit(skipped="gradients that are not finite were delivered, or are their sum (overflow)")
        self._before = (seen, high)
        vectors = (expected, limit, last, local, seen.values)
        mismatches = self._mismatches(vectors, seen.owned) if any_wrong else ()
        names = self.places.named(self.places.by_parameter(edited.unsqueeze(0))[0]) if any_edited else ()
        return GradientAudit(seen.owned.shape[1], mismatches, "", self.tolerance(), names)

    def _not_the_cast(self, high: Sampled, copies: Iterable[Section]) -> torch.Tensor:
        """Where a low-precision weight is not its master weight, rounded."""
        low = self.places.gather(copies)
        kinds = {place.param.dtype for place in self.places.all}
        if len(kinds) == 1:
            rounded = high.values.to(kinds.pop()).float()
        else:
            parts = zip(high.values.split([p.count for p in self.places.all]), self.places.all, strict=True)
            rounded = torch.cat([values.to(place.param.dtype).float() for values, place in parts])
        both_nan = torch.isnan(rounded) & torch.isnan(low.values)
        return (rounded != low.values) & ~both_nan & high.mask & low.mask

    def _mismatches(self, vectors: tuple[torch.Tensor, ...], owned: torch.Tensor) -> tuple[Mismatch, ...]:
        there = [vector.cpu() for vector in vectors]
        out = []
        for number, first, count in owned.T.tolist():
            place = self.places.all[number]
            seen = Seen(*(vector.narrow(0, place.start + first, count).double() for vector in there))
            if not seen.right:
                backwards, ranks, floor = len(self.rows), self.ranks, self.floor()
                out.append(classify(place.name, seen, backwards=backwards, ranks=ranks, floor=floor))
        return tuple(out)

    # -- after the step ------------------------------------------------------------------------------------------------

    def moved(
        self,
        masters: Iterable[Section],
        copies: Iterable[Section],
        rates: dict[int, float],
        factor: torch.Tensor | float,
    ) -> Callable[[], UpdateAudit]:
        """After the step, LOCAL. Starts the comparison; what it returns gives the result, once the device is so far.

        ``unmoved`` are parameters whose sampled master weights did not change in a single bit although a nonzero
        gradient and a learning rate should have moved them by more than rounding: by rate * gradient (SGD) or by rate
        (Adam), whichever is less.

        Args:
            masters, copies: as for :meth:`compare`.
            rates: learning rates by id of the parameter.
            factor: what the gradients were multiplied by on their way into the step (clipping, loss scale).
        """
        if self._before is None:
            return UpdateAudit
        seen, before = self._before
        after = self.places.gather(masters)
        rate = self.places.spread([rates.get(id(place.param), 0.0) for place in self.places.all])
        gradient = (seen.values.abs() * factor).clamp(max=1.0)
        felt = (rate * gradient > before.values.abs() * 2.0**-18) & before.mask
        changed = (after.values != before.values) & before.mask
        differs = self._not_the_cast(after, copies)
        can, did, off = self.places.by_parameter(torch.stack([felt, changed, differs]))
        still = (can > 0) & (did == 0)
        found = (still | (off > 0)).any().to("cpu", non_blocking=True)
        places = self.places

        def result() -> UpdateAudit:
            if not found:
                return UpdateAudit()
            return UpdateAudit(places.named(still), places.named(off))

        return result
