"""The check of OverlappedDataParallel: right in every kind of backward, and under way in time."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.data_parallel.no_sync import in_pieces
from ranklab.checks.data_parallel.sent import Sent
from ranklab.checks.data_parallel.toys import gradients, loss_of, mean_gradients, rows, toy
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.checks.trial import NO_ERROR, refusal
from ranklab.data_parallel import no_sync
from ranklab.engine import device

LIMIT = 8  # seconds: several of the usual mistakes leave ranks waiting
LAYER_BYTES = 4 * (6 * 6 + 6)  # each layer is a bucket
TRAVELS = ("When nothing of a bucket is missing, call bucket.gather(), divide bucket.flat, and "
           "all-reduce bucket.flat itself, all of it. The hook gets the parameter, not its "
           "gradient.")
UNUSED = ("bucket.fill_none(used) after the waits, with used = self.used_anywhere(): what another "
          "rank used gets the mean, what no rank used stays None.")
PIECES = ("Look at self.sync first in the hook: when it is False, do nothing, and leave "
          "bucket.missing as it is.")
GROUP = "Pass self.group on to every collective; divide by dist.get_world_size(self.group)."
ORDER = ("All ranks send bucket 0, then 1, then 2. So loop in the hook: while the first bucket of "
         "self.waiting misses nothing, launch it. A bucket that was ready early leaves right "
         "behind the one that it had to wait for.")
ALL_CALL = ("All ranks call the same all-reduces: one for each bucket. So finish() launches all "
            "that is left, whatever is missing in it, and waits for all, before it raises.")
FAILURES = {
    "ValueError: .* got two gradients in one backward.*": "bucket.missing must be full again when "
    "the next backward begins: finish() sets it back to all of bucket.parameters. Keep "
    "self.backward_begins() as the first line of the hook: it makes sure that finish() is called.",
    "AttributeError: 'NoneType' object has no attribute 'wait'": "all_reduce returns None without "
    "async_op=True; with it, a handle to wait for.",
    "ValueError: .* got no gradient on rank .*": "Raise only for what got no gradient in this "
    "backward, and only where self.find_unused_parameters is False.",
    LEFT: ALL_CALL, MISMATCH: ALL_CALL, ".* is still this rank's own": TRAVELS,
}


class Layers(nn.Module):
    """Three layers; each call says which of them it uses, in which order."""

    def __init__(self, call=lambda layer, x: layer(x), output=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.call, self.output, self.events = call, output, []
        for layer in self.layers:
            layer.register_full_backward_pre_hook(lambda *_: self.events.append("layer"))

    def forward(self, x, order):
        for number in order:
            x = torch.tanh(self.call(self.layers[number], x))
        return self.output(x)


CHECKPOINTS = partial(Layers, partial(checkpoint, use_reentrant=True))
HIDDEN = partial(Layers, output=lambda x: SimpleNamespace(square=x.square))
ALL = (0, 1, 2)
EVEN = (ALL,), (ALL,)
CASES = {  # the model; in each turn, what each rank of a group uses; find_unused_parameters
    "tied, used twice, two types": (partial(toy, 0), EVEN, False),
    "an output in an object": (HIDDEN, EVEN, False),
    "ranks with different orders": (Layers, ((ALL, ALL[::-1]), (ALL[::-1], ALL)), False),
    "layers in checkpoints with use_reentrant=True": (CHECKPOINTS, EVEN, False),
    "three layers": (Layers, EVEN, False),
    "three layers, find_unused_parameters=True": (Layers, EVEN, True),
    "layers that only some ranks use, or none": (
        Layers, (((0,), (0, 1), (1,), (0, 1)), ((1, 2), ALL, ALL, ALL)), True),
}


def _trial(wrapped_class, ranks):
    for name, case in CASES.items():
        yield from _backwards(f"{ranks}, {name}", wrapped_class, ranks, *case)
    wrapped = wrapped_class(toy(0), bucket_cap_bytes=200, group=ranks.group)
    yield from in_pieces(f"{ranks}, with sync=False", ranks, wrapped, no_sync, lambda name: PIECES)
    yield from _errors(str(ranks), wrapped_class, ranks)


def _backwards(where, wrapped_class, ranks, new, orders, finds):
    """Looks at two backwards beside one process: the gradients, and what happened when."""
    model, looks = new().to(device()), []
    wrapped = wrapped_class(model, bucket_cap_bytes=LAYER_BYTES, group=ranks.group,
                            find_unused_parameters=finds)
    all_used = all(len(order) == len(ALL) for turn in orders for order in turn)

    def inputs(turn, index):
        x = rows(10 * turn + ranks.members[index]).requires_grad_()
        return x, orders[turn][index % len(orders[turn])]

    def call(turn):
        model.zero_grad(set_to_none=finds or turn == 0)
        loss = loss_of(wrapped, *inputs(turn, ranks.index))
        looks.extend(_watched(where, wrapped, loss, orders is EVEN, all_used, finds))
        return gradients(model)

    def mean(turn, indices):
        return mean_gradients(new().to(device()), [inputs(turn, index) for index in indices])

    looks += beside(where, ranks, call, lambda turn: {
        name: [each] * ranks.size for name, each in mean(turn, range(ranks.size)).items()},
        own=lambda turn: mean(turn, [ranks.index]),
        advice=lambda name: TRAVELS if all_used else UNUSED)
    yield from looks


def _events(wrapped, loss):
    """What happens in the backward of `loss`, in order: "layer" when the backward of a layer
    begins, the number of a bucket that leaves (-1: another tensor), "blocking", "asked" for
    used_anywhere(), "wait" and "finish"; and what is Sent.
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
    return events, sent


