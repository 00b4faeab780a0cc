"""The only file that calls ``torch.distributed``.

Ranks see alone and decide together: what a guard finds on one rank makes all of them stop at the same point of the same
step, so that none is left waiting in a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["JobStore", "Votes", "from_collective", "job_store", "mean_over", "members", "unite", "vote"]


class Votes(NamedTuple):
    """What the ranks said: those with a flag, and the words of the data-parallel ranks, by global rank; none unless
    each of them has one, so that all of them judge alike; whether a guard broke on any of them."""

    flagged: Sequence[int]
    words: Mapping[int, int]
    broken: bool = False


def vote(flag: bool, word: int = 0, *, groups: Sequence[Any] = (), device: str = "cpu", broken: bool = False) -> Votes:
    """COLLECTIVE over ``groups``, one after the other: the global ranks on which ``flag`` is true, and each
    data-parallel rank's ``word``.

    One all-reduce a group, of eight bytes a rank of the whole job and eight more. Without groups, with one rank or
    without a process group there is no communication.

    Args:
        flag: whether this rank wants to stop.
        word: at most 62 bits, to be compared; 0 for none. Not compared with model parallelism, whose other ranks are
            further data-parallel groups that would not learn of a difference.
        groups: the process groups whose ranks train together: the engine's data-parallel group, then its
            model-parallel group. Ranks of other engines are not in them and are not waited for.
        device: where the backend's tensors live, such as ``cuda``.
        broken: whether a guard broke on this rank; if one did on any, :func:`unite` tells which.
    """
    # Here, so that "zeroguard run" leaves it to the script when torch is imported, and with which environment.
    import torch
    import torch.distributed as dist

    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if alone or not groups:
        rank = 0 if alone else dist.get_rank()
        return Votes([rank] if flag else [], {}, broken)
    # Each rank writes at its own place, so the maximum is what was written there.
    votes = torch.zeros(dist.get_world_size() + 1, dtype=torch.int64, device=device)
    if flag or word:
        votes[dist.get_rank()] = word << 1 | flag
    if broken:
        votes[-1] = 1
    for group in groups:
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    *said, breaks = votes.tolist()
    words = {rank: said[rank] >> 1 for rank in dist.get_process_group_ranks(groups[0])} if len(groups) == 1 else {}
    flagged = [rank for rank, one in enumerate(said) if one & 1]
    return Votes(flagged, words if all(words.values()) else {}, bool(breaks))


def unite(mine: Mapping[str, str], *, groups: Sequence[Any] = ()) -> dict[int, Mapping[str, str]]:
    """COLLECTIVE over ``groups``, one after the other: what each rank gave, by global rank. Slow: for what is rare.

    Without groups or a process group there is no communication.
    """
    import torch.distributed as dist

    started = dist.is_available() and dist.is_initialized()
    said: dict[int, Mapping[str, str]] = {dist.get_rank() if started else 0: dict(mine)}
    for group in groups if started and dist.get_world_size() > 1 else ():
        parts: list[Any] = [None] * dist.get_world_size(group=group)
        dist.all_gather_object(parts, said, group=group)
        said = {rank: what for part in parts for rank, what in part.items()}
    return said


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


# -- LOCAL: the job's store, and what comes out of a collective ------------------------------------------------------


class JobStore(NamedTuple):
    """The server over which the process group was set up. ``connect`` gives a connection of one's own; ``host`` says
    which process is the server, ``here`` whether it is this one."""

    connect: Callable[[], Any]
    host: str
    here: bool


def job_store() -> JobStore | None:
    """LOCAL. The job's store, if it is a server (not a file, which would grow) and this PyTorch can connect to it once
    more."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    store: Any = None if find is None else find()
    under = store
    while isinstance(under, dist.PrefixStore):
        under = under.underlying_store
    if not isinstance(under, dist.TCPStore) or not hasattr(store, "clone"):
        return None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = f"{'torchrun' if agent else 'rank 0'} at {under.host}:{under.port}"
    return JobStore(store.clone, host, not agent and dist.get_rank() == 0)


def members(group: Any) -> list[int]:
    """LOCAL. The global ranks of a process group."""
    import torch.distributed as dist

    return dist.get_process_group_ranks(group) if dist.is_available() and dist.is_initialized() else []


def from_collective(error: BaseException) -> bool:
    """LOCAL. Whether an exception, or one that it came from, was raised by a collective in which another rank was
    missing, or by the store."""
    import torch.distributed as dist

    kinds = tuple(kind for name in ("DistError", "DistBackendError") if (kind := getattr(dist, name, None)))
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        # Gloo's are plain RuntimeErrors, whose text begins with the place in its own sources.
        if isinstance(one, kinds) or (isinstance(one, RuntimeError) and "gloo/" in str(one)):
            return True
        one = one.__cause__ or one.__context__
    return False
