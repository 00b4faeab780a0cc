"""Which pieces of parameters share memory, so that a few elements of many of them are read by one gather."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

import torch

__all__ = ["Members", "Section", "SharedMemory", "flat_storage"]


class Members:
    """The pieces of parameters in one flat tensor.

    Attributes:
        keys: ids of the parameters.
        table: int64, a column a piece: its first element in the flattened parameter, how many elements, and where they
            begin in the flat tensor.
    """

    __slots__ = ("keys", "table")

    def __init__(self, pieces: Sequence[tuple[int, int, int, int]]) -> None:
        self.keys = array("q", [piece[0] for piece in pieces])
        self.table = torch.tensor([piece[1:] for piece in pieces], dtype=torch.int64).reshape(-1, 3).T

    def __len__(self) -> int:
        return len(self.keys)


#: A flat tensor, and what lies in it.
Section = tuple[torch.Tensor, Members]


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that a tensor is a view of, flat, in the tensor's dtype."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


class SharedMemory:
    """Finds the tensors that are views of the same memory, and remembers it for as long as they lie alike: DeepSpeed
    puts a group's gradients into new memory in every step, and in the same order."""

    def __init__(self) -> None:
        self._seen = b""
        self._groups: list[tuple[int, Members]] = []

    def sections(
        self, pieces: Sequence[tuple[int, int, int]], tensors: Sequence[torch.Tensor], *, skip: bool = False
    ) -> list[Section]:
        """A section for each memory; a tensor that has memory of its own is its section's flat tensor itself.

        Args:
            pieces: (id of the parameter, its first element, elements).
            tensors: contiguous; each begins with its piece. Those after the last piece are paddings.
            skip: the piece's first element counts in the tensor, too: the tensor is the whole parameter.
        """
        known: dict[tuple[int, torch.dtype], int] = {}
        tensors = tensors[: len(pieces)]
        memory = [known.setdefault((t.untyped_storage().data_ptr(), t.dtype), len(known)) for t in tensors]
        offsets = [int(t.storage_offset()) for t in tensors]
        lies = blake2b(array("q", chain(memory, offsets, *pieces))).digest()
        if lies != self._seen:
            self._seen = lies
            places: list[list[int]] = [[] for _ in known]
            for index, number in enumerate(memory):
                places[number].append(index)
            self._groups = []
            for indices in places:
                alone = len(indices) == 1
                members = [(*pieces[i], (0 if alone else offsets[i]) + (pieces[i][1] if skip else 0)) for i in indices]
                self._groups.append((indices[0], Members(members)))
        return [
            (flat_storage(tensors[first]) if len(members) > 1 else tensors[first].reshape(-1), members)
            for first, members in self._groups
        ]
