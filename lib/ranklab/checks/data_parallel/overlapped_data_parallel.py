"""The check of OverlappedDataParallel: right in every kind of backward, and sent in time."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab.checks.data_parallel.no_sync import AFTER, INSIDE, pieces
from ranklab.checks.data_parallel.sent import OUTSIDE, Sent
from ranklab.checks.data_parallel.toys import gradients, loss_of, rows, toy
from ranklab.checks.prover import ALL as ALL_RANKS
from ranklab.checks.prover import GROUPS, AtMost, Must, Proof, Slip, Stage, Told
from ranklab.checks.trial import NO_ERROR, gathered, refusal
from ranklab.data_parallel import OverlappedDataParallel, no_sync
from ranklab.engine import device

LIMIT = 8  # seconds: several of the usual mistakes leave ranks waiting
LAYER_BYTES = 4 * (6 * 6 + 6)  # each layer is a bucket


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
BACKWARDS = {  # the model; in each turn, what each rank of a group uses; find_unused_parameters
    "tied, used twice, two types": (partial(toy, 0), EVEN, False),
    "three layers": (Layers, EVEN, False),
    "three layers, find_unused_parameters=True": (Layers, EVEN, True),
    "an output in an object": (HIDDEN, EVEN, False),
    "layers in the opposite order": (Layers, ((ALL[::-1],), (ALL[::-1],)), False),
    "ranks with different orders": (Layers, ((ALL, ALL[::-1]), (ALL[::-1], ALL)), False),
    "layers in checkpoints with use_reentrant=True": (CHECKPOINTS, EVEN, False),
    "layers that only some ranks use, or none": (
        Layers, (((0,), (0, 1), (1,), (0, 1)), ((1, 2), ALL, ALL, ALL)), True),
}
PIECES, TWICE, LACKING = ("with sync=False", "a layer in two checkpoints",
                          "a layer without gradient on the second rank")

# --- what is seen ---------------------------------------------------------------------------------

IS_COPY = "`self.waiting is self.buckets` after backward"
BLOCKING, ELSE, ORDER = ("all-reduces that block backward", "tensors that travel and are "
                         "not bucket.flat", "the order in which buckets leave")
ASKED, WAITS = "calls of used_anywhere()", "waits while layers are still to be computed"
LATE, AFTER_ALL = ("buckets that leave in finish(), though all gradients were there before",
                   "buckets that leave only in the backward of the last layer, or later")
WORKS, WAITING, MISSING = ("the length of self.works after backward", "the order of self.waiting "
                           "after backward", "the lengths of bucket.missing after backward")
TIMES = (IS_COPY, BLOCKING, ELSE, ORDER, ASKED, WAITS, LATE, AFTER_ALL, OUTSIDE, WORKS, WAITING,
         MISSING)


def _see(fn, case, ranks):
    new = partial(fn, bucket_cap_bytes=LAYER_BYTES, group=ranks.group)
    if case in BACKWARDS:
        yield from _backwards(new, ranks, *BACKWARDS[case])
    elif case == PIECES:
        yield from pieces(ranks, new(toy(0), bucket_cap_bytes=200), no_sync)
    else:
        yield from _errors(new, case, ranks)


def _backwards(new, ranks, make, orders, finds):
    """Two backwards: the gradients, and what happened when."""
    model, alone = make().to(device()), make().to(device())
    wrapped = new(model, find_unused_parameters=finds)
    for turn in (0, 1):
        x = rows(10 * turn + ranks.members[ranks.index]).requires_grad_()
        order = orders[turn][ranks.index % len(orders[turn])]
        alone.zero_grad()
        loss_of(alone, x, order).backward()
        own = gradients(alone)
        model.zero_grad(set_to_none=finds or turn == 0)
        events, sent = _events(wrapped, loss_of(wrapped, x, order))
        all_used = all(len(each) == len(ALL) for each in orders[turn])
        times = _times(wrapped, events, orders is EVEN, all_used, finds)
        yield sent.ended(ranks) | times | {
            name: Told(gradient, partial(_as_own, own[name]))
            for name, gradient in gradients(model).items()}


def _as_own(own, got, due):
    return "still this rank's own" * (
        got is not None and own is not None and torch.equal(got, own.cpu()))


def _events(wrapped, loss):
    """Return what happens in the backward of `loss`, in order: "layer" when the backward of a layer
    begins, the number of a bucket that leaves (-1: another tensor), "blocking", "asked" for
    used_anywhere(), "wait" and "finish"; and what is Sent.
    """
    flats, events = [bucket.flat.data_ptr() for bucket in wrapped.buckets], []
    wrapped.module.events, finish = events, wrapped.finish

    def leaves(tensor, work):
        number = flats.index(tensor.data_ptr()) if tensor.data_ptr() in flats else -1
        is_usage = tensor.dtype == torch.int32
        events.append("asked" if is_usage else "blocking" if work is None else number)

    def finishes():
        events.append("finish")
        finish()

    wrapped.finish = finishes
    with Sent(note=leaves, waited=lambda: events.append("wait")) as sent:
        loss.backward()
    wrapped.finish = finish
    return events, sent


def _times(wrapped, events, is_even, all_used, finds):
    buckets = len(wrapped.buckets)
    finish = events.index("finish") if "finish" in events else len(events)
    last_layer = max((n for n, event in enumerate(events) if event == "layer"), default=0)
    order, early, late = ([event for event in part if isinstance(event, int)]
                          for part in (events, events[:last_layer], events[finish:]))
    ready = buckets - 1 if last_layer and is_even else 0
    return {
        IS_COPY: Must(wrapped.waiting is wrapped.buckets, False),
        BLOCKING: AtMost(events.count("blocking"), 0),
        ELSE: AtMost(order.count(-1), 0),
        ORDER: Must([number for number in order if number >= 0], [*range(buckets)]),
        ASKED: AtMost(events.count("asked"), int(finds)),
        WAITS: AtMost(events[:finish].count("wait"), 0),
        LATE: AtMost(len(late), 0 if all_used else buckets),
        AFTER_ALL: AtMost(buckets - len(early), buckets - ready),
    } | _state(wrapped)


def _state(wrapped):
    """Return the state that backward must leave unchanged."""
    buckets = list(wrapped.buckets)
    numbers = [buckets.index(bucket) for bucket in wrapped.waiting]
    return {WORKS: Must(len(wrapped.works), 0),
            WAITING: Must(numbers, [*range(len(buckets))]),
            MISSING: Must([len({*bucket.missing}) for bucket in buckets],
                          [len(bucket.parameters) for bucket in buckets])}


def _errors(new, case, ranks):
    """Return the errors for two gradients of a layer, and for one that the second rank lacks."""
    x, is_second = rows(0).requires_grad_(), ranks.index == 1
    if case == TWICE:
        backward = loss_of(new(CHECKPOINTS().to(device())), x, (*ALL, 0)).backward
        yield {"an error about two gradients": Must("two gradients" in refusal(backward), True)}
        return
    wrapped = new(Layers().to(device()))
    loss_of(wrapped, x, ALL).backward()  # from here on no gradient is None
    text = refusal(loss_of(wrapped, x, (0, 1) if is_second else ALL).backward)
    yield {"whether it raises a ValueError": Must(text != NO_ERROR, is_second),
           "whether that names the layer": Must("layers.2.weight" in text, is_second),
           } | _state(wrapped)


class OneProcess(nn.Module):
    """A backward over the batches of all ranks, on each rank: means without a message.

    pieces  the batches of the backwards that sent nothing
    """

    buckets = waiting = works = ()
    sync = True

    def __init__(self, module, bucket_cap_bytes, group=None, find_unused_parameters=False):
        super().__init__()
        self.module, self.group, self.pieces = module, group, []

    def forward(self, x, *order):
        self.pieces.append((x.detach(), *order))
        if not self.sync:
            return self.module(x, *order)
        if self.pieces[1:]:
            self.module.zero_grad()  # all of them run once more
        of_ranks, number = gathered(self.pieces, self.group), len(self.pieces)
        outputs = [self.module(x.to(device()).requires_grad_(), *order)
                   for x, *order in sum(of_ranks, [])]
        self.pieces = []
        return SimpleNamespace(square=lambda: number * torch.cat([y.square() for y in outputs]))

    def finish(self):
        """Do nothing: nothing is in transit."""


# --- mistakes -------------------------------------------------------------------------------------

DIVIDE = "bucket.flat /= dist.get_world_size(bucket.group)"
ALL_REDUCE, ASYNC = "dist.all_reduce(bucket.flat", ", async_op=True"
KEEP = "self.works.append(self.reduce(bucket))"
READY = "while self.waiting and not self.waiting[0].missing:"
IN_HOOK = "            self.launch_ready_buckets()"  # the one in finish() is less indented
REFUSE = "if parameter not in bucket.missing:"
WAIT, NO_WAIT = "for work in self.works:", "for work in ():"
FULL = "bucket.missing = set(bucket.parameters)"
LAST = "if missing and not self.find_unused_parameters:"
OF_ALL = "for parameter in bucket.missing}"
MISSES = f"missing = {{parameter for bucket in self.waiting {OF_ALL}"
CLEAR = "            bucket.missing.clear()\n"
FILL = "bucket.fill_none(used)"

OVERLAPPED = Proof(
    OverlappedDataParallel,
    Stage({"gradients are the mean over ranks, on 1 to 4 ranks, in groups; frozen ones stay None":
           (),
           "right for tied and reused layers, two types, checkpoints; whatever zero_grad leaves":
           (),
           "find_unused_parameters: a missing gradient counts as zeros; one missing on all ranks "
           "stays None": (),
           "one all-reduce for each bucket, in their order, while backward continues; then it "
           "waits for all of them": TIMES,
           "with sync=False nothing is sent, and the next backward averages what has added up":
           (INSIDE, AFTER),
           "two gradients of one parameter, or none, are an error in that backward; no rank hangs":
           ("an error about two gradients", "whether it raises a ValueError",
            "whether that names the layer")},
          _see, (*BACKWARDS, PIECES, TWICE, LACKING), (4,), (ALL_RANKS, *GROUPS),
          oracle=OneProcess, launch={"timeout": LIMIT}),
    mistakes=(
        # what travels
        Slip("That is the sum: divide bucket.flat by the number of ranks.", (DIVIDE, "pass")),
        Slip("bucket.flat is divided twice: divide it once, before it is sent.",
             (FULL, f"{FULL}\n            {DIVIDE}")),
        Slip("Call bucket.gather() before you divide and send: it moves the gradients into "
             "bucket.flat.", ("bucket.gather()", "pass")),
        Slip("The hook receives the parameter, not its gradient. All-reduce bucket.flat.",
             (ALL_REDUCE, "dist.all_reduce(bucket.parameters[0].data")),
        Slip("All-reduce bucket.flat itself, not a copy: the gradients are views of it.",
             (ALL_REDUCE, "dist.all_reduce(bucket.flat.clone()")),
        Slip("Divide bucket.flat in place, with /=: bucket.flat / R is a new tensor, while the "
             "gradients remain views of the old one, which is never averaged.",
             (DIVIDE, "pass", ALL_REDUCE, f"{ALL_REDUCE} / dist.get_world_size(bucket.group)"),
             (DIVIDE, DIVIDE.replace("/=", "= bucket.flat /"))),
        Slip("All-reduce bucket.flat as a whole, in one message, not each gradient separately.",
             (KEEP, KEEP.replace("append", "extend"), ALL_REDUCE, "[dist.all_reduce(view",
              "async_op=True)", "async_op=True) for view in bucket.views]"),
             (KEEP, KEEP.replace("append", "extend"), ALL_REDUCE, "[dist.all_reduce(p.grad",
              "async_op=True)", "async_op=True) for p in bucket.parameters]")),
        Slip("Pass self.group to every collective.",
             ("group=bucket.group, async_op", "async_op")),
        Slip("Divide by the number of ranks in the group: dist.get_world_size(self.group).",
             (DIVIDE, "bucket.flat /= dist.get_world_size()")),
        # when it leaves
        Slip("A bucket is ready when none of its gradients are missing, not when the first one "
             "arrives.", ("not self.waiting[0].missing",
                        "len(self.waiting[0].missing) < max(1, len(self.waiting[0].parameters))")),
        Slip("A bucket that was ready early leaves right after the one it had to wait for: loop "
             "while the first bucket in self.waiting has nothing missing.",
             (READY, "if self.waiting and not self.waiting[0].missing:")),
        Slip("All ranks must send bucket 0, then 1, then 2: only the first bucket in self.waiting "
             "may leave.",
             (READY, "for bucket in [each for each in self.waiting if not each.missing]:",
              "bucket = self.waiting.pop(0)", "self.waiting.remove(bucket)")),
        Slip("In the hook, check whether a bucket is ready, and launch it then: "
             "self.launch_ready_buckets().", (IN_HOOK, "")),
        Slip("Even with find_unused_parameters, a bucket leaves as soon as it is ready.",
             (IN_HOOK, f"            if not self.find_unused_parameters:\n    {IN_HOOK}")),
        Slip("Without async_op=True, all_reduce blocks until it is done and returns no handle. "
             "With it, all_reduce returns at once and gives you a handle to wait for.",
             (ASYNC, "", WAIT, NO_WAIT)),
        Slip("reduce() returned None, but finish() needs a handle: all_reduce gives you one with "
             "async_op=True, and reduce() must return it.",
             (ASYNC, ""), ("return dist.all_reduce(", "dist.all_reduce(")),
        Slip("Waiting here prevents overlap: keep the handles, and wait for them in finish().",
             (KEEP, f"{KEEP}\n            self.works[-1].wait()")),
        Slip("Until wait() returns, the message is still being read and written: divide before you "
             "send it.",
             (DIVIDE, "pass", KEEP, f"{KEEP}\n            {DIVIDE}")),
        # the hook
        Slip("These parameters do have gradients: cross each one off in the hook, with "
             "bucket.missing.remove(parameter), and compute `missing` at the beginning of "
             "finish(), before bucket.missing is refilled.",
             ("            bucket.missing.remove(parameter)\n", ""),
             (LAST, f"{MISSES}\n        {LAST}")),
        Slip("Check self.sync first in the hook: when it is False, send nothing.",
             ("if self.sync:", "before, self.sync = self.sync, True\n        if True:", IN_HOOK,
              f"{IN_HOOK}\n            self.sync = before")),
        Slip("When self.sync is False, leave bucket.missing as it is: only a backward that sends "
             "crosses parameters off.", ("if self.sync:", "bucket.missing.discard(parameter)\n"
                              "        if self.sync:", REFUSE, "if False:", "missing.remove(",
                              "missing.discard(")),
        Slip("The bucket may already be in flight when a second gradient is added. Keep the line "
             "`raise self.second_gradient(parameter)`.",
             (REFUSE, "if False:", "missing.remove(", "missing.discard(")),
        Slip("Keep self.backward_begins() as the first line under `if self.sync:`. It makes sure "
             "that finish() is called.", ("self.backward_begins()", "pass")),
        # the end of a backward
        Slip("Until its wait() returns, a message may be only half done: wait for every handle.",
             (WAIT, NO_WAIT), (WAIT, "for work in self.works[-1:]:")),
        Slip("First launch all remaining buckets, then wait for every handle.",
             (WAIT, NO_WAIT, "missing = {",
              "for work in self.works:\n            work.wait()\n        missing = {")),
        Slip("Other ranks wait for the buckets left here: clear bucket.missing for each bucket in "
             "self.waiting, and launch them.",
             (CLEAR, "            pass\n"),
             ("        self.launch_ready_buckets()\n        used", "        used")),
        Slip("bucket.missing must be full again when the next backward begins: in finish(), reset "
             "it to all of bucket.parameters.", (FULL, "pass")),
        Slip("finish() must leave self.works empty; otherwise it keeps growing.",
             (WAIT, f"works = self.works\n        {WAIT}", LAST,
              f"self.works = works\n        {LAST}")),
        Slip("self.waiting must be full again after finish(): list(self.buckets).",
             (LAST, f"self.waiting = []\n        {LAST}")),
        Slip("self.waiting must be a copy: list(self.buckets). Otherwise pop() removes buckets "
             "from self.buckets.", (LAST, f"self.waiting = self.buckets\n        {LAST}")),
        # parameters without a gradient
        Slip("used_anywhere() sends a message: call it only with find_unused_parameters.",
             ("if self.find_unused_parameters else ()", "")),
        Slip("used_anywhere() covers all parameters: call it only once.",
             ("used = self.used_anywhere()",
              "used = [self.used_anywhere() for _ in self.buckets][0]")),
        Slip("The gradient of a parameter that no rank used stays None: bucket.fill_none(used), "
             "with used = self.used_anywhere().",
             ("fill_none(used)", "fill_none(set(bucket.parameters))")),
        Slip("A parameter that another rank used gets the mean: call bucket.fill_none(used) after "
             "the waits.",
             (FILL, "pass")),
        Slip("With find_unused_parameters, a missing gradient is not an error.",
             (LAST, "if missing:")),
        Slip("`missing` is what got no gradient in this backward, even if an old gradient is still "
             "there.", (OF_ALL, "for parameter in bucket.parameters if parameter.grad is None}")),
        Slip("Other ranks wait for this rank's buckets: even without find_unused_parameters, send "
             "all that are left, then raise.",
             (CLEAR, f"            if self.find_unused_parameters:\n    {CLEAR}"),
             (OF_ALL, f"{OF_ALL}\n        {LAST}\n            raise self.no_gradient(missing)")),
        Slip("Raise at the very end, after all state has been reset.",
             (FILL, f"{LAST}\n                raise self.no_gradient(missing)\n"
              f"            {FILL}")),
    ), hints=(
        "The hook crosses its parameter off bucket.missing. When is a bucket allowed to leave?",
        "When nothing in it is missing and all buckets before it have left: self.waiting holds "
        "those that have not, in order. In finish(), clear bucket.missing for every bucket in "
        "self.waiting and launch them; with find_unused_parameters, set used = "
        "self.used_anywhere(); wait for every handle; for each bucket, call fill_none(used) and "
        "set missing = set(its parameters); reset waiting and works as in __init__.",
        "In the hook: bucket.missing.remove(parameter); self.launch_ready_buckets(). There: while "
        "self.waiting and not self.waiting[0].missing: bucket = self.waiting.pop(0); "
        "bucket.gather(); bucket.flat /= R; self.works.append(dist.all_reduce(bucket.flat, "
        "group=self.group, async_op=True))",
    ))
