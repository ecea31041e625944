"""The check of broadcast_parameters: all replicas start equal."""

import warnings
from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.data_parallel.sent import Sent, all_sent_once
from ranklab.checks.data_parallel.toys import toy_with_more
from ranklab.checks.failures import STUCK
from ranklab.meter import Traffic

GROUP = ("Pass `group` on to every collective. Ranks in arguments count inside it: "
         "dist.broadcast(x, group=group, group_src=src).")
FAILURES = {STUCK: f"All ranks of a group call the same broadcasts, from one src. {GROUP}",
            "(Value|Runtime)Error: .*(rank|group).*": GROUP}
STILL = {  # where a tensor is still this rank's own, and all before it in the model are right
    "frozen": "Frozen parameters differ between ranks too, and training never changes that. Do not "
    "look at requires_grad here.",
    "images": "This one is channels-last, so .contiguous() and .reshape(-1) make a copy of it, but "
    "the message must get into the parameter itself.",
    "scale": "Buffers belong to the model too: the statistics of batch norm, for one. "
    "model.buffers() lists them.",
    "mask": "state_dict() does not list all buffers; model.buffers() does.",
    "steps": "Whole numbers travel like the others, as they are: batch norm's "
    "num_batches_tracked is one.",
}


def _state(model):
    """{name: each parameter and buffer}, in the model's order."""
    return {f"`{name}`": tensor for name, tensor in (
        *model.named_parameters(), *model.named_buffers())}


def _trial(broadcast_parameters, ranks):
    rank, noted = dist.get_rank(), []

    def src(turn):
        return 0 if turn else ranks.size - 1

    def call(turn):
        model = toy_with_more(rank)
        before = [(p, p.requires_grad) for p in model.parameters()]
        with Traffic() as traffic, Sent("broadcast") as sent:
            broadcast_parameters(model, src(turn), **ranks.keywords)
        after = [(p, p.requires_grad) for p in model.parameters()]
        noted.append((sent, traffic, [a is b for (a, _), (b, _) in zip(before, after)],
                      [a == b for (_, a), (_, b) in zip(before, after)], _is_in_graph(model)))
        return _state(model)

    def slips(name, turn):
        part, own = name.strip("`").split(".")[0], _state(toy_with_more(rank))[name]
        mean = torch.stack([_state(toy_with_more(member))[name].double()
                            for member in ranks.members]).mean(0)
        return {"still this rank's own": (own, STILL.get(part, "Nothing has changed on this rank. "
                                                         f"Here src is {src(turn)}.")),
                "the mean over ranks": (mean.to(own.dtype), "Every rank takes src's values.")}

    looks = list(beside(str(ranks), ranks, call, lambda turn: {
        name: [tensor] * ranks.size
        for name, tensor in _state(toy_with_more(ranks.members[src(turn)])).items()}, slips=slips))
    sent, traffic, is_same, is_trained, is_in_graph = noted[0]
    yield partial(sent.all_ended, str(ranks))
    for is_so, what, hint in (
        (not is_in_graph, "the next backward warns that a broadcast is in the graph", "Autograd "
         "must not see the message: broadcast tensor.detach(), which shares the memory."),
        (all(is_same), "the model's parameters are other objects than before", "Write into each, "
         "in place: dist.broadcast does. An optimizer that exists already holds the old objects."),
        (all(is_trained), "requires_grad of a parameter has changed", "To hide the message from "
         "autograd, broadcast tensor.detach(): frozen stays frozen, and trained stays trained."),
    ):
        yield partial(expect, is_so, f"{ranks}: {what}", hint)
    yield from looks
    model = toy_with_more(0)
    yield partial(all_sent_once, str(ranks), traffic, model,
                  [*model.parameters(), *model.buffers()], "broadcast")


def _is_in_graph(model):
    """Does backward warn that a collective is in the graph?"""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if trained := [p for p in model.parameters() if p.requires_grad]:
            sum(p.sum() for p in trained).backward()
    return any("c10d::" in str(each.message) for each in said)


def check_broadcast_parameters(broadcast_parameters):
    on_groups(_trial, broadcast_parameters, failures=FAILURES, group_hint=GROUP)
    yield "every rank has rank src's parameters, frozen ones too, on 1, 2, 3, 4 ranks"
    yield "and its buffers of every type, also those that no checkpoint holds"
    yield "each tensor travels once, tied ones too"
    yield "inside a group it talks to nobody outside, and src counts there"
