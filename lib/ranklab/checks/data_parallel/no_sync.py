"""The check of no_sync, on the library's OverlappedDataParallel."""

from functools import partial

import torch.distributed as dist

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.data_parallel.toys import gradients, loss_of, mean_gradients, rows, toy
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.meter import Traffic

BLOCKS, LAST = ((0, 1), (2,)), 3  # pieces in two blocks of no_sync, and the piece after them
INSIDE, AFTER = "the number of all-reduces inside", "the number of all-reduces after the block"
SUMS = ("Leave the gradients alone, on entering and on leaving: autograd adds them up, also over "
        "several blocks.")
ADVICE = {INSIDE: "no_sync itself sends nothing: the next backward averages what has added up.",
          AFTER: "Switch `sync` back on after the yield: the next backward sends each bucket once."}
FAILURES = {"TypeError: .* does not support the context manager protocol.*":
            "`with` needs a context manager: put @contextlib.contextmanager above the function, "
            "and a `yield` where the block runs."}


def in_pieces(where, ranks, wrapped, no_sync, advice):
    """Looks at steps in pieces, beside one process: what is sent, and the gradients in between.

    advice  name -> hint
    """
    model = wrapped.module

    def pieces(turn, rank):
        return [(rows(100 * turn + 10 * rank + piece),) for piece in range(LAST + 1)]

    def call(turn):
        model.zero_grad()
        mine = pieces(turn, dist.get_rank())
        with Traffic() as inside:
            for block in BLOCKS:
                with no_sync(wrapped):
                    for piece in block:
                        loss_of(wrapped, *mine[piece]).backward()
        seen = {f"inside, {name}": gradient for name, gradient in gradients(model).items()}
        with Traffic() as after:
            loss_of(wrapped, *mine[LAST]).backward()
        return seen | gradients(model) | {INSIDE: inside.calls["all_reduce"],
                                          AFTER: after.calls["all_reduce"]}

    def right(turn):
        of_ranks = [pieces(turn, rank) for rank in ranks.members]
        inside = [mean_gradients(model, of_rank[:LAST], 1) for of_rank in of_ranks]
        mean = mean_gradients(model, sum(of_ranks, []), ranks.size)
        return {INSIDE: [0] * ranks.size, AFTER: [len(wrapped.buckets)] * ranks.size} | {
            f"inside, {name}": [each[name] for each in inside] for name in mean} | {
            name: [gradient] * ranks.size for name, gradient in mean.items()}

    yield from beside(where, ranks, call, right, advice=advice)


def _trial(no_sync, ranks):
    def new():
        return OverlappedDataParallel(toy(0), bucket_cap_bytes=200, group=ranks.group)

    outer, other = new(), new()
    with no_sync(other):
        inside = other.sync
    seen = [inside, other.sync]
    with no_sync(outer):
        with no_sync(outer):
            seen.append(outer.sync)
        seen.append(outer.sync)
        with no_sync(other):
            pass
        seen += [outer.sync, other.sync]
    seen.append(outer.sync)
    for is_so, what, hint in (
        (seen[0] is False, "inside the block `sync` is on",
         "model.sync must be False while the block runs."),
        (seen[1] is True, "after the block `sync` stays off", "Switch `sync` back on after the "
         "yield."),
        (seen[2] is False, "inside an inner no_sync `sync` is on again", "model.sync = False on "
         "entering, whatever it was before."),
        (seen[3] is False, "after an inner no_sync the outer one is over too", "Put back what "
         "`sync` was before, which need not be True."),
        (seen[4:6] == [False, True], "after a block of another model `sync` is "
         f"{seen[4]} (outer) and {seen[5]} (the other)", "Each model has its own: keep what was "
         "before in a variable of this call."),
        (seen[6] is True, "after an inner and an outer no_sync `sync` stays off", "Each no_sync "
         "keeps what it found in a variable of its own, which the inner one can't overwrite."),
    ):
        yield partial(expect, is_so, what, hint)
    for error in KeyError, KeyboardInterrupt:
        after = _after(error, no_sync, new())
        yield partial(expect, after != "swallowed", "an error raised inside disappears", "Leave "
                      "errors alone: try and finally, no except.")
        yield partial(expect, after, f"after a {error.__name__} inside, `sync` is still False",
                      "What follows `yield` is skipped when the block fails: put it into a "
                      "`finally`. (An interrupt is no Exception.)")
    yield from in_pieces(str(ranks), ranks, new(), no_sync, lambda name: ADVICE.get(name, SUMS))


def _after(error, no_sync, wrapped):
    """What `sync` is after a step that failed with this error; or "swallowed"."""
    try:
        with no_sync(wrapped):
            raise error("a step that fails")
    except error:
        return wrapped.sync
    return "swallowed"


def check_no_sync(no_sync):
    on_groups(_trial, no_sync, failures=FAILURES)
    yield "inside, nothing is sent, and gradients add up on their own rank"
    yield "the next backward outside averages the sums, once, on 1 to 4 ranks"
    yield "one inside another changes nothing, of the same model or of another one"
    yield "it ends also when the step inside fails"
