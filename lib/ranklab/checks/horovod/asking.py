"""What a rank that trains asks for: each gradient once, in time, and in how many bytes.

`seen` is what the trial of optimizing.py saw, for each rank.
"""

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import rank_name

RAISED = {  # what was raised, and a hint about it
    ".* has waited .*":
        "That parameter got no gradient on the other ranks in this step, so their hooks never ran. "
        "Before step() waits, every rank must ask for what it has not asked for: zeros, where it "
        "has no gradient. Or are the handles of the last step still there, so that it seems asked "
        "for? Forget them at the end of wait: handles.clear().",
    ".*noname.*":
        "Without a name tensors are matched by their number, and ranks are ready in different "
        "orders: pass name=.",
    "RuntimeError: .*doesn't require grad.*":
        "A frozen parameter takes no hook, and needs none: skip those with requires_grad False.",
    "ValueError: .*still in the works.*":
        "A name is asked for again before anybody waited for it. Either step() asks for what a "
        "hook has asked for, or it waits for handles of the step before: clear the handles at its "
        "end. Or every hook asks for the same parameter, as a lambda in a loop does: it finds the "
        "loop's last one.",
    "RuntimeError: .*dtype.*":
        "Each parameter has its own type, and its own ctx: zeros_like(p) where there is no "
        "gradient, and decompress with the ctx that compress gave for this very gradient.",
}


def returns_it(seen):
    for one in seen:
        if one["returned"]:
            raise Mistake(f"it returns another object than the optimizer, of type "
                          f"{one['returned']}", "Its step() must change: hook into that optimizer "
                          "itself, and return it. A scheduler may hold it already.")


def asks_once(seen, trained, ranks):
    for rank, one in enumerate(seen):
        during, everything, stood_still = one["asked"]
        where = rank_name(rank, ranks)
        if not during:
            raise Mistake(f"{where} asks for no average before backward() has ended",
                          "Then nothing travels while it computes. Ask in the parameter's hook, "
                          "register_post_accumulate_grad_hook, as soon as its gradient is there.")
        if stood_still:
            raise Mistake(f"backward() on {where} waits until an average is there",
                          "In the hook only ask, allreduce_async_, and keep the handle; step() is "
                          "the one to synchronize. (Two ranks whose hooks run in different orders "
                          "would wait for each other for ever.)")
        if sorted(everything) != sorted(trained):
            raise Mistake(f"{where} asks for {sorted(everything)}, not for {sorted(trained)}",
                          "Each parameter with requires_grad once, under its name.")


def counts_bytes(seen, trained):
    for rank, one in enumerate(seen):
        (plain, asked, _), (small, _, _) = one["bytes"]
        if asked != len(trained):
            raise Mistake(f"rank {rank} averages {asked} tensors a step, not {len(trained)}",
                          "Each gradient once a step.")
        if small != 2 * sum(p.numel() for p in trained):
            raise Mistake(f"with Compression.fp16 rank {rank} averages {small} bytes a step, "
                          f"without it {plain}",
                          "small, ctx = compression.compress(p.grad): ask for the average of "
                          "`small`, and decompress(result, ctx) when it is there.")


def agrees_in_fp16(seen, ranks):
    """After a step with fp16: all ranks have the same weights, close to those without it."""
    plain, first = (of_step[2] for of_step in seen[0]["bytes"])
    for rank, one in enumerate(seen):
        for name, value in one["bytes"][1][2].items():
            what = ""
            if not torch.allclose(value, first[name], rtol=1e-4, atol=1e-5):
                what = "what rank 0 has"
            elif not torch.allclose(value, plain[name], rtol=1e-3, atol=1e-3):
                what = "close to what it is without"
            if what:
                raise Mistake(f"with Compression.fp16, {rank_name(rank, ranks)}: {name} is not "
                              f"{what}", "With fp16 the average is in the small copy, not in "
                              "p.grad: assign what decompress gives, p.grad = "
                              "compression.decompress(synchronize(handle), ctx).")


def refuses_a_second(seen, ranks):
    for rank, one in enumerate(seen):
        if one["twice"] != "ValueError":
            raise Mistake(f"{rank_name(rank, ranks)}: a second backward before step() raises "
                          f"{one['twice'] or 'nothing'}, not a ValueError", "The average that was "
                          "asked for lacks the second gradient. In the hook ask whether the "
                          "parameter is in `handles` already, and raise ValueError(...).")
