"""The order of events in one backward: layers that compute, messages that leave, waits."""

import functools
import math

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.toys import (
    LAYER_BYTES, Layers, gradients, loss_of, mean_gradients, off, rows, toy,
)
from ranklab.checks.exercise import Mistake
from ranklab.checks.handles import HeldWork
from ranklab.engine import device


class Sent:
    """Inside `with`, notes the tensors of every dist.<verb>, and a HeldWork for those under way.

    note    is called with each tensor and its HeldWork, or None
    waited  is called with a number, in the order of sending, when somebody waits for that one
    """

    def __init__(self, verb="all_reduce", note=lambda *_: None, waited=lambda number: None):
        self.verb, self.note, self.waited, self.tensors, self.handles = verb, note, waited, [], []

    def __enter__(self):
        self.collective = getattr(dist, self.verb)
        setattr(dist, self.verb, self._call)
        return self

    def __exit__(self, *_):
        setattr(dist, self.verb, self.collective)

    def _call(self, tensor, *args, **kwargs):
        held, waited = None, functools.partial(self.waited, len(self.tensors))
        if kwargs.get("async_op", args[2] if len(args) > 2 else False):
            result = tensor.detach().clone()  # keeps the strides
            held = HeldWork(self.collective(result, *args, **kwargs), tensor, result, waited)
            self.handles.append(held)
        else:
            self.collective(tensor, *args, **kwargs)
        self.tensors.append(tensor)
        self.note(tensor, held)
        return held

    @property
    def ends(self):
        """Handles that nobody waited for, all handles, and what was divided while under way."""
        return (sum(not work.is_here for work in self.handles), len(self.handles),
                sum(work.is_divided for work in self.handles))


def all_ended(where, verb, not_waited, handles, divided):
    """A Mistake where a function returned before its messages had arrived, or wrote into one."""
    if not_waited:
        raise Mistake(f"{where}: nobody has waited for {not_waited} of its {handles} {verb}s",
                      f"With async_op=True the {verb} has only begun when it returns. Keep every "
                      "handle and wait() for each, not for the last alone; or leave async_op out.")
    if divided:
        raise Mistake(f"{where}: {divided} gradients were divided while they travelled",
                      "Until wait() returns the message is being read and written. Divide before "
                      f"the {verb}, or after the wait().")


def all_sent_once(where, sent, calls, tensors, what, verb, hint, most=math.inf):
    """A Mistake unless all `tensors` travelled once, by `verb`, in `most` calls or fewer."""
    wanted, tied = sum(tensor.nbytes for tensor in tensors), toy(0).first.weight.nbytes
    if sent == wanted and set(calls) <= {verb} and calls.get(verb, 0) <= most:
        return
    if sent < wanted:
        hint = f"Each {what} travels in its own type: in float32 a double loses digits."
    if sent == wanted + tied:
        hint = ("The tied weight travels twice: model.parameters() lists it once; state_dict(), "
                "named_parameters(remove_duplicate=False) and a walk over the modules do not.")
    raise Mistake(f"{where} puts {sent:,} bytes into {calls}; {wanted:,} bytes in {len(tensors)} "
                  f"calls of {verb} are enough", hint)


def events_of_a_backward(wrapped_class, find_unused_parameters=False):
    """Runs on every rank: (events, where the buckets lie in memory, in their order)."""
    events = []
    model = wrapped_class(Layers(range(4), events).to(device()), bucket_cap_bytes=LAYER_BYTES,
                          find_unused_parameters=find_unused_parameters)
    loss = loss_of(model, rows(0).requires_grad_())

    def note(tensor, work):
        if tensor.dtype != torch.int32:  # which is used_anywhere()
            events.append(("sent" if work else "blocking", tensor.data_ptr()))

    events.clear()
    with Sent(note=note, waited=lambda number: events.append(("wait", number))):
        loss.backward()
    return events, [bucket.flat.data_ptr() for bucket in model.buckets]


def compare_events(where, events, buckets):
    """Raises the Mistake that the order of events tells."""
    sent = [event for event in events if event[0] in ("sent", "blocking")]
    if len(sent) != len(buckets):
        raise Mistake(f"{where}{len(sent)} all-reduces in one backward, for {len(buckets)} buckets",
                      "One all-reduce for each bucket, of bucket.flat: not one for each parameter, "
                      "nor one at each call of the hook.")
    if any(event[0] == "blocking" for event in sent):
        raise Mistake(f"{where}backward stands still in each all-reduce: it is called without "
                      "async_op=True", "dist.all_reduce(..., async_op=True) returns at once, with "
                      "a handle to wait for in finish().")
    places = [buckets.index(pointer) if pointer in buckets else None for _, pointer in sent]
    if None in places:
        raise Mistake(f"{where}something else travels than bucket.flat", "After bucket.gather() "
                      "all its gradients lie in bucket.flat, as views: all-reduce that, in place.")
    if places != sorted(places):
        raise Mistake(f"{where}buckets leave in the order {places}",
                      "Bucket 0 first, then 1, then 2.")
    _compare_times(where, [event[0] for event in events], len(buckets))


def _compare_times(where, kinds, buckets):
    last_layer = max(place for place, kind in enumerate(kinds) if kind == "layer")
    if kinds.index("sent") > last_layer:
        raise Mistake(f"{where}no bucket leaves before the backward of all layers is over",
                      "Launch in the hook, as soon as a bucket has all its gradients, not in "
                      "finish(): bucket 0 can travel while layer 0 is still to come.")
    if "wait" in kinds[:last_layer]:
        raise Mistake(f"{where}it waits for an all-reduce while layers are still to be computed: "
                      "no overlap", "Keep the handles, and wait for them in finish().")
    early = kinds[:last_layer].count("sent")
    if early < buckets - 1:
        raise Mistake(f"{where}{early} of {buckets} buckets left before the last layer's backward; "
                      f"{buckets - 1} were ready", "A bucket is ready when nothing of it is "
                      "missing; launch all that are ready, and forget what you have launched.")


def events_and_order(wrapped_class):
    """Events with and without find_unused_parameters; then gradients where odd ranks use the layers
    in another order: (those of this rank, the right ones, how many buckets left in finish()).
    """
    both = [events_of_a_backward(wrapped_class, finds) for finds in (False, True)]
    rank, R, in_hooks = dist.get_rank(), dist.get_world_size(), []
    models = [Layers((0, 1) if r % 2 else (1, 0)).to(device()) for r in range(R)]
    alone = [mean_gradients(model, [(rows(r),)], R) for r, model in enumerate(models)]
    wrapped = wrapped_class(models[rank], bucket_cap_bytes=LAYER_BYTES)
    loss = loss_of(wrapped, rows(rank))
    with Sent(note=lambda *_: in_hooks.append(wrapped.in_backward)):  # False in finish()
        loss.backward()
    right = {name: sum(each[name] for each in alone) for name in alone[0]}
    return both, (gradients(models[rank]), right, in_hooks.count(False))


def compare_order(where, got, right, late):
    for name in off(got, right):
        raise Mistake(f"{where}: the ranks' gradients become ready in different orders, and then "
                      f"`{name}` gets another parameter's mean", "The first message of one rank "
                      "meets the first of the others. Launch bucket 0, then 1, then 2, on every "
                      "rank: one that is ready early waits for those before it.")
    if late:
        raise Mistake(f"{where}: {late} of 2 buckets left in finish(), though all gradients were "
                      "there before", "A bucket that was ready too early leaves right behind the "
                      "one that it has waited for: launch in a loop, while the first of "
                      "self.waiting misses nothing, whichever bucket this hook was for.")
