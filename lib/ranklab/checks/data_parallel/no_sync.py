"""The check of no_sync, on the library's OverlappedDataParallel, compared with torch's DDP."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ranklab.checks.data_parallel.sent import Sent
from ranklab.checks.data_parallel.toys import gradients, loss_of, rows, toy
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.data_parallel import OverlappedDataParallel, no_sync
from ranklab.meter import Traffic

BLOCKS, LAST = ((0, 1), (2,)), 3  # pieces in two blocks of no_sync, and the piece after them
INSIDE, AFTER = "all-reduces inside", "the number of all-reduces in the backward after the blocks"


def pieces(ranks, wrapped, no_sync):
    """Yield the observations of two steps in pieces: messages, and the gradients in between."""
    model = wrapped.module
    for turn in (0, 1):
        model.zero_grad()
        batches = [rows(100 * turn + 10 * dist.get_rank() + piece) for piece in range(LAST + 1)]
        with Traffic() as inside:
            for block in BLOCKS:
                with no_sync(wrapped):
                    for piece in block:
                        loss_of(wrapped, batches[piece]).backward()
        local = {f"inside, {name}": gradient for name, gradient in gradients(model).items()}
        with Sent() as after:  # what is written into a message under way is lost, always
            loss_of(wrapped, batches[LAST]).backward()
        yield {INSIDE: AtMost(inside.calls["all_reduce"], 0),
               AFTER: Must(after.traffic.calls["all_reduce"], len(wrapped.buckets))} | local | {
            f"after the blocks, {name}": gradient for name, gradient in gradients(model).items()}


class TorchDDP(DistributedDataParallel):
    """Torch's DDP, with the attribute that no_sync changes."""

    buckets = ()

    @property
    def sync(self):
        return self.require_backward_grad_sync

    @sync.setter
    def sync(self, value):
        self.require_backward_grad_sync = value


def torchs_no_sync(model):
    return model.no_sync()


def _new(fn, ranks):
    if fn is torchs_no_sync:
        return TorchDDP(toy(0), process_group=ranks.group)
    return OverlappedDataParallel(toy(0), bucket_cap_bytes=200, group=ranks.group)


def _see_blocks(fn, ranks):
    outer, second = _new(fn, ranks), _new(fn, ranks)
    yield {"whether `with` can take it": Must(hasattr(fn(_new(fn, ranks)), "__exit__"), True)}
    with fn(second):
        states = {"`sync` in the block": second.sync}
    states["`sync` after the block"] = second.sync
    with fn(outer):
        with fn(outer):
            states["`sync` in an inner block"] = outer.sync
        states["`sync` in the outer block, after the inner one"] = outer.sync
        with fn(second):
            pass
        states["`sync` in the block, after one of another model"] = outer.sync
        states["`sync` of another model, after its block inside of this one"] = second.sync
    states["`sync` after the outer block"] = outer.sync
    yield states
    yield {f"`sync` after a {error.__name__} in the block": _after(error, fn, _new(fn, ranks))
           for error in (KeyError, KeyboardInterrupt)}


def _after(error, no_sync, model):
    try:
        with no_sync(model):
            raise error("a step that fails")
    except error:
        return model.sync
    return "not known: the error has disappeared"


def _see(fn, case, ranks):
    if case == "blocks":
        yield from _see_blocks(fn, ranks)
    else:
        yield from pieces(ranks, _new(fn, ranks), fn)


OFF, BACK = "old_sync, model.sync = model.sync, False", "model.sync = old_sync"
AVERAGES = f"""{BACK}
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad.div_(dist.get_world_size(model.group)), group=model.group)"""
SUMS = ("Leave the gradients alone on entry and on exit: autograd accumulates them, even over "
        "several blocks.")
NO_SYNC = Proof(
    no_sync,
    Stage({"inside, nothing is sent, and gradients add up on their own rank": (),
           "the next backward outside averages the sums, once, on 1 to 4 ranks": (),
           "one inside another changes nothing, for the same model or a different one": (),
           "it also ends when the step inside fails": ()},
          _see, ("blocks", "a batch in four pieces"), (4,), (ALL, *GROUPS), oracle=torchs_no_sync),
    mistakes=(
        Slip("`with` needs a context manager: put @contextlib.contextmanager above the function, "
             "and a `yield` where the block runs.", ("@contextlib.contextmanager\n", "")),
        Slip("model.sync must be False while the block runs.",
             ("model.sync, False", "model.sync, True"), (OFF, "old_sync = model.sync")),
        Slip("Restore `sync` after the yield.", (BACK, "pass")),
        Slip("Restore the old value of `sync`, which need not be True.",
             (BACK, "model.sync = True")),
        Slip("On entry, set model.sync = False, whatever it was before; on exit, restore the old "
             "value.",
             ("model.sync, False", "model.sync, not model.sync", BACK,
              "model.sync = not model.sync")),
        Slip("Each no_sync must keep the old value in a variable of its own, which an inner one "
             "can't overwrite.", ("old_sync, model.sync =", "model.old_sync, model.sync =", BACK,
                            "model.sync = model.old_sync")),
        Slip("Each model has its own `sync`: keep its old value in a variable of this call.",
             ("(model)", "(model, depth=[0])", OFF, "model.sync, depth[0] = False, depth[0] + 1",
              BACK, "depth[0] -= 1\n        model.sync = depth[0] == 0")),
        Slip("Let errors through: use try and finally, with no except.",
             ("finally:", "except Exception:\n        pass\n    if True:"),
             ("finally:", "except BaseException:\n        pass\n    if True:"),
             (BACK, f"{BACK}\n        return")),
        Slip("Code after `yield` is skipped when the block raises: put it into a `finally`.",
             ("    try:\n        yield\n", "    yield\n",
              "    finally:  # also when the step inside failed\n        model", "    model")),
        Slip("An interrupt (KeyboardInterrupt) is not an Exception: use a `finally`, which runs in "
             "every case.",
             ("finally:", f"except Exception:\n        {BACK}\n        raise\n    else:")),
        Slip("no_sync itself sends nothing: the next backward averages what has accumulated.",
             (BACK, AVERAGES), (BACK, f"{BACK}\n        model.reduce_now()")),
        Slip(SUMS, ("model.sync, False", "model.sync, model.zero_grad() is not None"),
             (BACK, f"{BACK}\n        model.zero_grad()")),
    ), hints=(
        "The hooks check model.sync. What should it be inside the block, and what afterwards?",
        "Write a generator under @contextlib.contextmanager: what comes before the yield runs on "
        "entry, what comes after it on exit, but after an error only if it is in a `finally`.",
        "old_sync, model.sync = model.sync, False; try: yield; finally: model.sync = old_sync",
    ))
