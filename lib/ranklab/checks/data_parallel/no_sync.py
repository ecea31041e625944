"""The check of no_sync, on the library's OverlappedDataParallel."""

import torch.distributed as dist

from ranklab.checks.data_parallel.toys import gradients, loss_of, mean_gradients, off, rows, toy
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import on_ranks, rank_name
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.meter import Traffic

PIECES = ((0, 1), (2,))  # two blocks one after the other, the first with two backwards
LAST = 3  # the piece outside
NO_MANAGER = ("`with` needs a context manager: put @contextlib.contextmanager above the function, "
              "and a `yield` where the block runs.")


def in_pieces(wrapped, no_sync):
    """What is sent inside and after blocks of no_sync, the gradients then, and the right ones."""
    model, rank, R, seen = wrapped.module, dist.get_rank(), dist.get_world_size(), {}
    mine = [[(rows(10 * r + piece),) for piece in range(LAST + 1)] for r in range(R)]
    seen["right local"] = mean_gradients(model, mine[rank][:LAST], 1)
    seen["right mean"] = mean_gradients(model, sum(mine, []), R)
    model.zero_grad()
    with Traffic() as traffic:
        for pieces in PIECES:
            with no_sync(wrapped):
                for piece in pieces:
                    loss_of(wrapped, *mine[rank][piece]).backward()
                inside = wrapped.sync
    seen["inside"], seen["local"] = traffic.calls["all_reduce"], gradients(model)
    seen["sync"] = inside, wrapped.sync
    with Traffic() as traffic:
        loss_of(wrapped, *mine[rank][LAST]).backward()
    seen["after"], seen["mean"] = traffic.calls["all_reduce"], gradients(model)
    seen["buckets"] = len(wrapped.buckets)
    return seen


def _no_sync_trial(no_sync):
    wrapped = OverlappedDataParallel(toy(0), bucket_cap_bytes=200)
    seen = in_pieces(wrapped, no_sync)
    with no_sync(wrapped):
        with no_sync(wrapped):
            seen["inner"] = wrapped.sync
        seen["nested"] = wrapped.sync
    other, seen["over"] = OverlappedDataParallel(toy(0), bucket_cap_bytes=200), wrapped.sync
    with no_sync(wrapped):
        with no_sync(other):
            pass
        seen["other"] = wrapped.sync, other.sync
    seen["failed"] = [_after(error, no_sync, wrapped) for error in (KeyError, KeyboardInterrupt)]
    return seen


def _after(error, no_sync, wrapped):
    """What `sync` is after a step that failed with this error; or "swallowed"."""
    wrapped.sync = True
    try:
        with no_sync(wrapped):
            raise error("a step that fails")
    except error:
        return wrapped.sync
    return "swallowed"


def check_no_sync(no_sync):
    for ranks in (1, 3):
        with hinted({"TypeError: .* does not support the context manager protocol.*": NO_MANAGER}):
            seen = on_ranks(_no_sync_trial, no_sync, ranks=ranks)
        for rank, one in enumerate(seen):
            _compare_no_sync(one, rank_name(rank, ranks))
    yield "inside, nothing is sent, and gradients add up on their own rank"
    yield "the next backward outside averages the sums, once, on 1 and 3 ranks"
    if one["inner"] is not False:
        raise Mistake("inside an inner no_sync `sync` is on again", "model.sync = False on "
                      "entering, whatever it was before.")
    if one["nested"] is not False:
        raise Mistake("after an inner no_sync the outer one is over too", "Put back what `sync` "
                      "was before, which need not be True.")
    if one["over"] is not True:
        raise Mistake("after an inner and an outer no_sync `sync` stays off", "Each no_sync keeps "
                      "what it found in a variable of its own, which the inner one can't "
                      "overwrite: not on the model, nor in a global name.")
    if one["other"] != (False, True):
        raise Mistake("two models, the no_sync of one inside that of the other: after the inner "
                      f"block their `sync` is {one['other'][0]} (outer) and {one['other'][1]}",
                      "Each model has its own: keep what was before in a variable of this call.")
    yield "one inside another changes nothing, of the same model or of another one"
    if "swallowed" in one["failed"]:
        raise Mistake("an error raised inside disappears", "Leave errors alone: try and finally, "
                      "no except.")
    if one["failed"] != [True, True]:
        raise Mistake("after an error or an interrupt inside, `sync` is still False: nothing is "
                      "averaged any more", "What follows `yield` is skipped when the block fails: "
                      "put it into a `finally`. (An interrupt is no Exception.)")
    yield "it ends also when the step inside fails"


def _compare_no_sync(one, where):
    if one["inside"]:
        hint = "model.sync must be False while the block runs: the hooks look at it."
        if one["sync"][0] is False:
            hint = "no_sync itself sends nothing: the next backward averages what has added up."
        raise Mistake(f"{where}: {one['inside']} all-reduces inside", hint)
    for name in off(one["local"], one["right local"]):
        raise Mistake(f"{where}: inside, the gradient of `{name}` is not the sum of its backwards",
                      "Leave the gradients alone, on entering and on leaving: autograd adds them "
                      "up. Pieces may stand in several blocks.")
    if one["sync"][1] is not True or not one["after"]:
        raise Mistake(f"{where}: after the block nothing is sent either",
                      "Switch `sync` back on after the yield.")
    if one["after"] != one["buckets"]:
        raise Mistake(f"{where}: {one['after']} all-reduces after the block, for {one['buckets']} "
                      "buckets", "The next backward sends each bucket once; no_sync sends nothing.")
    for name in off(one["mean"], one["right mean"]):
        raise Mistake(f"{where}: after the block the gradient of `{name}` is not the mean of the "
                      "ranks' sums", "Leave the gradients alone: the next backward adds its own to "
                      "what is there, and averages the whole.")
