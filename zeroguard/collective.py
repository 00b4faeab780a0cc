"""The only file that calls ``torch.distributed``.

Ranks see alone and decide together: what a guard finds on one rank makes all of them stop at the same point of the same
step, so that none is left waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Votes", "mean_over", "vote"]


class Votes(NamedTuple):
    """What the ranks said: those with a flag, and the words of the data-parallel ranks, by global rank; none unless
    each of them has one, so that all of them judge alike."""

    flagged: Sequence[int]
    words: Mapping[int, int]


def vote(flag: bool, word: int = 0, *, groups: Sequence[Any] = (), device: str = "cpu") -> Votes:
    """COLLECTIVE over ``groups``, one after the other: the global ranks on which ``flag`` is true, and each
    data-parallel rank's ``word``.

    One all-reduce a group, of eight bytes a rank of the whole job. Without groups, with one rank or without a process
    group there is no communication.

    Args:
        flag: whether this rank wants to stop.
        word: at most 62 bits, to be compared; 0 for none. Not compared with model parallelism, whose other ranks are
            further data-parallel groups that would not learn of a difference.
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
        return Votes([rank] if flag else [], {})
    # Each rank writes at its own place, so the maximum is what was written there.
    votes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    if flag or word:
        votes[dist.get_rank()] = word << 1 | flag
    for group in groups:
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    said = votes.tolist()
    words = {rank: said[rank] >> 1 for rank in dist.get_process_group_ranks(groups[0])} if len(groups) == 1 else {}
    flagged = [rank for rank, one in enumerate(said) if one & 1]
    return Votes(flagged, words if all(words.values()) else {})


def mean_over(buffer: Any, groups: Sequence[Any], ranks: int) -> None:
    """COLLECTIVE over the first of ``groups``: replace a float tensor by its mean over ``ranks`` ranks. One all-reduce;
    none without a group or on one rank.

    Args:
        buffer: on the backend's device; changed in place.
        groups: the data-parallel group first.
        ranks: what DeepSpeed divides a sum over that group by.
    """
    import torch.distributed as dist

    if not groups or ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=groups[0])
    buffer.div_(ranks)


def add_up(values: Any, *, group: Any = None) -> None:
    """COLLECTIVE over ``group`` (None: all ranks). One all-reduce, in place: the sum over its ranks.

    Without a process group there is no communication; nor is there with one rank. ``values`` is a tensor of the same
    shape and dtype on every rank.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group=group) > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)


def gather_evenly(mine: Any, *, group: Any = None) -> Any:
    """COLLECTIVE over ``group`` (None: all ranks). One all-gather: a row a rank, in the group's order.

    ``mine`` is flat and of the same length and dtype on every rank. With one rank the row is ``mine`` itself.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size(group=group) if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1:
        return mine.view(1, -1)
    rows = mine.new_empty(ranks, mine.numel())
    dist.all_gather_into_tensor(rows.view(-1), mine, group=group)
    return rows
