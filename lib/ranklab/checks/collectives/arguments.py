"""The two arguments that are easily forgotten: `group`, and `out`.

A group is tried with all ranks busy: ranks 0, 2 and 4 are one group, 1, 3 and 5 the other. Code
that forgets the group meets ranks of the other one, and the marks in the result tell it.
"""

import torch
import torch.distributed as dist

from ranklab.checks.collectives.trials import Case, no_backend, observe, times_in, values
from ranklab.checks.exercise import Mistake

GROUP = ("Hand `group` on wherever you look or talk: get_rank(group), get_world_size(group), "
         "sendrecv(..., group), dist.send(..., group=group, group_dst=...).")
ROOT = "And `src` or `server` counts inside the group: that is what group_dst and group_src do."


def call_no_out_in_group(fn, x, case, inside, across):
    return fn(x, group=across)


def call_root_in_group(fn, x, case, inside, across):
    return fn(x, 1, group=across)


def stays_in_group(fn, call, wanted):
    """`fn` gives on a group of three what it gives on three ranks alone, also in an `out`.

    `wanted(xs)` makes of the three inputs the three results.
    """
    hint = f"{GROUP} {ROOT}" if call is call_root_in_group else GROUP
    cases, trial = [Case(4, "marks")], "This trial has two groups: ranks 0, 2, 4 and ranks 1, 3, 5."
    if call not in (call_root_in_group, call_no_out_in_group):
        cases.append(Case(4, "marks", into=True))
        trial += " The group comes alone first, then together with `out`."
    for case, seen in zip(cases, observe(fn, call, cases, 6, f"{trial} {hint}", per_node=2)):
        for rank, one in enumerate(seen):
            right = wanted([values(case, r) for r in range(rank % 2, 6, 2)])[rank // 2]
            if isinstance(one.value, torch.Tensor) and torch.equal(one.value, right):
                continue
            where = f"in the group of ranks {', '.join(map(str, range(rank % 2, 6, 2)))}"
            where += ", together with `out`" * case.into
            raise Mistake(f"{where}, rank {rank} ends with {_who(one.value)}, not with "
                          f"{_who(right)}", hint)
        no_backend(seen)


def _who(value):
    if not isinstance(value, torch.Tensor) or not value.numel():
        return "nothing"
    found = {r for v in value.flatten().tolist() for r, n in enumerate(times_in(v, 6)) if n}
    return f"{value.numel()} numbers from ranks {sorted(found)}"


def call_plain(fn, x, case, inside=None, across=None):
    group = {"group": across} if across else {}
    return fill(fn, x, x.shape, case, **group)[0] if case.into or case.returned else fn(x, **group)


def call_scatter(fn, x, case, inside=None, across=None):
    group = {"group": across} if across else {}
    if not (case.into or case.returned):
        return fn(x, **group)
    got, out = fill(fn, x, x.shape, case, **group)
    return got if case.returned else own_chunk(out, across)


def call_gather_in_group(fn, x, case, inside, across):
    whole = (dist.get_world_size(across) * x.numel(),)
    return fill(fn, x, whole, case, group=across)[0] if case.into else fn(x, group=across)


def fill(fn, x, shape, case, **group):
    """(what is looked at, `out`) after `fn(x, out=out)`: what it returned, or `out` itself."""
    out = torch.full(shape, 99, dtype=x.dtype, device=x.device)
    got = fn(x, out=out, **group)
    return out if case.into else got, out


def own_chunk(x, group=None):
    """The chunk of x that belongs to this rank: a view where x is contiguous."""
    return x.flatten().tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def explain_gathered(rank, ranks, got, right):
    """As explain_into, for an all-gather, which adds nothing up."""
    if not torch.equal(got, right):
        raise Mistake(f"`out` is given, and the result is not in it on rank {rank} of {ranks}",
                      "Copy your shard into its place in `out`, and let the others arrive in "
                      "theirs. torch.cat and empty_like make a new tensor elsewhere.")


def explain_lost(rank, ranks, got, right):
    if not torch.equal(got, right):
        raise Mistake(f"on rank {rank} of {ranks} the shard lies in `out` already, and is lost",
                      "ring_all_reduce calls it so: the shard is the chunk of `out` in its own "
                      "place. Do not clear `out`, nor receive there before you have sent.")


def explain_into(rank, ranks, got, right):
    """A `compare`'s `explain` for a case with `into`: the result must lie in `out` itself."""
    if torch.equal(got, right) or not got.numel():
        return
    if ranks == 1:
        raise Mistake("`out` is given, and the result is not in it on rank 0 of 1", "On one rank "
                      "nothing arrives: copy x there. (In ring_all_reduce: hand `out` to both.)")
    what = ("nothing was written there" if bool((got == 99).all()) else
            f"it has {got.flatten()[0]:g} there where {right.flatten()[0]:g} is right")
    raise Mistake(f"`out` is given, and the result is not in it on rank {rank} of {ranks}: {what}",
                  "Let what arrives land in the chunks of `out`, and add your share there, in "
                  "place: arriving.add_(mine[i]). `a = a + b` makes a new tensor elsewhere.")
