"""What a rank that trains asks for: each gradient once, in time, and in how many bytes.

`seen` is what the trial of optimizing.py saw, for each rank.
"""

import torch

from ranklab.checks.exercise import Mistake


def returns_it(seen):
    for one in seen:
        if one["returned"]:
            raise Mistake(f"it returns another object than the optimizer, of type "
                          f"{one['returned']}", "Its step() must change: hook into that optimizer "
                          "itself, and return it. A scheduler may hold it already.")


def asks_once(seen, trained, ranks):
    for rank, one in enumerate(seen):
        during, everything, stood_still = one["asked"]
        where = f"rank {rank} of {ranks}"
        if not during:
            raise Mistake(f"{where} asks for no average before backward() has ended",
                          "Then nothing travels while it computes. Ask in the parameter's hook, "
                          "register_post_accumulate_grad_hook, as soon as its gradient is there.")
        if stood_still:
            raise Mistake(f"backward() on {where} waits until an average is there",
                          "In the hook only ask, allreduce_async_, and keep the handle; step() is "
                          "the one to synchronize. (Two ranks whose hooks run in different orders "
                          "would wait for each other for ever.)")
        if set(everything) != trained or len(everything) != len(trained):
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
    hint = ("With fp16 the average is in the small copy, not in p.grad: assign what decompress "
            "gives, p.grad = compression.decompress(synchronize(handle), ctx).")
    first = seen[0]["bytes"][1][2]
    for rank, one in enumerate(seen):
        for name, value in one["bytes"][1][2].items():
            where = f"with Compression.fp16, rank {rank} of {ranks}: {name}"
            if not torch.allclose(value, first[name], rtol=1e-4, atol=1e-5):
                raise Mistake(f"{where} is not what rank 0 has", hint)
    for name, value in first.items():
        if not torch.allclose(value, seen[0]["bytes"][0][2][name], rtol=1e-3, atol=1e-3):
            raise Mistake(f"with Compression.fp16 on {ranks} ranks {name} is not close to what it "
                          "is without", hint)


def refuses_a_second(seen, ranks):
    for rank, one in enumerate(seen):
        if one["twice"] != "ValueError":
            raise Mistake(f"rank {rank} of {ranks}: a second backward before step() raises "
                          f"{one['twice'] or 'nothing'}, not a ValueError", "The average that was "
                          "asked for lacks the second gradient. In the hook ask whether the "
                          "parameter is in `handles` already, and raise ValueError(...).")
