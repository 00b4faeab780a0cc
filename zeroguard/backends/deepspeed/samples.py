"""A few elements of every parameter, the same ones on every rank, read out of whatever memory holds them.

All arithmetic on places is done for all parameters at once: an audited step of a model with thousands of parameters
must not be thousands of Python statements while the accelerator waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zeroguard.backends.deepspeed.sections import Members, Section

__all__ = ["Place", "Places", "Sampled"]


@dataclass(slots=True)
class Place:
    """A parameter's samples: ``count`` elements from ``start`` in every row, at ``offset + i * stride`` of the
    parameter."""

    name: str
    param: Any
    start: int
    count: int
    stride: int = 1
    offset: int = 0


class Sampled(NamedTuple):
    """A row of values at the sampled places; where there were any; and a column for each piece of a parameter that had
    some: the parameter's number, the first of its samples that lies in the piece, and how many do."""

    values: torch.Tensor
    mask: torch.Tensor
    owned: torch.Tensor


class Places:
    """Where the samples of one audited step lie. LOCAL.

    Args:
        params: (parameter, name), in the same order on every rank.
        elements: how many of each parameter; 0 for all of them.
        seed: the same on every rank; other places for another one.
        device: where rows live.

    Attributes:
        size: elements of a row.
    """

    def __init__(self, params: Sequence[tuple[Any, str]], elements: int, seed: int, device: torch.device) -> None:
        self.device = device
        sized = [(name, p, int(getattr(p, "ds_numel", 0) or p.numel())) for p, name in params]
        sized = [item for item in sized if item[2]]
        size = torch.tensor([numel for _, _, numel in sized], dtype=torch.int64)
        number = torch.arange(len(sized))
        count = size.clamp(max=elements) if elements else size
        stride = size // count
        # Not the widest stride: that would meet the same column of a matrix again and again.
        narrower = (seed * 7 + number) % (stride // 2).clamp(min=1)
        stride = torch.where(stride > 2, stride - narrower, stride)
        offset = (seed * 2654435761 + number * 40503) % (size - (count - 1) * stride)
        ends = count.cumsum(0)
        self.size = int(ends[-1]) if sized else 0
        #: a column a parameter: its first sample in a row, how many, their stride and offset in the parameter
        self._tables = torch.stack([ends - count, count, stride, offset])
        self.all = [Place(n, p, *row) for (n, p, _), row in zip(sized, self._tables.T.tolist(), strict=True)]
        self._number = {id(place.param): index for index, place in enumerate(self.all)}
        #: members of a section -> their samples: what is read before and after a step has the same places
        self._known: dict[int, tuple[Members, torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def zeros(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An empty row."""
        return torch.zeros(self.size, dtype=dtype, device=self.device)

    def by_parameter(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over each parameter's samples; rows in, a column a parameter out."""
        count = self._tables[1].to(self.device, non_blocking=True)
        number = torch.arange(len(self.all), device=self.device)
        index = number.repeat_interleave(count, output_size=self.size)
        sums = torch.zeros(values.shape[0], len(self.all), device=self.device)
        return sums.index_add_(1, index, values.float())

    def named(self, flags: torch.Tensor) -> tuple[str, ...]:
        """Names of the parameters whose flag, of one a parameter, is not zero."""
        return tuple(place.name for place, flag in zip(self.all, flags.tolist(), strict=True) if flag)

    def spread(self, values: Sequence[float]) -> torch.Tensor:
        """A row with each parameter's value at all of its samples."""
        if len(set(values)) == 1:
            return self.zeros() + values[0]
        count = self._tables[1].to(self.device, non_blocking=True)
        given = torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)
        return given.repeat_interleave(count, output_size=self.size)

    def gather(self, sections: Iterable[Section]) -> Sampled:
        """The values at the sampled places. One gather for each flat tensor that holds several parameters; those that
        hold one have a view each, and one call for all copies."""
        values, mask = self.zeros(), self.zeros(torch.bool)
        owned = [torch.empty(3, 0, dtype=torch.int64)]
        singles: list[Section] = []
        for flat, members in sections:
            if len(members) == 1:
                singles.append((flat, members))
                continue
            spans, source, target = self._indices(flat.device, members)
            owned.append(spans)
            # The gather where the values are: nothing but samples crosses to the device. No call here makes the host
            # wait for the device, as ``mask[target] = True`` would.
            values.index_copy_(0, target, flat.index_select(0, source).to(self.device, torch.float32))
            mask.index_fill_(0, target, True)
        if singles:
            owned.append(self._singles(singles, values, mask))
        return Sampled(values, mask, torch.cat(owned, dim=1))

    def _singles(self, singles: Sequence[Section], values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        flats = [flat for flat, _ in singles]
        every = Members([])
        every.keys = array("q", [members.keys[0] for _, members in singles])
        every.table = torch.cat([members.table for _, members in singles], dim=1)
        index, spans = self._spans(every)
        sources, targets, counts = [], [], []
        for which, (number, first, count, begin, stride) in zip(index.tolist(), spans.T.tolist(), strict=True):
            flat = flats[which]
            sources.append(flat.as_strided((count,), (stride,), flat.storage_offset() + begin))
            targets.append(self.all[number].start + first)
            counts.append(count)
        rows = [values.narrow(0, start, count) for start, count in zip(targets, counts, strict=True)]
        if sources and all(source.device == self.device for source in sources):
            torch._foreach_copy_(rows, sources)
        elif sources:  # in host memory: one transfer, not one a parameter
            host = torch.cat([source.float() for source in sources]).to(self.device)
            torch._foreach_copy_(rows, list(host.split(counts)))
        for start, count in zip(targets, counts, strict=True):
            mask.narrow(0, start, count).fill_(True)
        return spans[:3]

    def _spans(self, members: Members) -> tuple[torch.Tensor, torch.Tensor]:
        """Which samples lie in pieces: the pieces that have any, and a column for each of these, with the parameter's
        number, the first of its samples, how many, where the first one lies, and the stride."""
        if not self.all:
            return torch.empty(0, dtype=torch.int64), torch.empty(5, 0, dtype=torch.int64)
        number = torch.tensor([self._number.get(key, -1) for key in members.keys], dtype=torch.int64)
        begin, size, base = members.table
        _, count, stride, offset = self._tables[:, number]
        first = ((begin - offset + stride - 1) // stride).clamp(min=0)
        last = torch.minimum(count - 1, (begin + size - 1 - offset) // stride)
        spans = torch.stack([number, first, last - first + 1, base + offset + first * stride - begin, stride])
        index = ((number >= 0) & (size > 0) & (last >= first)).nonzero().flatten()
        return index, spans[:, index]

    def _indices(self, device: torch.device, members: Members) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The spans of samples in a flat tensor, and of each sample its place there and its place in a row."""
        known = self._known.get(id(members))
        if known is None:
            _, spans = self._spans(members)
            number, first, count, begin, stride = spans
            ends = count.cumsum(0)
            size = int(ends[-1]) if len(ends) else 0
            each = torch.stack([begin, stride, self._tables[0, number] + first, ends - count, count])
            each = each.to(device, non_blocking=True)
            begin, stride, target, before = each[:4].repeat_interleave(each[4], dim=1, output_size=size)
            within = torch.arange(size, device=device) - before
            known = (members, spans[:3], begin + stride * within, (target + within).to(self.device))
            self._known[id(members)] = known
        return known[1:]
