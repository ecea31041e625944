"""The check of join_uneven, on the library's OverlappedDataParallel."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.data_parallel.toys import loss_of, rows
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.engine import device
from ranklab.meter import Traffic

IN_GROUP = ("Ranks count inside the group: dist.get_rank(model.group). Hand model.group on to "
            "every collective.")
FAILURES = {
    r"TypeError: object of type '.*' has no len\(\)": "A loader may have no length: one small "
    "all-reduce in each step tells all ranks who goes on.",
    "RuntimeError: Boolean value of Tensor with .* is ambiguous": "A batch may be a tensor, or "
    "empty, and is a batch all the same: ask `batch is None`, not `if batch`.",
    "TypeError: cannot unpack non-iterable NoneType object": "A None was yielded where a batch was "
    "expected. A rank without a batch shadows the step, and yields nothing.",
    "TypeError: ('NoneType' object is not |cannot unpack non-)iterable.*": "It must be a "
    "generator: `yield` each batch of this rank.",
    "RuntimeError: generator raised StopIteration": "next(batches, None) gives None when there is "
    "no batch left; next(batches) raises.",
    r"\w+: .*root rank: -1.*": "-1 says that nobody goes on. Keep the last result before it: "
    "broadcast from that rank.",
    r"\w+: .*root rank: \d+.*": IN_GROUP,
    "hang: .*(all_reduce|broadcast).*": "A rank without a batch must go on taking part, by "
    "model.shadow(), until nobody has one; model.buffers_from is the same on all ranks. (Rank 0 is "
    f"a rank: nobody is -1.) {IN_GROUP}",
}
LIMIT = 6  # seconds; the usual mistake waits for ever
COUNTS = (0, 3, 1, 2), (2, 0, 1, 1)  # batches of each rank of a group, in each turn
AT_THE_END = ("At the end broadcast_parameters(model.module, src, model.group) hands all the state "
              "of a rank that took part in the last step.")
ADVICE = ("A rank without a batch adds zeros, by model.shadow(); the buffers of "
          "`model.buffers_from` count, which must be a rank that still steps.")
BREAK = "after a loop that was left by a break"


class Normed(nn.Module):
    """With a buffer that each forward changes, and that the loss sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.layer(x) * self.seen


def _state(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _one_process(ranks, counts, steps):
    """The state after that many steps of these ranks."""
    model = Normed().to(device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank, count in zip(ranks.members, counts):
            model.seen.fill_(step)
            if step < count:
                (loss_of(model, rows(10 * rank + step)) / ranks.size).backward()
        optimizer.step()
    model.seen.fill_(steps)
    return _state(model)


def _trial(join_uneven, ranks):
    noted, rank = [], dist.get_rank()
    of_turns = [counts[:ranks.size] for counts in COUNTS]

    def call(turn):
        wrapped, got, taken, inside = _wrapped(ranks), [], [], []
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)

        def batches():  # a generator: like a loader it has no length, and what is taken is gone
            for k in range(of_turns[turn][ranks.index]):
                taken.append(k)
                yield k, rows(10 * rank + k)

        with Traffic() as traffic:
            for k, x in join_uneven(batches(), wrapped):
                got.append(k)
                inside.append((wrapped.joining, len(taken) - len(got)))
                optimizer.zero_grad()
                loss_of(wrapped, x).backward()
                optimizer.step()
        noted.append(partial(_look, ranks, wrapped, got, inside, traffic, of_turns[turn]))
        return _state(wrapped.module)

    def slips(name, turn):
        return {f"that of rank {member}, when its own batches were over":
                (_one_process(ranks, of_turns[turn], count)[name], AT_THE_END)
                for member, count in zip(ranks.members, of_turns[turn])}

    looks = list(beside(f"{ranks}, which have {of_turns} batches", ranks, call, lambda turn: {
        name: [tensor] * ranks.size for name, tensor in _one_process(
            ranks, of_turns[turn], max(of_turns[turn])).items()}, slips=slips,
        advice=lambda name: ADVICE))
    yield from noted
    yield from looks
    wrapped = _wrapped(ranks)
    with Traffic() as traffic:
        for _ in join_uneven(iter([torch.zeros(2)]), wrapped):  # a batch may be a tensor
            break  # on all ranks: what a training loop does after its last step
    yield partial(_is_reset, BREAK, wrapped, " in a `finally`")
    yield partial(expect, not traffic.calls["broadcast"], f"{BREAK} it still broadcasts the model",
                  "The broadcast stands before the `finally`: where a step failed on one rank the "
                  "others would wait there for ever.")


def _wrapped(ranks):
    return OverlappedDataParallel(Normed().to(device()), bucket_cap_bytes=1, group=ranks.group)


def _look(ranks, wrapped, got, inside, traffic, counts):
    steps, count = max(counts), counts[ranks.index]
    sent = sum(op.payload_bytes for op in traffic.ops)
    state = sum(tensor.nbytes for tensor in _state(wrapped.module).values())
    enough = steps * (state + 8) + 8 + state  # gradients are as large as parameters
    for is_so, what, hint in (
        (got == [*range(count)], f"it got batches {got} of {count}", "Yield each batch of this "
         "rank once. A rank without one shadows; it does not repeat a batch. Nobody's batches are "
         "thrown away."),
        (sent <= enough, f"{sent:,} bytes go into collectives in {steps} steps; {enough:,} are "
         "enough", "In each step the gradients, the buffer, and one number that says who goes on; "
         "the model's weights once, at the end."),
        (all(ahead <= 1 for _, ahead in inside), "it takes batches before they are asked for",
         "An epoch need not fit into memory: next(batches, None), once in each step."),
        (all(joining for joining, _ in inside), "inside the loop model.joining is not True", "Set "
         "it before the first step: no_sync inside the loop is then an error, not a hang."),
    ):
        expect(is_so, f"{ranks}: {what}", hint)
    _is_reset("after the loop", wrapped)


def _is_reset(when, wrapped, where=""):
    expect(not wrapped.joining, f"{when} model.joining is still True", f"Set it back{where}.")
    expect(not wrapped.buffers_from, f"{when} model.buffers_from is still {wrapped.buffers_from}",
           f"Set it back to 0{where}: without join_uneven rank 0's buffers count.")


def check_join_uneven(join_uneven):
    on_groups(_trial, join_uneven, failures=FAILURES, at_once=True, group_hint=IN_GROUP,
              timeout=LIMIT)
    yield "every rank gets all its own batches, in order: 1, 2, 3, 4 ranks, some with none"
    yield "at the end all have the weights that one process has after all steps"
    yield "and the buffers of a rank that went on to the last"
    yield "inside a group it meets nobody else"
    yield "one number more travels in a step, and the model once at the end; batches one by one"
    yield "inside model.joining is True; afterwards all is as before, also after a break"
