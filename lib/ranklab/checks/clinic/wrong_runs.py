"""How a clinic's program is run in several situations, and compared with one process."""

import torch
import torch.distributed as dist

from ranklab.checks.clinic.wrong_oracles import one_thread
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import GROUPS, on_ranks

FOUR = ((0, 1, 2, 3),)
NEAR = 1e-3  # of the largest number: these are float32 trainings, and the slips are far larger
POOLED = 1e-2  # the larger of two numbers that are equal but for rounding: 0.1% after 20 steps
AS_FOUND = "That is the program as it was found: nothing that counts has changed."
ELSEWHERE = ("The four ranks of the lab were right. Here the ranks are others, and so are the "
             "settings: what holds for four alone, or for these settings, or without `group`?")


def runs(program, *settings):
    """(where, R, settings, what each rank returns): on four ranks as the lab does it, then with
    each of the other `settings` in a group of one and one of three. Of each rank, where a tuple.
    """
    cases = [(members, given) for number, given in enumerate(({}, *settings))
             for members in (GROUPS if number else FOUR)]
    seen = on_ranks(_on_rank, program, cases, ranks=4)
    for number, (members, given) in enumerate(cases):
        where = f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        yield (f"{where}{told and ' with ' + told}", len(members), given,
               [seen[rank][number] for rank in members])


def _on_rank(program, cases):
    """What the program returns here, in each of the cases; None where this rank has no part."""
    rank, made = dist.get_rank(), {members: dist.new_group(members) for members in GROUPS}
    found = []
    for members, given in cases:
        mine = {name: value[rank] if isinstance(value, tuple) else value
                for name, value in given.items()}
        group = {"group": made[members]} if members in made else {}
        found.append(program(**mine, **group) if rank in members else None)
    return found


def equal(where, found, right, slips, hint, tolerance=NEAR):
    """All ranks have found what right() is; else a Mistake names the number and, where one slip
    gives all numbers that are found, the slip.

    slips  {hint: what right(**these) gives instead}
    """
    with one_thread():
        rights = right()
        for rank, mine in enumerate(found):
            name = _differs(mine, rights, tolerance)
            if not name:
                continue
            made = {advice: right(**settings) for advice, settings in slips.items()}
            known = [advice for advice, values in made.items()
                     if not _differs(mine, values, tolerance)
                     and _differs(rights, values, tolerance)]
            number = f", on number {rank} of them" if rank else ""
            raise Mistake(f"{where}: {name} {_told(mine[name], rights[name])}{number}",
                          known[0] if known else hint if len(found) == 4 else ELSEWHERE)


def _differs(found, right, tolerance):
    """The first name under which another value is found; None where there is none."""
    return next((name for name in right if not near(found[name], right[name], tolerance)), None)


def near(got, right, tolerance=NEAR):
    got, right = (torch.as_tensor(each).double() for each in (got, right))
    if got.shape != right.shape:
        return False
    return bool((got - right).abs().max() <= tolerance * right.abs().max())


def _told(got, right):
    got, right = (torch.as_tensor(each).double().flatten() for each in (got, right))
    if got.shape != right.shape:
        return f"are {len(got)} numbers, and in one process {len(right)}"
    at = int((got - right).abs().nan_to_num(torch.inf).argmax())
    number = f" [{at}]" if len(right) > 1 else ""
    return f"{number} is {got[at]:.4g}, and in one process {right[at]:.4g}".strip()
