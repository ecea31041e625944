"""Lab 00: right answers that differ from the library's. Each must pass."""

import math
from datetime import timedelta

import torch
import torch.distributed as dist


def _n(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return rank, size, (rank + 1) % size, (rank - 1) % size


def shard_range__list_of_items(n, rank, size):
    ends = [0]
    for r in range(size):
        ends.append(ends[-1] + n // size + (1 if r < n % size else 0))
    return list(range(n))[ends[rank]:ends[rank + 1]]


def shard_range__tensor_split(n, rank, size):
    return torch.arange(n).tensor_split(size)[rank]


def pass_the_token__handles(group=None):
    rank, size, after, before = _n(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    arrives = dist.irecv(token, group=group, group_src=before)
    if rank:
        arrives.wait()
    leaves = dist.isend((token if rank else torch.zeros_like(token)) + 1, group=group,
                        group_dst=after)
    if not rank:
        arrives.wait()
    leaves.wait()
    return int(token)


def pass_the_token__global_ranks(group=None):
    rank, size, after, before = _n(group)
    if size == 1:
        return size
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    token = torch.tensor([0])
    if rank:
        dist.recv(token, ranks[before], group)
    dist.send(token + 1, ranks[after], group)
    if not rank:
        dist.recv(token, ranks[before], group)
    return token[0].item()


def ring_shift__one_begins(x, group=None):
    rank, size, after, before = _n(group)
    got = x.clone()
    if size == 1:
        return got
    if rank == 0:
        dist.send(x, group=group, group_dst=after)
        dist.recv(got, group=group, group_src=before)
    else:
        dist.recv(got, group=group, group_src=before)
        dist.send(x, group=group, group_dst=after)
    return got


def ring_shift__receive_posted_first(x, group=None):
    rank, size, after, before = _n(group)
    got = torch.empty_like(x)
    if size == 1:
        return got.copy_(x)
    work = dist.irecv(got, group=group, group_src=before)
    dist.send(x, group=group, group_dst=after)
    work.wait()
    return got


def all_ranks_finite__counts_the_bad(loss, group=None):
    bad = (~torch.isfinite(loss)).to(torch.int64).reshape(1)
    dist.all_reduce(bad, group=group)
    return bad.item() == 0


def all_ranks_finite__awaits_a_handle(loss, group=None):
    flag = torch.tensor(1.0 if math.isfinite(loss.item()) else 0.0)
    dist.all_reduce(flag, dist.ReduceOp.PRODUCT, group=group, async_op=True).wait()
    return bool(flag)


def all_ranks_finite__gathers(loss, group=None):
    flags = torch.zeros(dist.get_world_size(group))
    dist.all_gather_into_tensor(flags, loss.detach().isfinite().float().view(1), group=group)
    return bool(flags.all())


def roll_call__one_rank_is_elected(store, rank, ranks, seconds):
    """The first rank that takes a number writes the list; all others wait for it."""
    limit = timedelta(seconds=seconds)
    store.set(f"rank {rank}", "here")
    if store.add("how many", 1) != ranks:
        try:
            store.wait(["the list"], limit)
        except dist.DistError:
            pass
    if store.add("elected", 1) == 1:
        gone = [str(r) for r in range(ranks) if not store.check([f"rank {r}"])]
        store.set("the list", ",".join(gone))
    store.wait(["the list"], 9 * limit)  # the elected one may be slow
    return [int(r) for r in store.get("the list").decode().split(",") if r]


def roll_call__a_text_that_grows(store, rank, ranks, seconds):
    """All ranks append to one text; a get with the store's own limit is the wait."""
    def here():
        return {int(r) for r in store.get("here").split()}

    store.append("here", f"{rank} ")
    if len(here()) < ranks:
        store.set_timeout(timedelta(seconds=seconds))
        try:
            return sorted(eval(store.get("gone")))
        except RuntimeError:
            pass
    return eval(store.compare_set("gone", "", str(sorted(set(range(ranks)) - here()))))


def roll_call__keys_of_its_own(store, rank, ranks, seconds):
    """In a PrefixStore, with bytes for keys that hold which ranks are here."""
    mine = dist.PrefixStore("roll", store)
    mine.compare_set(str(rank), "", "1")
    keys = [str(r) for r in range(ranks)]
    if not mine.check(keys):
        try:
            mine.wait(["done"], timedelta(seconds=seconds))
        except Exception:
            pass
    gone = [] if mine.check(keys) else [int(key) for key in keys if not mine.check([key])]
    text = mine.compare_set("done", "", "missing: " + " ".join(map(str, gone)))
    return list(map(int, text.split()[1:]))
