"""The check of expert_gradients: beside gradients that are known."""

import torch
import torch.distributed as dist

from ranklab.checks.beside import beside, on_groups
from ranklab.checks.failures import LEFT, MISMATCH, STUCK
from ranklab.engine import device

OWN = (0,), (1,), (2,), (3,), (0, 2), (1, 3)  # all ranks make all of these groups
SHAPES = {"router": (4, 3), "norm": (3,), "expert.up": (2, 3, 4), "expert.down": (2, 4, 3)}
NONE = {"norm": 1, "expert.down": 2}  # on this member of a group it has no gradient
ZEROS = ("A parameter without a gradient on this rank may have one on others, and they wait: put "
         "zeros there.")
ALL = "Experts are summed over `own`, the rest over `group`; both are divided by all ranks' number."
TYPES = torch.float32, torch.bfloat16  # of all parameters and gradients of a call
# Said where the same calls went well when every parameter had a gradient.
FAILURES = {MISMATCH: ZEROS, LEFT: ZEROS, STUCK: ZEROS, "TypeError: .*NoneType.*": ZEROS,
            "AttributeError: 'NoneType' object has no .*": ZEROS}


def _given(name, rank, turn):
    random = torch.Generator().manual_seed(31 * rank + 7 * turn + sum(map(ord, name)))
    return (12.0 * torch.randint(-99, 100, SHAPES[name], generator=random)).to(TYPES[turn])


def _trial(expert_gradients, ranks, all_have):
    groups = {members: dist.new_group(members) for members in OWN}
    members, R = ranks.members, ranks.size
    own = {4: ((0, 2), (1, 3)), 3: ((1,), (2,), (3,)), 2: (members,), 1: (members,)}[R]
    mine = next(each for each in own if dist.get_rank() in each)

    def has(name, rank):
        return all_have or members.index(rank) != NONE.get(name) or R == 1

    def call(turn):
        parameters = {name: torch.nn.Parameter(torch.ones(
            shape, dtype=TYPES[turn], device=device()))
                      for name, shape in SHAPES.items()}
        for name, p in parameters.items():
            if has(name, dist.get_rank()):
                p.grad = _given(name, dist.get_rank(), turn).to(device())
        experts = [p for name, p in parameters.items() if "expert" in name]
        shared = [p for name, p in parameters.items() if "expert" not in name]
        expert_gradients(shared, experts, groups[mine], **ranks.keywords)
        return {f"the gradient of `{name}`": p.grad for name, p in parameters.items()} | {
            f"`{name}`": p for name, p in parameters.items()}

    def total(name, turn, among):
        return sum(_given(name, rank, turn).float() * has(name, rank) for rank in among)

    def right(turn):
        found = {f"`{name}`": [torch.ones(shape, dtype=TYPES[turn])] * R
                 for name, shape in SHAPES.items()}
        for name in SHAPES:
            among = [next(each for each in own if rank in each) if "expert" in name else members
                     for rank in members]
            found[f"the gradient of `{name}`"] = [
                (total(name, turn, each) / R).to(TYPES[turn]) for each in among]
        return found

    def slips(label, turn):
        name = label.split("`")[1]
        if "gradient" not in label:
            return {}
        own_sum, whole = total(name, turn, mine), total(name, turn, members)
        named = {"the mean over `own`": (own_sum / len(mine), "All ranks have the same router and "
                                         "norms, so take the mean over all.")}
        if "expert" in name:
            named = {"the mean over the ranks that have this expert": (
                         own_sum / len(mine), f"It has met the tokens of all {R} ranks, not of "
                         f"{len(mine)}: divide by {R}."),
                     "the mean over all ranks": (whole / R, "Other ranks have other experts: add "
                                                 "up over `own`."),
                     "the sum over the ranks that have it": (own_sum, f"Divide by all {R} ranks.")}
        return {what: (wrong.to(TYPES[turn]), hint) for what, (wrong, hint) in named.items()}

    nbytes = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
    yield from beside(str(ranks), ranks, call, right, slips=slips, advice=lambda name: ALL,
                      sends=(len(SHAPES), nbytes))


def check_expert_gradients(expert_gradients):
    on_groups(_trial, expert_gradients, True, group_hint="")
    yield "experts are added up over the ranks that have them, the rest over all; 1 to 4 ranks"
    yield "both are divided by the number of all ranks; one all-reduce for each parameter"
    on_groups(_trial, expert_gradients, False, group_hint="", failures=FAILURES)
    yield "a parameter without a gradient on some rank counts as zeros, of its own type"
