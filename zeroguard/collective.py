"""The only file that calls ``torch.distributed``.

Ranks see alone and decide together: what a guard finds on one rank makes all of them stop at the same point of the same
step, so that none is left waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["ranks_with"]


def ranks_with(flag: bool, *, world_size: int, device: str = "cpu") -> Sequence[int]:
    """COLLECTIVE over the default group: the ranks on which ``flag`` is true.

    One all-reduce of ``world_size`` bytes. With one rank, or without a process group, no communication.

    Args:
        flag: this rank's word.
        world_size: ranks of the default group.
        device: where the backend's tensors live, such as ``cuda``.
    """
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return [0] if flag else []
    votes = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device=device)
    if flag:
        votes[dist.get_rank()] = 1
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [rank for rank, vote in enumerate(votes.tolist()) if vote]
