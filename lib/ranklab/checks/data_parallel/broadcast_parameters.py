"""The check of broadcast_parameters: all replicas start equal."""

import warnings

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.events import Sent, all_ended, all_sent_once
from ranklab.checks.data_parallel.toys import HAND_ON, buffers, toy_with_more, weights
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import group_of_mine, members_of, on_ranks, rank_name
from ranklab.meter import Traffic

HERE = (f"Here are two groups, rank 0 alone and ranks 1, 2, 3. {HAND_ON} Ranks in arguments count "
        "inside it: dist.broadcast(x, group=group, group_src=src).")


def _state(model):
    return weights(model) | buffers(model)


def _broadcast_trial(broadcast_parameters, src):
    model = toy_with_more(dist.get_rank())
    objects = dict(model.named_parameters())
    trained = [p.requires_grad for p in model.parameters()]
    with Traffic() as traffic, Sent("broadcast") as noted:
        broadcast_parameters(model, src)
    same = all(p is objects[name] for name, p in model.named_parameters())
    kept = (same and model.last.weight is model.first.weight,
            [p.requires_grad for p in model.parameters()] == trained)
    sent = sum(op.payload_bytes for op in traffic.ops)
    return (weights(model), buffers(model), kept, sent, dict(traffic.calls),
            noted.ends, _is_seen_by_autograd(model))


def _group_trial(broadcast_parameters):
    """(src, the rank it means, the first tensor that is not that rank's), or None."""
    group, rank = group_of_mine(), dist.get_rank()
    for src in (0, 2) if rank else (0,):
        model, source = toy_with_more(rank), members_of(rank)[src]
        broadcast_parameters(model, src, group)
        for name in _other(_state(model), _state(toy_with_more(source))):
            return src, source, name
    return None


def _other(got, right):
    """The names of the tensors that are not right, to the last bit."""
    return [name for name, tensor in right.items() if not torch.equal(got[name], tensor)]


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
        for rank, (got, _, kept, _, _, ends, is_in_graph) in enumerate(seen):
            where = rank_name(rank, ranks)
            all_ended(where, "broadcast", *ends)
            if is_in_graph:
                raise Mistake(f"{where}: the next backward warns that a broadcast is in the graph",
                              "Autograd must not see the message: broadcast tensor.detach(), which "
                              "shares the memory, or do it all inside torch.no_grad().")
            _compare_weights(where, got, weights(toy_with_more(src)), weights(toy_with_more(rank)),
                             src)
            _compare_objects(f"on {where}", *kept)
    yield "every rank has rank src's parameters, frozen ones too, on 1, 3, 4 ranks"
    for rank, (_, got, *_) in enumerate(seen):
        _compare_buffers(rank_name(rank, 4), _other(got, buffers(toy_with_more(src))), src)
    yield "and its buffers, of every type, in a checkpoint or not"
    for rank, (_, _, _, sent, calls, *_) in enumerate(seen):
        model = toy_with_more(0)
        all_sent_once(rank_name(rank, 4), sent, calls, [*model.parameters(), *model.buffers()],
                      "tensor", "broadcast", "One broadcast of each tensor is all that is needed.")
    yield "each tensor travels once, tied ones too"
    with hinted({".*": HERE}):  # whatever it is
        seen = on_ranks(_group_trial, broadcast_parameters, ranks=4)
    for rank, wrong in enumerate(seen):
        if wrong:
            src, source, name = wrong
            raise Mistake(f"in the group of ranks {members_of(rank)}, with src={src}, rank {rank} "
                          f"has not the `{name}` of rank {source}", HERE)
    yield "inside a group it meets nobody else, and src counts there"


def _compare_buffers(where, wrong, src):
    if wrong == ["steps"]:
        raise Mistake(f"{where} has its own buffer `steps`, of int64, not rank {src}'s",
                      "The other buffers are right. Whole numbers travel like the others, as they "
                      "are: batch norm's num_batches_tracked is one.")
    if wrong:
        raise Mistake(f"{where} has its own buffer `{wrong[0]}`, not rank {src}'s",
                      "Buffers belong to the model too: the statistics of batch norm, for one. "
                      "model.buffers() lists them, state_dict() not all of them.")


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
    wrong = _other(got, right)
    for name in wrong:
        if not torch.equal(got[name], own[name]):
            hint = ("It is not its own either. Is there a mean, or another source? Everybody "
                    "takes over what src has: dist.broadcast.")
        elif wrong == ["images"]:
            hint = ("It is channels-last: .contiguous() and .reshape(-1) make a copy of it, and "
                    "the message must get into the parameter itself.")
        elif name.startswith("frozen"):
            hint = ("Frozen parameters differ between ranks too, and for ever. Do not look at "
                    "requires_grad here.")
        elif not _other(got, own):
            hint = f"Nothing has changed on this rank. Here src is {src}, not 0." if src else (
                "Nothing has changed on this rank.")
        else:
            hint = "Go through all of model.parameters()."
        raise Mistake(f"{where} has not rank {src}'s `{name}`", hint)
