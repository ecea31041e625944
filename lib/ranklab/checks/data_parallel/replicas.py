"""The check of broadcast_parameters: all replicas start equal. And the groups of other checks."""

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.toys import buffers, toy, weights
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.meter import Traffic

GROUP = "Hand `group` on to every collective, with group=group."
SOURCE = "Ranks in arguments count inside it: dist.broadcast(x, group=group, group_src=src)."


def two_groups():
    """On four ranks: the group of ranks 0 and 2, or that of 1 and 3, whichever is mine."""
    made = [dist.new_group(members) for members in ((0, 2), (1, 3))]
    return made[dist.get_rank() % 2]


def _model(seed):
    """The toy, and a buffer that no checkpoint holds: state_dict() does not list it."""
    model = toy(seed)
    model.register_buffer("mask", torch.rand(3).to(model.scale), persistent=False)
    return model


def _broadcast_trial(broadcast_parameters, src, in_groups=False):
    group = two_groups() if in_groups else None
    model = _model(seed=dist.get_rank())
    objects = dict(model.named_parameters())
    trained = [p.requires_grad for p in model.parameters()]
    with Traffic() as traffic:
        broadcast_parameters(model, src, group) if in_groups else broadcast_parameters(model, src)
    same = all(p is objects[name] for name, p in model.named_parameters())
    kept = (same and model.last.weight is model.first.weight,
            [p.requires_grad for p in model.parameters()] == trained)
    sent = sum(op.payload_bytes for op in traffic.ops)
    return weights(model), buffers(model), kept, sent, dict(traffic.calls)


def check_broadcast_parameters(broadcast_parameters):
    for ranks, src in ((1, 0), (3, 1), (4, 3)):
        seen = on_ranks(_broadcast_trial, broadcast_parameters, src, ranks=ranks)
        for rank, (values, _, kept, _, _) in enumerate(seen):
            _compare_weights(f"rank {rank} of {ranks}", values, weights(_model(src)),
                             weights(_model(rank)), src)
            _compare_objects(f"on rank {rank} of {ranks}", *kept)
    yield "every rank has rank src's parameters, frozen ones too, on 1, 3, 4 ranks"
    for rank, (_, values, _, _, _) in enumerate(seen):
        for name, right in buffers(_model(src)).items():
            if not torch.equal(values[name], right):
                raise Mistake(f"rank {rank} of 4 has its own buffer `{name}`, not rank {src}'s",
                              "Buffers belong to the model too: the statistics of batch norm, for "
                              "one. model.buffers() lists them, state_dict() not all of them.")
    yield "and its buffers, of every type, in a checkpoint or not"
    _broadcast_bytes(seen)
    yield "each tensor travels once, tied ones too"
    try:
        seen = on_ranks(_broadcast_trial, broadcast_parameters, 1, True, ranks=4)
    except Mistake as mistake:
        raise Mistake(mistake.what, f"Here are two groups, of ranks 0 and 2 and of ranks 1 and 3, "
                      f"and src is 1. {GROUP} {SOURCE}") from None
    for rank, (values, own_buffers, _, _, _) in enumerate(seen):
        source = 2 + rank % 2
        right = weights(_model(source)) | buffers(_model(source))
        wrong = [name for name, value in (values | own_buffers).items()
                 if not torch.equal(value, right[name])]
        if wrong:
            raise Mistake(f"in its group of two, with src=1, rank {rank} has not the "
                          f"`{wrong[0]}` of rank {source}", f"{GROUP} {SOURCE}")
    yield "inside a group it meets nobody else, and src counts there"


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
    for name, value in right.items():
        if torch.equal(got[name], value):
            continue
        if not torch.equal(got[name], own[name]):
            hint = ("It is not its own either. Is there a mean, or another source? Everybody "
                    "takes over what src has: dist.broadcast.")
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
    for rank, (_, _, _, sent, calls) in enumerate(seen):
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
