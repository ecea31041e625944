"""The check of broadcast_parameters: all replicas start equal. And the groups of other checks."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.events import Sent, collectives_noted
from ranklab.checks.data_parallel.toys import buffers, toy, weights
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import on_ranks
from ranklab.meter import Traffic

GROUPS = (0,), (1, 2, 3)  # of four ranks: one alone, and three whose numbers begin at 1
GROUP = "Hand `group` on to every collective, with group=group."
SOURCE = "Ranks in arguments count inside it: dist.broadcast(x, group=group, group_src=src)."


def members_of(rank):
    """The ranks of the group that `rank` is in, on four ranks."""
    return GROUPS[rank > 0]


def group_of_mine():
    """On four ranks: the group of `members_of(my rank)`."""
    made = [dist.new_group(members) for members in GROUPS]
    return made[dist.get_rank() > 0]


def _model(seed):
    """The toy, and a buffer that no checkpoint holds: state_dict() does not list it. One parameter
    is channels-last: its numbers lie in another order in memory."""
    model = toy(seed)
    images = torch.rand(2, 3, 2, 2).to(model.scale)
    model.images = nn.Parameter(images.contiguous(memory_format=torch.channels_last))
    model.register_buffer("mask", torch.rand(3).to(model.scale), persistent=False)
    return model


def _broadcast_trial(broadcast_parameters, src):
    model, noted = _model(seed=dist.get_rank()), Sent()
    objects = dict(model.named_parameters())
    trained = [p.requires_grad for p in model.parameters()]
    with Traffic() as traffic, collectives_noted(noted.note, "broadcast"):
        broadcast_parameters(model, src)
    same = all(p is objects[name] for name, p in model.named_parameters())
    kept = (same and model.last.weight is model.first.weight,
            [p.requires_grad for p in model.parameters()] == trained)
    sent = sum(op.payload_bytes for op in traffic.ops)
    return (weights(model), buffers(model), kept, sent, dict(traffic.calls),
            (noted.not_waited, len(noted.handles), _is_seen_by_autograd(model)))


def _group_trial(broadcast_parameters):
    """(src, the rank it means, the first tensor that is not that rank's), or None."""
    group, rank = group_of_mine(), dist.get_rank()
    for src in (0, 2) if rank else (0,):
        model, source = _model(seed=rank), members_of(rank)[src]
        broadcast_parameters(model, src, group)
        right = weights(_model(source)) | buffers(_model(source))
        for name, value in (weights(model) | buffers(model)).items():
            if not torch.equal(value, right[name]):
                return src, source, name
    return None


def _is_seen_by_autograd(model):
    """Does backward warn that a collective is in the graph?"""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if trained := [p for p in model.parameters() if p.requires_grad]:
            sum(p.sum() for p in trained).backward()
    return any("c10d::" in str(each.message) for each in said)


def check_broadcast_parameters(broadcast_parameters):
    for ranks, src in ((1, 0), (3, 1), (4, 3)):
        seen = on_ranks(_broadcast_trial, broadcast_parameters, src, ranks=ranks)
        for rank, (values, _, kept, _, _, noted) in enumerate(seen):
            _compare_noted(f"rank {rank} of {ranks}", *noted)
            _compare_weights(f"rank {rank} of {ranks}", values, weights(_model(src)),
                             weights(_model(rank)), src)
            _compare_objects(f"on rank {rank} of {ranks}", *kept)
    yield "every rank has rank src's parameters, frozen ones too, on 1, 3, 4 ranks"
    for rank, (_, values, *_) in enumerate(seen):
        right = buffers(_model(src))
        off = {name for name, value in right.items() if not torch.equal(values[name], value)}
        if off == {"steps"}:
            raise Mistake(f"rank {rank} of 4 has its own buffer `steps`, of int64, not rank "
                          f"{src}'s", "The other buffers are right. Whole numbers travel like the "
                          "others, as they are: batch norm's num_batches_tracked is one.")
        for name in right:
            if name in off:
                raise Mistake(f"rank {rank} of 4 has its own buffer `{name}`, not rank {src}'s",
                              "Buffers belong to the model too: the statistics of batch norm, for "
                              "one. model.buffers() lists them, state_dict() not all of them.")
    yield "and its buffers, of every type, in a checkpoint or not"
    _broadcast_bytes(seen)
    yield "each tensor travels once, tied ones too"
    try:
        seen = on_ranks(_group_trial, broadcast_parameters, ranks=4)
    except Mistake as mistake:
        raise Mistake(mistake.what, "Here are two groups, rank 0 alone and ranks 1, 2, 3. "
                      f"{GROUP} {SOURCE}") from None
    for rank, wrong in enumerate(seen):
        if wrong:
            src, source, name = wrong
            raise Mistake(f"in the group of ranks {members_of(rank)}, with src={src}, rank {rank} "
                          f"has not the `{name}` of rank {source}", f"{GROUP} {SOURCE}")
    yield "inside a group it meets nobody else, and src counts there"


def _compare_noted(where, not_waited, handles, is_seen):
    if not_waited:
        raise Mistake(f"{where}: nobody has waited for {not_waited} of its {handles} broadcasts",
                      "With async_op=True a broadcast has only begun when it returns. Keep every "
                      "handle and wait() for each, not for the last alone; or leave async_op out.")
    if is_seen:
        raise Mistake(f"{where}: the next backward warns that a broadcast is in the graph",
                      "Autograd must not see the message: broadcast tensor.detach(), which shares "
                      "the memory, or do it all inside torch.no_grad().")


def _compare_objects(where, same, as_trained):
    if not same:
        raise Mistake(f"{where} the model's parameters are other objects than before, or no longer "
                      "tied", "Write into each parameter, in place: dist.broadcast does. An "
                      "optimizer that exists already holds the old objects.")
    if not as_trained:
        raise Mistake(f"{where} requires_grad of a parameter has changed", "To hide the message "
                      "from autograd, broadcast tensor.detach(): it shares the memory. Frozen "
                      "stays frozen, and what is trained must go on being trained.")


def _compare_weights(where, got, right, own, src):
    off = [name for name in right if not torch.equal(got[name], right[name])]
    for name in off:
        if not torch.equal(got[name], own[name]):
            hint = ("It is not its own either. Is there a mean, or another source? Everybody "
                    "takes over what src has: dist.broadcast.")
        elif off == ["images"]:
            hint = ("It is channels-last: .contiguous() and .reshape(-1) make a copy of it, and "
                    "the message must get into the parameter itself.")
        elif name.startswith("frozen"):
            hint = ("Frozen parameters differ between ranks too, and for ever. Do not look at "
                    "requires_grad here.")
        elif all(torch.equal(got[other], own[other]) for other in right):
            hint = f"Nothing has changed on this rank. Here src is {src}, not 0." if src else (
                "Nothing has changed on this rank.")
        else:
            hint = "Go through all of model.parameters()."
        raise Mistake(f"{where} has not rank {src}'s `{name}`", hint)


def _broadcast_bytes(seen):
    model = _model(0)
    wanted = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    for rank, (_, _, _, sent, calls, _) in enumerate(seen):
        if sent == wanted and set(calls) <= {"broadcast"}:
            continue
        if sent < wanted:
            hint = "Each tensor travels in its own type: in float32 a double loses digits."
        elif sent == wanted + model.first.weight.nbytes:
            hint = ("The tied weight travels twice: state_dict() and named_parameters("
                    "remove_duplicate=False) list it twice, model.parameters() once.")
        else:
            hint = f"It calls {calls}. One broadcast of each tensor is all that is needed."
        raise Mistake(f"rank {rank} of 4 puts {sent:,} bytes into collectives; the model has "
                      f"{wanted:,}", hint)
