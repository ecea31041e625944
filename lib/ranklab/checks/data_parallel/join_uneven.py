"""The check of join_uneven, on the library's OverlappedDataParallel."""

from functools import cache, partial
from operator import length_hint

import torch
import torch.distributed as dist

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.data_parallel.toys import loss_of, rows, toy
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.meter import Traffic

IN_GROUP = ("Pass model.group on to every collective. Ranks count inside it: "
            "dist.get_rank(model.group).")
FAILURES = {
    r"TypeError: object of type '.*' has no len\(\)": "A loader may have no length: one small "
    "all-reduce in each step tells all ranks who goes on.",
    "RuntimeError: Boolean value of Tensor with .* is ambiguous": "A batch may be a tensor, or "
    "empty, and is a batch all the same: ask `batch is None`, not `if batch`.",
    "TypeError: cannot unpack non-iterable NoneType object": "A None was yielded where a batch was "
    "expected. A rank without a batch shadows the step, and yields nothing.",
    "TypeError: ('NoneType' object is not |cannot unpack non-)iterable.*": "It must be a "
    "generator: `yield` each batch of this rank.",
    "RuntimeError: generator raised StopIteration": "next(batches, None) gives None at the end.",
    r"\w+: .*root rank: -1.*": "-1 means that no rank goes on. Keep the last result before it: "
                               "that one is a rank.",
    r"\w+: .*root rank: \d+.*": IN_GROUP,
    "hang: .*(all_reduce|broadcast).*": "A rank without a batch must go on taking part, by shadow"
    f"(), until the result is -1: then nobody goes on. (0 is a rank.) {IN_GROUP}",
}
COUNTS = (0, 3, 1, 2), (2, 0, 1, 1)  # batches of each rank of a group, in each turn
AT_THE_END = ("At the end broadcast_parameters(model.module, src, model.group) gives every rank "
              "the whole state of a rank that took part in the last step.")
ADVICE = ("A rank without a batch adds zeros, by model.shadow(); the buffers of "
          "`model.buffers_from` count, which must be a rank that still steps.")


def _one_process(ranks, counts, steps):
    """The parameters after that many steps of these ranks."""
    model = toy(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank, count in zip(ranks.members, counts):
            if step < count:
                (loss_of(model, rows(10 * rank + step)) / ranks.size).backward()
        optimizer.step()
    return dict(model.named_parameters())


def _trial(join_uneven, ranks):
    noted, of_turns = [], [counts[:ranks.size] for counts in COUNTS]

    def call(turn):
        wrapped, got, inside, count = _wrapped(ranks), [], [], of_turns[turn][ranks.index]
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        # like a loader it has no length, and what is taken is gone
        batches = iter([(k, rows(10 * dist.get_rank() + k)) for k in range(count)])
        with Traffic() as traffic:
            for k, x in join_uneven(batches, wrapped):
                got.append(k)
                inside.append((wrapped.joining, count - length_hint(batches) - len(got)))
                optimizer.zero_grad()
                loss_of(wrapped, x).backward()
                optimizer.step()
        noted.append(partial(_look, ranks, wrapped, got, inside, traffic, of_turns[turn]))
        return wrapped.state_dict()

    @cache
    def after(turn, steps):
        return _one_process(ranks, of_turns[turn], steps)

    def right(turn):
        steps = max(of_turns[turn])
        found = after(turn, steps) | {"steps": toy(0).steps + steps}  # a buffer: counts forwards
        return {name: [tensor] * ranks.size for name, tensor in found.items()}

    def slips(name, turn):
        return {f"that of rank {member}, when its own batches were over":
                (after(turn, count).get(name), AT_THE_END)
                for member, count in zip(ranks.members, of_turns[turn])}

    looks = list(beside(f"{ranks}, with {of_turns[0]} and then {of_turns[1]} "
                        "batches", ranks, call, right, slips=slips,
                        advice=lambda name: ADVICE, through=torch.float32))
    yield from [*noted, *looks]
    wrapped = _wrapped(ranks)
    with Traffic() as traffic:
        for _ in join_uneven(iter([torch.zeros(2)]), wrapped):  # a batch may be a tensor
            break  # on all ranks: what a training loop does after its last step
    yield partial(_is_reset, "after a loop that was left by a break", wrapped)
    yield partial(expect, not traffic.calls["broadcast"], "after a break it still broadcasts the "
                  "model", "Broadcast before the `finally`: after an error the others would wait.")


def _wrapped(ranks):
    return OverlappedDataParallel(toy(0), bucket_cap_bytes=200, group=ranks.group)


def _look(ranks, wrapped, got, inside, traffic, counts):
    steps, count = max(counts), counts[ranks.index]
    sent = sum(op.payload_bytes for op in traffic.ops)
    state = sum(tensor.nbytes for tensor in wrapped.state_dict().values())
    enough = steps * (state + 8) + 8 + state  # gradients are no larger than parameters
    for is_so, what, hint in (
        (got == [*range(count)], f"it got batches {got} of {count}", "Yield each batch once. A "
         "rank that has none left must not repeat one, and no rank's batches are thrown away."),
        (sent <= enough, f"{sent:,} bytes go into collectives in {steps} steps; {enough:,} are "
         "enough", "In each step the gradients, the buffers and one number; the model's weights "
         "once, at the end."),
        (all(ahead <= 1 for _, ahead in inside), "it takes batches before they are asked for",
         "An epoch need not fit into memory: next(batches, None), once in each step."),
        (all(joining for joining, _ in inside), "inside the loop model.joining is not True", "Set "
         "it before the first step: no_sync inside the loop is then an error, not a hang."),
    ):
        expect(is_so, f"{ranks}: {what}", hint)
    _is_reset("after the loop", wrapped)


def _is_reset(when, wrapped):
    expect((wrapped.joining, wrapped.buffers_from) == (False, 0), f"{when} model.joining is "
           f"{wrapped.joining}, model.buffers_from is {wrapped.buffers_from}", "Set them back to "
           "False and 0 in a `finally`: without join_uneven rank 0's buffers count.")


def check_join_uneven(join_uneven):
    on_groups(_trial, join_uneven, failures=FAILURES, at_once=True, group_hint=IN_GROUP,
              timeout=6)  # seconds; the usual mistake waits for ever
    yield "every rank gets all its own batches, in order: 1, 2, 3, 4 ranks, some with none"
    yield "at the end all have the weights and buffers that one process has after all steps"
    yield ("each step sends one number more, and the end sends the model once; batches are taken "
           "one by one")
    yield "inside model.joining is True; afterwards all is as before, also after a break"
