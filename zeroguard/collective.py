"""The only file that calls ``torch.distributed``.

Ranks see alone and decide together: what a guard finds on one rank makes all of them stop at the same point of the same
step, so that none is left waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["ranks_with"]


def ranks_with(flag: bool, *, groups: Sequence[Any] = (), device: str = "cpu") -> Sequence[int]:
    """COLLECTIVE over ``groups``, one after the other: the global ranks on which ``flag`` is true.

    One all-reduce a group, of one byte a rank of the whole job. Without groups, with one rank or without a process
    group there is no communication.

    Args:
        flag: this rank's word.
        groups: the process groups whose ranks train together: the engine's data-parallel group, then its
            model-parallel group. Ranks of other engines are not in them and are not waited for.
        device: where the backend's tensors live, such as ``cuda``.
    """
    # Here, so that "zeroguard run" leaves it to the script when torch is imported, and with which environment.
    import torch
    import torch.distributed as dist

    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if alone or not groups:
        rank = 0 if alone else dist.get_rank()
        return [rank] if flag else []
    votes = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device=device)
    if flag:
        votes[dist.get_rank()] = 1
    for group in groups:
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    return [rank for rank, vote in enumerate(votes.tolist()) if vote]
