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
           "and its buffers of every type, including those that no checkpoint holds":
           ("`scale`", "`steps`", "`mask`"),
           "each tensor is sent once, including tied ones": COST,
           "inside a group it talks only to that group's ranks, and src is a rank of the group":
           (OUTSIDE,)},
          _see, ("a model with frozen, tied and float64 parameters",), (4,), (ALL, *GROUPS),
          oracle=made_by_src),
    mistakes=(
        Slip("Buffers belong to the model as well, for example batch norm's running statistics. "
             "model.buffers() lists them.", (BUFFERS, "")),
        Slip("Broadcast integer buffers like the others, in their own dtype: batch norm's "
             "num_batches_tracked is one.",
             (BUFFERS, ", *filter(torch.is_floating_point, model.buffers())")),
        Slip("Buffers of submodules count as well: batch norm's are there.",
             (BUFFERS, ", *model.buffers(recurse=False)")),
        Slip("state_dict() does not list all buffers; model.buffers() does.",
             (f"{PARAMETERS}{BUFFERS}", "*{id(t): t for t in model.state_dict().values()}.values()")
             , (BUFFERS, ", *(b for name, b in model.named_buffers() if name in "
                "model.state_dict())")),
        Slip("Frozen parameters can also differ between ranks, and training never fixes that. "
             "Ignore requires_grad here.",
             (PARAMETERS, "*[p for p in model.parameters() if p.requires_grad]")),
        Slip("The tied weight is sent twice: model.parameters() lists it once, but state_dict(), "
             "named_parameters(remove_duplicate=False) and a walk over the modules do not.",
             (PARAMETERS, "*dict(model.named_parameters(remove_duplicate=False)).values()")),
        Slip("Take the values of rank src, which need not be rank 0.",
             ("group_src=src", "group_src=0")),
        Slip("Pass `group`, and src as a rank within it: dist.broadcast(x, group=group, "
             "group_src=src).", ("group=group, group_src=src", "src"),
             ("group=group, group_src=src", "src, group=group")),
        Slip("Every rank must get src's values; this is the mean over ranks.",
             (BUFFERS, "", CALL,
              f"dist.all_reduce({ITSELF}.div_(dist.get_world_size(group)), group=group)")),
        Slip("One broadcast of each whole tensor is enough: an all-reduce sends twice as much.",
             (CALL, f"dist.all_reduce({ITSELF}.mul_(dist.get_rank(group) == src), group=group)")),
        Slip("You receive into a copy, so this rank's own tensor never changes: broadcast "
             "tensor.detach(), which shares its memory.", (ITSELF, f"{ITSELF}.clone()")),
        Slip("This parameter is channels-last, so .contiguous() and .reshape(-1) copy it, but the "
             "values must arrive in the parameter itself.",
             (ITSELF, f"{ITSELF}.contiguous()"), (ITSELF, f"{ITSELF}.reshape(-1)")),
        Slip("Send each tensor in its own dtype: float64 loses digits in float32.",
             (CALL, f"number = {ITSELF}.float()\n"
              "        dist.broadcast(number, group=group, group_src=src)\n"
              f"        {ITSELF}.copy_(number)")),
        Slip("Autograd must not record the broadcast: use tensor.detach(), which shares the "
             "memory.", (ITSELF, "tensor")),
        Slip("To hide the broadcast from autograd, use tensor.detach(): frozen parameters stay "
             "frozen, and trainable ones stay trainable.",
             (ITSELF, "tensor.requires_grad_(False)")),
        Slip("Write into each parameter in place, as dist.broadcast does. An existing optimizer "
             "still holds the old objects.", new_objects),
        Slip("One rank's first broadcast is matched with the others' first: all ranks must "
             "broadcast the same tensors in the same order.",
             (f"[{PARAMETERS}{BUFFERS}]",
              f"sorted([{PARAMETERS}{BUFFERS}], key=lambda tensor: float(tensor.sum()))")),
        Slip("Wait for every handle, not just the last: until its wait() returns, a message may be "
             "only half done.", (CALL, f"work = {CALL[:-1]}, async_op=True)\n    work.wait()"),
             (CALL, f"{CALL[:-1]}, async_op=True)")),
    ), hints=(
        "What must be equal on all ranks before the first step? Not only what is trained.",
        "Every parameter and every buffer: [*model.parameters(), *model.buffers()].",
        "dist.broadcast(tensor.detach(), group=group, group_src=src) for each of them: it works in "
        "place, and src is a rank within the group.",
    ))
