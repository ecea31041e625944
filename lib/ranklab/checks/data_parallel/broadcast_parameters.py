"""The check of broadcast_parameters: all replicas start equal."""

import warnings
from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.sent import COST, OUTSIDE, Sent
from ranklab.checks.data_parallel.toys import toy_with_more
from ranklab.checks.prover import ALL, GROUPS, Must, Proof, Slip, Stage, Told
from ranklab.data_parallel import broadcast_parameters

SAME = "the parameters that are other objects than before"
TRAINED = "the parameters whose requires_grad has changed"
IN_GRAPH = "whether backward warns of a broadcast in the graph"


def _state(model):
    """Return {name: each parameter and buffer}, in the model's order."""
    return {f"`{name}`": tensor for name, tensor in (
        *model.named_parameters(), *model.named_buffers())}


def _see(fn, case, ranks):
    """Look without messages first: with a wrong src or group, ranks would wait for each other."""
    yield _call(fn, ranks, ranks.size - 1, rehearsed=True)
    yield from [_call(fn, ranks, src) for src in (ranks.size - 1, 0)]


def _call(fn, ranks, src, rehearsed=False):
    model = toy_with_more(dist.get_rank())
    before = [(p, p.requires_grad) for p in model.parameters()]
    tensors = [*_state(model).values()]
    with Sent("broadcast", rehearsed=rehearsed) as sent:
        fn(model, src, **ranks.keywords)
    cost = sent.cost(tensors, ranks)
    pairs = [*zip(before, model.named_parameters())]
    return cost if rehearsed else cost | {
        name: Told(tensor, partial(_as_own, name, dist.get_rank()))
        for name, tensor in _state(model).items()} | {
        SAME: Must([name for (old, _), (name, p) in pairs if p is not old], []),
        TRAINED: Must([name for (_, old), (name, p) in pairs if p.requires_grad != old], []),
        IN_GRAPH: Must(_is_in_graph(model), False)}


def _as_own(name, rank, got, due):
    own = _state(toy_with_more(rank))[name].cpu()
    return "still this rank's own" * (isinstance(got, torch.Tensor) and torch.equal(got, own))


def _is_in_graph(model):
    with warnings.catch_warnings(record=True) as texts:
        warnings.simplefilter("always")
        if trained := [p for p in model.parameters() if p.requires_grad]:
            sum(p.sum() for p in trained).backward()
    return any("c10d::" in str(each.message) for each in texts)


@torch.no_grad()
def made_by_src(model, src=0, group=None):
    """Make src's model here, by its seed: the global rank."""
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, dist.get_rank(), group)
    for tensor, value in zip(_state(model).values(), _state(toy_with_more(every[src])).values()):
        tensor.copy_(value)


def new_objects(model, src=0, group=None):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            copied = p.detach().clone()
            dist.broadcast(copied, group=group, group_src=src)
            setattr(module, name, torch.nn.Parameter(copied))
    for b in model.buffers():
        dist.broadcast(b, group=group, group_src=src)


