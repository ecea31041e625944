"""expert_gradients: compared with sums of known gradients."""

import functools
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from ranklab.checks.expert_parallel.inputs import BYTES, CALLS, costs
from ranklab.checks.handles import HeldWork, Waits
from ranklab.checks.prover import ALL, GROUPS, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.expert_parallel import expert_gradients
from ranklab.meter import Traffic

OWN = (0,), (1,), (2,), (3,), (0, 2), (1, 3)  # all ranks make all of these groups
OWNERS = {4: ((0, 2), (1, 3)), 3: ((1,), (2,), (3,))}  # by the size of the group; or all of it
SHAPES = {"router": (4, 3), "norm": (3,), "expert.up": (2, 3, 4), "expert.down": (2, 4, 3),
          "patches": (2, 3, 2, 2)}
FLOAT32 = "router", "expert.up"  # where types are mixed; the others are bfloat16
NONE = {"norm": 1, "expert.down": 2}  # on this member of a group it has no gradient
OF, WITHOUT = "the gradient of `{}`", "the gradient of `{}`, which a rank lacked"


class Backward(NamedTuple):
    """The gradients left by backward, each of its parameter's type."""

    mixed: bool  # types
    all_have: bool

    def __str__(self):
        return (f"float32{' and bfloat16' * self.mixed}, {'not ' * (not self.all_have)}all have a "
                "gradient")

    def dtype(self, name):
        return torch.bfloat16 if self.mixed and name not in FLOAT32 else torch.float32

    def gradient(self, name, ranks):
        if not self.all_have and ranks.size > 1 and ranks.index == NONE.get(name):
            return None
        seed = 31 * dist.get_rank() + sum(map(ord, name))
        random = torch.Generator().manual_seed(seed)
        gradient = 12.0 * torch.randint(-99, 100, SHAPES[name], generator=random)
        gradient = gradient.to(device(), self.dtype(name))  # 12: 4 ranks divide it, too
        is_image = gradient.dim() == 4  # convolutions have such gradients
        return gradient.to(memory_format=torch.channels_last) if is_image else gradient


@contextmanager
def arriving_when_awaited():
    """Delay, inside the block, the results of asynchronous all-reduces: they arrive in wait().

    They never arrive before.
    """
    all_reduce = dist.all_reduce

    def held(tensor, *args, **kwargs):
        if not kwargs.get("async_op", False):
            return all_reduce(tensor, *args, **kwargs)
        result = tensor.detach().clone()
        return HeldWork(all_reduce(result, *args, **kwargs), tensor, result)

    with mock.patch.object(dist, "all_reduce", held):
        yield


@functools.cache
def groups():
    """Make, once on each rank, {members: the group}: a group costs more than a case."""
    return {members: dist.new_group(members) for members in OWN}


def _see(fn, backward, ranks):
    owners = OWNERS.get(ranks.size, (ranks.members,))
    own = groups()[next(members for members in owners if dist.get_rank() in members)]
    parameters = {name: torch.nn.Parameter(torch.ones(
        shape, dtype=backward.dtype(name), device=device()))
        for name, shape in SHAPES.items()}
    for name, p in parameters.items():
        p.grad = backward.gradient(name, ranks)
    experts = [p for name, p in parameters.items() if "expert" in name]
    shared = [p for name, p in parameters.items() if "expert" not in name]
    with Traffic() as traffic, Waits() as waits, arriving_when_awaited():
        fn(shared, experts, own, **ranks.keywords)
    names = {name: (OF if backward.all_have or name not in NONE else WITHOUT).format(name)
             for name in SHAPES}
    yield {**costs(traffic, waits, len(SHAPES), sum(p.nbytes for p in parameters.values())),
           **{f"`{name}`": p for name, p in parameters.items()},
           **{names[name]: p.grad for name, p in parameters.items()}}


def gathered(shared, experts, own, group=None):
    """Add up in one place, in float64."""
    R = dist.get_world_size(group)
    for parameters, members in ((shared, group), (experts, own)):
        for p in parameters:
            share = torch.zeros_like(p.data) if p.grad is None else p.grad
            shares = [share.new_empty(share.shape) for _ in range(dist.get_world_size(members))]
            dist.all_gather(shares, share.contiguous(), group=members)
            p.grad = (torch.stack(shares).double().sum(0) / R).to(p.dtype)


def in_one_tensor(shared, experts, own, group=None):
    for parameters, members in ((shared, group), (experts, own)):
        shares = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = torch.cat([share.flatten() for share in shares]) / dist.get_world_size(group)
        dist.all_reduce(total, group=members)
        for p, share in zip(parameters, total.split([p.numel() for p in parameters])):
            p.grad = share.view_as(p)


ZEROS = "p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
DIVIDE, REDUCE = "p.grad /= ranks", "dist.all_reduce(p.grad, group=members)"
R_OF = "ranks = dist.get_world_size(group)"
FILL = ("A parameter without a gradient on this rank may have one on other ranks. All ranks must "
        "reduce it: use zeros.")
