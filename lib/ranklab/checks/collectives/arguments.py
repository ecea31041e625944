"""The two arguments that are easily forgotten: `group`, and `out`.

A group is tried with all ranks busy: ranks 0 and 2 are one group, 1 and 3 the other. Who forgets
the group then meets ranks of the other one, and the marks in the result tell it.
"""

import torch
import torch.distributed as dist

from ranklab.checks.collectives.trials import Case, no_backend, observe, times_in, values
from ranklab.course.exercise import Mistake

GROUP = ("Hand `group` on wherever you look or talk: get_rank(group), get_world_size(group), "
         "exchange(..., group), dist.send(..., group=group, group_dst=...).")
ROOT = "And `src` or `server` counts inside the group: that is what group_dst and group_src do."


def call_in_group(fn, x, case, inside, across):
    return fn(x, group=across)


def call_root_in_group(fn, x, case, inside, across):
    return fn(x, 1, group=across)


def stays_in_group(fn, call, wanted):
    """`fn` gives on a group of two what it gives on two ranks alone.

    `wanted(xs)` makes of the two inputs the two results.
    """
    hint = f"{GROUP} {ROOT}" if call is call_root_in_group else GROUP
    case, trial = Case(4, "marks"), "This trial has two groups: ranks 0 and 2, ranks 1 and 3."
    seen, = observe(fn, call, [case], 4, hint=f"{trial} {hint}", per_node=2)
    for rank, one in enumerate(seen):
        members = (rank % 2, rank % 2 + 2)
        right = wanted([values(case, r) for r in members])[rank // 2]
        if isinstance(one.value, torch.Tensor) and torch.equal(one.value, right):
            continue
        where = f"in the group of ranks {members[0]} and {members[1]}, rank {rank}"
        raise Mistake(f"{where} ends with {_who(one.value)}, not with {_who(right)}", hint)
    no_backend(seen)


def _who(value):
    if not isinstance(value, torch.Tensor) or not value.numel():
        return "nothing"
    found = {r for v in value.flatten().tolist() for r, n in enumerate(times_in(v, 4)) if n}
    return f"{value.numel()} numbers from ranks {sorted(found)}"


def call_plain(fn, x, case):
    return fill(fn, x, x.shape, case)[0] if case.into or case.returned else fn(x)


def call_scatter(fn, x, case):
    if not (case.into or case.returned):
        return fn(x)
    got, out = fill(fn, x, x.shape, case)
    return got if case.returned else (
        out.view(-1).tensor_split(dist.get_world_size())[dist.get_rank()])


def fill(fn, x, shape, case):
    """(what is looked at, `out`) after `fn(x, out=out)`: what it returned, or `out` itself."""
    out = torch.full(shape, 99, dtype=x.dtype, device=x.device)
    got = fn(x, out=out)
    return out if case.into else got, out


def explain_gathered(rank, ranks, got, right):
    """As explain_into, for an all-gather, which adds nothing up."""
    if not torch.equal(got, right):
        raise Mistake(f"`out` is given, and the result is not in it on rank {rank} of {ranks}",
                      "Copy your shard into its place in `out`, and let the others arrive in "
                      "theirs. torch.cat and empty_like make a new tensor elsewhere.")


def explain_into(rank, ranks, got, right):
    """A `compare`'s `explain` for a case with `into`: the result must lie in `out` itself."""
    if torch.equal(got, right) or not got.numel():
        return
    what = ("nothing was written there" if bool((got == 99).all()) else
            f"it has {got.flatten()[0]:g} there where {right.flatten()[0]:g} is right")
    raise Mistake(f"`out` is given, and the result is not in it on rank {rank} of {ranks}: {what}",
                  "Let what arrives land in the chunks of `out`, and add your share there, in "
                  "place: arriving.add_(mine[i]). `a = a + b` makes a new tensor elsewhere.")
