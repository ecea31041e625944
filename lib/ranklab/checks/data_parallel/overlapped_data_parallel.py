"""The check of OverlappedDataParallel: right in every kind of backward, and under way in time."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab.checks.beside import TURNS, beside, expect, on_groups
from ranklab.checks.data_parallel.no_sync import in_pieces
from ranklab.checks.data_parallel.sent import Sent
from ranklab.checks.data_parallel.toys import gradients, loss_of, mean_gradients, rows, toy
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.data_parallel import no_sync
from ranklab.engine import device

LIMIT = 8  # seconds: several of the usual mistakes leave ranks waiting
LAYER_BYTES = 4 * (6 * 6 + 6)  # each layer is a bucket
TRAVELS = ("When nothing of a bucket is missing: bucket.gather(), divide bucket.flat, all-reduce "
           "it itself, whole. The hook gets the parameter, not its gradient.")
UNUSED = ("bucket.fill_none(used) after the waits, with used = self.used_anywhere(): what another "
          "rank used gets the mean, what no rank used stays None. gather() puts zeros where a "
          "gradient is None.")
PIECES = "Look at self.sync first in the hook: when it is False do nothing; bucket.missing too."
GROUP = "Hand self.group on to every collective; divide by dist.get_world_size(self.group)."
ORDER = ("Each leaves once, 0, then 1, then 2, on every rank: the first message of one rank meets "
         "the first of the others. In the hook, in a loop: while the first of self.waiting misses "
         "nothing it leaves. One that was ready early leaves right behind the one that it has "
         "waited for.")
ALL_CALL = ("All ranks call the same all-reduces: one for each bucket. So finish() launches all "
            "that is left, whatever is missing in it, and waits for all, before it raises.")
FAILURES = {
    "ValueError: .* got two gradients in one backward.*": "bucket.missing must be full again when "
    "the next backward begins: finish() sets it back to all of bucket.parameters. Leave "
    "self.backward_begins() first in the hook: it sees to it that finish() is called.",
    "AttributeError: 'NoneType' object has no attribute 'wait'": "all_reduce returns None without "
    "async_op=True; with it, a handle to wait for.",
    "ValueError: .* got no gradient on rank .*": "Raise only for what got no gradient in this "
    "backward, and only where self.find_unused_parameters is False.",
    LEFT: ALL_CALL, MISMATCH: ALL_CALL,
}


class Layers(nn.Module):
    """Three layers; each call says which of them it uses, in which order."""

    def __init__(self, call=lambda layer, x: layer(x)):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.call = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), call
        self.events = []
        for layer in self.layers:
            layer.register_full_backward_pre_hook(lambda *_: self.events.append("layer"))

    def forward(self, x, order):
        for number in order:
            x = torch.tanh(self.call(self.layers[number], x))
        return x


class Hidden(Layers):
    """Its output is an object into which nobody looks for tensors."""

    def forward(self, x, order):
        return SimpleNamespace(square=super().forward(x, order).square)


CHECKPOINTS = partial(Layers, partial(checkpoint, use_reentrant=True))
ALL = (0, 1, 2)
EVEN = (ALL,), (ALL,)


class Case(NamedTuple):
    """A model, and in each turn the layers that each rank of a group uses."""

    new: Any = Layers
    orders: Any = EVEN
    finds: bool = False  # unused parameters

    def inputs(self, turn, ranks, index):
        x, orders = rows(10 * turn + ranks.members[index]), self.orders[turn]
        return x.requires_grad_(), orders[index % len(orders)]

    def all_used(self):
        return all(len(order) == len(ALL) for turn in self.orders for order in turn)


CASES = {
    "tied, used twice, two types": Case(partial(toy, 0)),
    "an output in an object": Case(Hidden),
    "ranks with different orders": Case(Layers, ((ALL, ALL[::-1]), (ALL[::-1], ALL))),
    "layers in checkpoints with use_reentrant=True": Case(CHECKPOINTS),
    "three layers": Case(),
    "three layers, find_unused_parameters=True": Case(finds=True),
    "layers that some ranks use": Case(Layers, (((0,), (0, 1), (1,), (0, 1)),
                                                ((1, 2), ALL, ALL, ALL)), True),
    "layers that no rank uses": Case(Layers, (((1,),), (ALL,)), True),
}


def _trial(wrapped_class, ranks):
    for name, case in CASES.items():
        yield _backwards(f"{ranks}, {name}", wrapped_class, ranks, case)
    wrapped = wrapped_class(toy(0), bucket_cap_bytes=200, group=ranks.group)
    yield partial(_one_by_one, list(in_pieces(f"{ranks}, with sync=False", ranks, wrapped, no_sync,
                                              lambda name: PIECES)))
    yield from _errors(str(ranks), wrapped_class, ranks)


def _backwards(where, wrapped_class, ranks, case):
    """A look at two backwards beside one process: the gradients, and what happened when."""
    model, noted = case.new().to(device()), []
    wrapped = wrapped_class(model, bucket_cap_bytes=LAYER_BYTES, group=ranks.group,
                            find_unused_parameters=case.finds)

    def call(turn):
        model.zero_grad(set_to_none=case.finds or turn == 0)
        loss = loss_of(wrapped, *case.inputs(turn, ranks, ranks.index))
        noted.append(_watched(where, case, wrapped, loss))
        return gradients(model)

    def right(turn):
        of_ranks = [case.inputs(turn, ranks, index) for index in range(ranks.size)]
        return {name: [mean] * ranks.size
                for name, mean in mean_gradients(case.new().to(device()), of_ranks).items()}

    owns = [mean_gradients(case.new().to(device()), [case.inputs(turn, ranks, ranks.index)])
            for turn in TURNS]

    def slips(name, turn):
        own = owns[turn][name]
        return {} if own is None else {"this rank's own": (own, TRAVELS)}

    looks = list(beside(where, ranks, call, right, slips=slips,
                        advice=lambda name: TRAVELS if case.all_used() else UNUSED))
    return partial(_one_by_one, [*noted, *looks])


def _one_by_one(looks):
    for look in looks:
        look()


def _watched(where, case, wrapped, loss):
    """A look at what happens in the backward of `loss`, which is run: `events` has, in order,
    "layer" when the backward of a layer begins, the number of a bucket that leaves (-1: another
    tensor), "blocking", "asked" for used_anywhere(), "wait" and "finish".
    """
    flats, events = [bucket.flat.data_ptr() for bucket in wrapped.buckets], []
    wrapped.module.events, finish = events, wrapped.finish

    def leaves(tensor, work):
        number = flats.index(tensor.data_ptr()) if tensor.data_ptr() in flats else -1
        asked = tensor.dtype == torch.int32
        events.append("asked" if asked else "blocking" if work is None else number)

    def finishes():
        events.append("finish")
        finish()

    wrapped.finish = finishes
    with Sent(note=leaves, waited=lambda: events.append("wait")) as sent:
        loss.backward()
    wrapped.finish = finish
    return partial(_look, where, case, len(flats), events, sent, wrapped.waiting is wrapped.buckets,
                   _is_as_before(wrapped))


def _is_as_before(wrapped):
    return (not wrapped.works and list(wrapped.waiting) == wrapped.buckets
            and all(bucket.missing == set(bucket.parameters) for bucket in wrapped.buckets))


def _look(where, case, buckets, events, sent, is_no_copy, is_as_before):
    finish = events.index("finish") if "finish" in events else len(events)
    last_layer = max((n for n, event in enumerate(events) if event == "layer"), default=0)
    left, early, late = ([event for event in part if isinstance(event, int)]
                         for part in (events, events[:last_layer], events[finish:]))
    ready = buckets - 1 if last_layer and case.orders is EVEN else 0
    for is_so, what, hint in (
        (not is_no_copy, "after backward self.waiting is self.buckets itself",
         "self.waiting must be a copy: list(self.buckets)."),
        ("blocking" not in events, "backward stands still in an all-reduce", "Without "
         "async_op=True it returns when all is done; with it, at once, with a handle to wait for."),
        (-1 not in left, "something else travels than bucket.flat", TRAVELS),
        (left == [*range(buckets)], f"of {buckets} buckets there leave, in this order, {left}",
         ORDER),
        (events.count("asked") <= case.finds, f"{events.count('asked')} calls of used_anywhere() "
         f"with find_unused_parameters={case.finds}", "It is a message, and tells of all "
         "parameters: ask once, only with find_unused_parameters."),
        ("wait" not in events[:finish], "it waits while layers are still to be computed",
         "No overlap: keep the handles, and wait for them in finish()."),
        (not case.all_used() or not late, f"{len(late)} of {buckets} buckets leave in finish(), "
         "though all gradients were there before", ORDER),
        (len(early) >= ready, f"{len(early)} of {buckets} buckets left before the last layer's "
         f"backward; {ready} were ready", "One is ready when nothing of it is missing: launch it."),
    ):
        expect(is_so, f"{where}: {what}", hint)
    sent.all_ended(where)
    expect(is_as_before, f"{where}: after backward not all is as before it", "finish() must leave "
           "self.works empty, or it grows, self.waiting full, and each bucket.missing too.")


def _errors(where, wrapped_class, ranks):
    """Looks at what is said of two gradients of a layer, and of one that the second rank lacks."""
    new = partial(wrapped_class, bucket_cap_bytes=LAYER_BYTES, group=ranks.group)
    x, is_second = rows(0).requires_grad_(), ranks.index == 1
    said = _said(new(CHECKPOINTS().to(device())), x, (*ALL, 0))
    yield partial(expect, "two gradients" in said, f"{where}: a layer in two checkpoints gets two "
                  "gradients in one backward, and no error comes", "Its bucket may be on its way "
                  "when the second is added. Leave `raise self.second_gradient(parameter)`.")
    wrapped = new(Layers().to(device()))
    _said(wrapped, x, ALL)  # from here on no gradient is None
    said = _said(wrapped, x, (0, 1) if is_second else ALL)
    yield partial(expect, ("layers.2.weight" in said) == is_second and bool(said) == is_second,
                  f"{where}: the second rank alone has no gradient for layer 2 now, and "
                  f"{'it' if is_second else 'this rank'} says: {said or 'nothing'}", "`missing` is "
                  "what this rank lacks in this backward: raise self.no_gradient(missing) last.")
    yield partial(expect, _is_as_before(wrapped), f"{where}: not ready for another backward after "
                  "that error", "Raise last, when all is as in the beginning.")


def _said(wrapped, x, order):
    try:
        loss_of(wrapped, x, order).backward()
        return ""
    except Exception as error:  # any: it is shown
        return str(error)


def check_OverlappedDataParallel(wrapped_class):
    on_groups(_trial, wrapped_class, failures=FAILURES, at_once=True, group_hint=GROUP,
              timeout=LIMIT)
    yield "gradients are the mean over ranks, on 1 to 4 ranks: tied, used twice, two types"
    yield "frozen ones stay without; right also after zero_grad(set_to_none=False), twice in a row"
    yield "one all-reduce for each bucket, in their order, while backward goes on; then all waits"
    yield "with sync=False nothing is sent, and the next backward averages what has added up"
    yield "right where ranks are ready in different orders; a checkpoint's backward inside it"
    yield "find_unused_parameters: no gradient counts as zeros; unused everywhere stays None"
    yield "two gradients of one, or a missing one, are an error in that backward; nobody hangs"
    yield "inside a group it meets nobody else"