PARAMETERS, BUFFERS, ITSELF = "*model.parameters()", ", *model.buffers()", "tensor.detach()"
CALL = f"dist.broadcast({ITSELF}, group=group, group_src=src)"
BROADCAST = Proof(
    broadcast_parameters,
    Stage({"every rank has rank src's parameters, frozen ones too, on 1, 2, 3, 4 ranks": (),
           "and its buffers of every type, also those that no checkpoint holds":
           ("`scale`", "`steps`", "`mask`"),
           "each tensor travels once, tied ones too": COST,
           "inside a group it talks to nobody outside, and src counts there": (OUTSIDE,)},
          _see, ("a model with frozen, tied and float64 parameters",), (4,), (ALL, *GROUPS),
          oracle=made_by_src),
    mistakes=(
        Slip("Buffers belong to the model too: the statistics of batch norm, for one. "
             "model.buffers() lists them.", (BUFFERS, "")),
        Slip("Whole numbers travel like the others, as they are: batch norm's "
             "num_batches_tracked is one.",
             (BUFFERS, ", *filter(torch.is_floating_point, model.buffers())")),
        Slip("Buffers of submodules count, too: those of batch norms are there.",
             (BUFFERS, ", *model.buffers(recurse=False)")),
        Slip("state_dict() does not list all buffers; model.buffers() does.",
             (f"{PARAMETERS}{BUFFERS}", "*{id(t): t for t in model.state_dict().values()}.values()")
             , (BUFFERS, ", *(b for name, b in model.named_buffers() if name in "
                "model.state_dict())")),
        Slip("Frozen parameters differ between ranks too, and training never changes that. Do not "
             "look at requires_grad here.",
             (PARAMETERS, "*[p for p in model.parameters() if p.requires_grad]")),
        Slip("The tied weight travels twice: model.parameters() lists it once; state_dict(), "
             "named_parameters(remove_duplicate=False) and a walk over the modules do not.",
             (PARAMETERS, "*dict(model.named_parameters(remove_duplicate=False)).values()")),
        Slip("Take the values of rank src, which need not be rank 0.",
             ("group_src=src", "group_src=0")),
        Slip("Pass `group` on, and src as a rank inside it: dist.broadcast(x, group=group, "
             "group_src=src).", ("group=group, group_src=src", "src"),
             ("group=group, group_src=src", "src, group=group")),
        Slip("Every rank takes src's values: this is the mean over ranks.",
             (BUFFERS, "", CALL,
              f"dist.all_reduce({ITSELF}.div_(dist.get_world_size(group)), group=group)")),
        Slip("One broadcast of each tensor, whole, is all that is needed: an all-reduce sends "
             "twice as much.",
             (CALL, f"dist.all_reduce({ITSELF}.mul_(dist.get_rank(group) == src), group=group)")),
        Slip("What arrives in a copy changes nothing on this rank: broadcast tensor.detach(), "
             "which shares the memory.", (ITSELF, f"{ITSELF}.clone()")),
        Slip("This one is channels-last, so .contiguous() and .reshape(-1) make a copy of it, but "
             "the message must get into the parameter itself.",
             (ITSELF, f"{ITSELF}.contiguous()"), (ITSELF, f"{ITSELF}.reshape(-1)")),
        Slip("Each travels in its own type: in float32 a double loses digits.",
             (CALL, f"number = {ITSELF}.float()\n"
              "        dist.broadcast(number, group=group, group_src=src)\n"
              f"        {ITSELF}.copy_(number)")),
        Slip("Autograd must not see the message: broadcast tensor.detach(), which shares the "
             "memory.", (ITSELF, "tensor")),
        Slip("To hide the message from autograd, broadcast tensor.detach(): frozen stays frozen, "
             "and trained stays trained.", (ITSELF, "tensor.requires_grad_(False)")),
        Slip("Write into each parameter, in place: dist.broadcast does. An optimizer that exists "
             "already holds the old objects.", new_objects),
        Slip("The first broadcast of one rank meets the first of the others: all ranks must "
             "broadcast the same tensors, in the same order.",
             (f"[{PARAMETERS}{BUFFERS}]",
              f"sorted([{PARAMETERS}{BUFFERS}], key=lambda tensor: float(tensor.sum()))")),
        Slip("Wait for every handle, not only for the last: a message may be half done until its "
             "wait() returns.", (CALL, f"work = {CALL[:-1]}, async_op=True)\n    work.wait()"),
             (CALL, f"{CALL[:-1]}, async_op=True)")),
    ), hints=(
        "What must be equal on all ranks before the first step? Not only what is trained.",
        "Every parameter and every buffer: [*model.parameters(), *model.buffers()].",
        "dist.broadcast(tensor.detach(), group=group, group_src=src) for each of them: in place, "
        "and src counts inside the group.",
    ))
