"""The two arguments that are easily forgotten: `group`, and `out`.

A group is tried with all ranks busy: ranks 0, 2 and 4 are one group, 1, 3 and 5 the other. Code
that forgets the group meets ranks of the other one, and the marks in the result tell it. Neither
group holds all of the ranks 0, 1 and 2: a root or peer that is taken for a global rank fails.
"""

import torch
import torch.distributed as dist

from ranklab.checks.collectives.cases import Case, observe, values
from ranklab.checks.collectives.judging import no_backend, times_in
from ranklab.checks.exercise import Mistake

GROUP = ("Hand `group` on wherever you look or talk: get_rank(group), get_world_size(group), "
         "sendrecv(..., group), dist.send(..., group=group, group_dst=...).")
ROOT = "And `src` or `server` counts inside the group: that is what group_dst and group_src do."
IN_PLACE = ("Let what arrives land in the chunks of `out`, and add your share there, in place: "
            "arriving.add_(mine[i]). `a = a + b` makes a new tensor elsewhere.")


def stays_in_group(fn, call, wanted, has_out=True):
    """`fn` gives on a group of three what it gives on three ranks alone, also in an `out`.

    `wanted(xs)` makes of the three inputs the three results.
    """
    hint = f"{GROUP} {ROOT}" if call is call_root_in_group else GROUP
    cases, trial = [Case(4, "marks")], "This trial has two groups: ranks 0, 2, 4 and ranks 1, 3, 5."
    if has_out:
        cases.append(Case(4, "marks", into=True))
        trial += " The group comes alone first, then together with `out`."
    for case, seen in zip(cases, observe(fn, call, cases, 6, f"{trial} {hint}", per_node=2)):
        for rank, one in enumerate(seen):
            group = range(rank % 2, 6, 2)
            right = wanted([values(case, r) for r in group])[rank // 2]
            if not isinstance(one.value, torch.Tensor) or not torch.equal(one.value, right):
                with_out = ", together with `out`" * case.into
                raise Mistake(f"in the group of ranks {', '.join(map(str, group))}{with_out}, rank "
                              f"{rank} ends with {_whose(one.value)}, not with {_whose(right)}",
                              hint)
        no_backend(seen)


def _whose(value):
    if not isinstance(value, torch.Tensor) or not value.numel():
        return "nothing"
    found = {r for v in value.flatten().tolist() for r, n in enumerate(times_in(v, 6)) if n}
    return f"{value.numel()} numbers from ranks {sorted(found)}"


def call_root_in_group(fn, x, case, inside, across):
    return fn(x, 1, group=across)


def call_plain(fn, x, case, inside=None, across=None):
    return fill(fn, x, x.shape, case, across)


def call_scatter(fn, x, case, inside=None, across=None):
    got = fill(fn, x, x.shape, case, across)
    return own_chunk(got, across) if case.into else got


def call_gather_in_group(fn, x, case, inside, across):
    return fill(fn, x, (dist.get_world_size(across) * x.numel(),), case, across)


def fill(fn, x, shape, case, group=None):
    """What is looked at: what `fn` returned, or the `out` that it was given."""
    keywords = {"group": group} if group else {}
    if case.into or case.returned:
        keywords["out"] = torch.full(shape, 99, dtype=x.dtype, device=x.device)
    got = fn(x, **keywords)
    return keywords["out"] if case.into else got


def own_chunk(x, group=None):
    """The chunk of x that belongs to this rank: a view where x is contiguous."""
    return x.flatten().tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def explain_into(wrong, hint=IN_PLACE):
    """For a case with `into`: the result must lie in `out` itself."""
    if not wrong.case.into:
        return
    if wrong.ranks == 1:
        hint = ("On one rank nothing arrives: copy x there. (In ring_all_reduce: hand `out` to "
                "both.)")
    got, right = wrong.got.flatten(), wrong.right.flatten()
    at = int((got != right).nonzero()[0])
    there = ("nothing was written there" if bool((got == 99).all()) else
             f"it has {got[at]:g} at element {at} where {right[at]:g} is right")
    raise Mistake(f"`out` is given, and the result is not in it on {wrong.where}: {there}", hint)