GRADIENTS = Proof(
    expert_gradients,
    Stage({"gradients of experts are summed over the ranks that have them, the rest over all; both "
           "are divided by the number of all ranks; on 1 to 4 ranks": (),
           "at most one all-reduce for each parameter": (CALLS, BYTES),
           "a parameter without a gradient on some rank counts as zeros, of its own type":
           tuple(WITHOUT.format(name) for name in NONE)},
          _see, tuple(Backward(mixed, all_have) for all_have in (True, False)
                      for mixed in (False, True)), (4,), (ALL, *GROUPS),
          oracle=gathered),
    mistakes=(
        Slip("An expert processes tokens from all ranks, not only those in `own`: divide its "
             "gradients by the number of all ranks.",
             (DIVIDE, "p.grad /= dist.get_world_size(members)")),
        Slip("Everything is divided by the number of ranks in `own`. The loss is a mean over all "
             "ranks' tokens: divide by dist.get_world_size(group).",
             (R_OF, R_OF.replace("group", "own"))),
        Slip("Other ranks have other experts: sum an expert's gradients over `own`.",
             ("(experts, own)", "(experts, group)")),
        Slip("All ranks have the same router and norms: sum their gradients over `group`.",
             ("(shared, group)", "(shared, own)")),
        Slip("The groups are swapped: sum the experts' gradients over `own`, and the rest over "
             "`group`.",
             ("(shared, group)", "(shared, own)", "(experts, own)", "(experts, group)")),
        Slip("Divide by the number of all ranks: the loss is a mean over their tokens.",
             (DIVIDE, "pass")),
        Slip("Divide the experts' gradients by the number of all ranks as well.",
             (DIVIDE, "p.grad /= ranks if parameters is shared else 1")),
        Slip("Divide the gradients of the router and norms by the number of all ranks as well.",
             (DIVIDE, "p.grad /= ranks if parameters is experts else 1")),
        Slip("The gradient is divided twice.",
             (DIVIDE, "p.grad /= ranks * dist.get_world_size(members)"),
             (DIVIDE, "p.grad /= ranks * ranks")),
        Slip("The experts' gradients are not summed: the other ranks of `own` have processed other "
             "tokens.",
             (REDUCE, f"if parameters is shared:\n                {REDUCE}")),
        Slip("Divide by the size of `group`: get_world_size() counts every rank in the job.",
             (R_OF, R_OF.replace("group", ""))),
        Slip("Pass `group` on: all_reduce(p.grad) sums over every rank in the job.",
             ("(shared, group)", "(shared, None)")),
        Slip("p.grad is divided, but not summed. all_reduce works in place: give it p.grad "
             "itself.",
             (REDUCE, REDUCE.replace("p.grad", "p.grad / 1")),
             (REDUCE, REDUCE.replace("p.grad", "p.grad.clone()"))),
        Slip("This gradient is channels-last: contiguous(), reshape() and flatten() copy it. The "
             "sum must end up in p.grad itself.",
             (REDUCE, REDUCE.replace("p.grad", "p.grad.contiguous()"))),
        Slip("Send gradients in their own dtype: float32 has twice the bytes of bfloat16.",
             (REDUCE, f"total = p.grad.float()\n            {REDUCE.replace('p.grad', 'total')}\n"
              "            p.grad.copy_(total)")),
        Slip("A gradient must have its parameter's dtype. A float32 sum, or a cat of several "
             "dtypes, cannot be a bfloat16 parameter's gradient.", in_one_tensor),
        Slip("async_op=True returns a handle. Keep every handle, and wait for all of them.",
             (REDUCE, REDUCE.replace(")", ", async_op=True)"))),
        Slip("Sum the gradients, not the parameters: p.grad, not p.",
             (REDUCE, REDUCE.replace("p.grad", "p.data"))),
        Slip("One all-reduce per gradient is enough.", (REDUCE, f"{REDUCE}\n            "
             f"p.grad /= dist.get_world_size(members)\n            {REDUCE}"),
             (REDUCE, "parts = [p.grad / 2, p.grad / 2] if parameters is shared else [p.grad]\n"
              "            for part in parts:\n"
              "                dist.all_reduce(part, group=members)\n"
              "            p.grad = sum(parts[1:], parts[0])")),
        Slip(FILL, (f"            {ZEROS}", ""),
             (ZEROS, "if p.grad is None:\n                continue\n"),
             (ZEROS, "if p.grad is None:\n                break\n")),
        Slip("The zeros must have the parameter's own dtype: zeros_like(p).",
             (ZEROS, ZEROS.replace("zeros_like(p)", "zeros(p.shape, device=p.device)"))),
        Slip("Use zeros, not ones: this rank adds nothing.",
             (ZEROS, ZEROS.replace("zeros", "ones"))),
    ), hints=(
        "Whose tokens does the gradient of an expert on this rank already cover after backward?",
        "Those of all ranks that can send to it. Only the tokens that went to other ranks with the "
        "same expert are missing. The loss is a mean over the tokens of all ranks.",
        "for p in shared: all_reduce over group; for p in experts: all_reduce over own; both after "
        "p.grad /= dist.get_world_size(group)",
    ))