def _watched(where, wrapped, loss, is_even, all_used, finds):
    """The backward of `loss` is done; looks at what happened in it."""
    (events, sent), buckets = _events(wrapped, loss), len(wrapped.buckets)
    finish = events.index("finish") if "finish" in events else len(events)
    last_layer = max((n for n, event in enumerate(events) if event == "layer"), default=0)
    left, early, late = ([event for event in part if isinstance(event, int)]
                         for part in (events, events[:last_layer], events[finish:]))
    ready = buckets - 1 if last_layer and is_even else 0
    for is_so, what, hint in (
        (wrapped.waiting is not wrapped.buckets, "after backward self.waiting is self.buckets "
         "itself", "self.waiting must be a copy: list(self.buckets)."),
        ("blocking" not in events, "backward stands still in an all-reduce", "Without "
         "async_op=True, all_reduce returns only when it is done. With it, all_reduce returns at "
         "once, and gives you a handle to wait for."),
        (-1 not in left, "something other than bucket.flat travels", TRAVELS),
        (left == [*range(buckets)], f"of {buckets} buckets there leave, in this order, {left}",
         ORDER),
        (events.count("asked") <= finds, f"{events.count('asked')} calls of used_anywhere() with "
         f"find_unused_parameters={finds}", "used_anywhere() sends a message, and answers for all "
         "parameters: call it once, and only with find_unused_parameters."),
        ("wait" not in events[:finish], "it waits while layers are still to be computed",
         "No overlap: keep the handles, and wait for them in finish()."),
        (not all_used or not late, f"{len(late)} of {buckets} buckets leave in finish(), though "
         "all gradients were there before", ORDER),
        (len(early) >= ready, f"{len(early)} of {buckets} buckets left before the last layer's "
         f"backward; {ready} were ready", "A bucket is ready when nothing of it is missing: launch "
                                          "it then."),
    ):
        yield partial(expect, is_so, f"{where}: {what}", hint)
    yield partial(sent.all_ended, where)
    yield partial(expect, _is_as_before(wrapped), f"{where}: after backward not all is as before "
                  "it", "finish() must leave self.works empty, or it grows; and self.waiting and "
                  "each bucket.missing full again.")


def _is_as_before(wrapped):
    return (not wrapped.works and list(wrapped.waiting) == wrapped.buckets
            and all(bucket.missing == set(bucket.parameters) for bucket in wrapped.buckets))


def _errors(where, wrapped_class, ranks):
    """Looks at what is said of two gradients of a layer, and of one that the second rank lacks."""
    new = partial(wrapped_class, bucket_cap_bytes=LAYER_BYTES, group=ranks.group)
    x, is_second = rows(0).requires_grad_(), ranks.index == 1
    said = refusal(loss_of(new(CHECKPOINTS().to(device())), x, (*ALL, 0)).backward)
    yield partial(expect, "two gradients" in said, f"{where}: a layer in two checkpoints gets two "
                  "gradients in one backward, and no error comes", "Its bucket may be on its way "
                  "when the second gradient is added. Keep the line `raise "
                  "self.second_gradient(parameter)`.")
    wrapped = new(Layers().to(device()))
    loss_of(wrapped, x, ALL).backward()  # from here on no gradient is None
    said = refusal(loss_of(wrapped, x, (0, 1) if is_second else ALL).backward)
    yield partial(expect, is_second == ("layers.2.weight" in said) == (said != NO_ERROR), f"{where}"
                  f": the second rank alone has no gradient for layer 2 now, and this rank says: "
                  f"{said}", "`missing` is what this rank lacks in this backward: raise "
                  "self.no_gradient(missing) last.")
    yield partial(expect, _is_as_before(wrapped), f"{where}: not ready for another backward after "
                  "that error", "Raise at the very end, when everything is as it was at the "
                                "beginning.")


def check_OverlappedDataParallel(wrapped_class):
    on_groups(_trial, wrapped_class, failures=FAILURES, at_once=True, group_hint=GROUP,
              timeout=LIMIT)
    yield "gradients are the mean over ranks, on 1 to 4 ranks, in groups; frozen ones stay None"
    yield "right for tied and reused layers, two types, checkpoints; whatever zero_grad leaves"
    yield ("one all-reduce for each bucket, in their order, while backward goes on; then it waits "
           "for all of them")
    yield "with sync=False nothing is sent, and the next backward averages what has added up"
    yield "find_unused_parameters: no gradient counts as zeros; unused everywhere stays None"
    yield "two gradients of one parameter, or none, are an error in that backward; nobody hangs"
