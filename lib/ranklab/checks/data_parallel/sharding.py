"""Checks without ranks: shard_sampler against torch's sampler, scale_learning_rate."""

import itertools

import torch
from torch.utils.data import DistributedSampler

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain, is_near
from ranklab.engine.report import count_ranks

SIZES = ((12, 4), (7, 1), (10, 3), (1797, 4), (101, 8), (3, 8), (1, 4))  # (n, ranks)


def check_shard_sampler(shard_sampler):
    for n, ranks in SIZES:
        _compare_shards([shard_sampler(n, rank, ranks) for rank in range(ranks)], n, ranks)
    yield "every sample once, the same number on each of 1, 3, 4, 8 ranks; filled up from the start"
    first = [shard_sampler(100, rank, 4) for rank in range(4)]
    expect(sum(first, []) != [*range(100)] and first[0] != [*range(0, 100, 4)],
           "the samples are not shuffled", "torch.randperm(n, generator=...)")
    for what, rank in itertools.product(("epoch", "seed"), range(4)):
        expect(shard_sampler(100, rank, 4, **{what: 1}) != first[rank], f"{what} 1 gives rank "
               f"{rank} the same samples, in the same order", "Seed the shuffle with seed + "
               "epoch: a new order for each epoch, and all ranks know it without a message.")
    yield "another order in each epoch and for each seed, the same on all ranks"
    _compare_with_torch(shard_sampler, False, "")
    yield "the same lists as torch's DistributedSampler"
    _compare_with_torch(shard_sampler, True, "With drop_last each rank gets n // ranks samples, "
                        "and the end of the order is lost.")
    yield "with drop_last too: samples that do not divide are left out"
    state = torch.get_rng_state()
    shard_sampler(50, 0, 2, epoch=3)
    expect(torch.equal(state, torch.get_rng_state()), "torch's own random numbers have moved on, "
           "or were seeded again", "Dropout and initialisation use them: make a torch.Generator() "
           "of your own.")
    yield "torch's own random numbers are left alone"
    for n, rank in ((10, 4), (10, -1), (0, 0)):
        _refuses(shard_sampler, n=n, rank=rank, ranks=4)
    yield "a ValueError for a rank that is not one of the ranks, and for no samples"


def _compare_shards(shards, n, ranks):
    each = -(-n // ranks)
    for rank, shard in enumerate(shards):
        expect(isinstance(shard, list), f"it returned a {type(shard).__name__}", "Return a list of "
               "ints: .tolist() makes one of a tensor.")
        expect(all(isinstance(index, int) for index in shard), f"the list holds {shard[:2]}",
               "list(tensor) cuts a tensor into tensors. Return a list of ints: .tolist().")
        expect(len(shard) == each, f"n={n}, {count_ranks(ranks)}: rank {rank} gets {len(shard)} "
               f"samples; {each} is right",
               "Every rank must get the same number, n / ranks rounded up, or some ranks wait "
               "forever. Fill the order up from its own beginning, more than once if n is smaller "
               "than ranks.")
    missing = sorted({*range(n)} - {*sum(shards, [])})
    expect(not missing, f"n={n}, {count_ranks(ranks)}: samples {missing[:5]} belong to nobody",
           "All ranks must shuffle alike (the same seed, without the rank), then take different "
           "parts.")


def _compare_with_torch(shard_sampler, drop_last, of_length):
    for n, ranks, rank, epoch in [(n, ranks, rank, epoch) for n, ranks in SIZES
                                  for rank in range(ranks) for epoch in (0, 3)]:
        torch_sampler = DistributedSampler(range(n), ranks, rank, seed=5, drop_last=drop_last)
        torch_sampler.set_epoch(epoch)
        right = list(torch_sampler)
        got = list(shard_sampler(n, rank, ranks, epoch=epoch, seed=5, drop_last=drop_last))
        expect(got == right, f"n={n}, rank {rank} of {ranks}, epoch {epoch}, seed 5, drop_last="
               f"{drop_last}: {_some(got)}; torch has {_some(right)}",
               of_length if len(got) != len(right) else "Take every ranks-th index of the one "
               "order, order[rank::ranks]. Fill up from its beginning; the shuffle is "
               "torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).")


def _some(indices):
    shown = ", ".join(map(str, indices[:5]))
    return f"[{shown}{', ...' if len(indices) > 5 else ''}] ({len(indices)})"


# --- scale_learning_rate ------------------------------------------------------------------------

RATES = (  # rule, batch, the rate
    ("linear", 8192, 3.2), ("linear", 384, 0.15), ("linear", 256, 0.1), ("linear", 64, 0.025),
    ("sqrt", 4096, 0.4), ("sqrt", 64, 0.05),
)
WARMUPS = (  # batch, rule, the rates of steps 0 to 6
    (1280, "linear", (0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5)),
    (1024, "sqrt", (0.1, 0.125, 0.15, 0.175, 0.2, 0.2, 0.2)),
    (128, "linear", (0.1, 0.0875, 0.075, 0.0625, 0.05, 0.05, 0.05)),
)
DOUBLED = {"lr": 0.1, "batch": 512, "base_batch": 256}


def check_scale_learning_rate(scale_learning_rate):
    for rule, batch, right in RATES:
        k = batch / 256
        slips = {"divided by k": (0.1 / k, "Larger batch, larger steps: multiply by batch / "
                                  "base_batch, do not divide."),
                 "k times lr": (0.1 * k, 'rule="sqrt" takes the square root of batch / '
                                'base_batch.')}
        if k < 1:
            slips["that of the larger batch"] = 0.1, ("A smaller batch gets a smaller rate: the "
                                                      "rule holds in both directions.")
        explain(f"0.1 at batch 256, {rule} rule: at batch {batch} the rate",
                scale_learning_rate(0.1, batch, 256, rule=rule), right, slips,
                "k = batch / base_batch; lr * k, or lr * k ** 0.5.")
    explain("without `rule`, at twice the batch, 0.1", scale_learning_rate(0.1, 512, 256), 0.2,
            hint='The default is "linear".')
    yield "linear: k times the batch, k times the rate; sqrt: the root of k; smaller batches too"
    for batch, rule, right in WARMUPS:
        got = [scale_learning_rate(0.1, batch, 256, step, 4, rule) for step in range(7)]
        if not all(map(is_near, got, right)):
            raise Mistake(f"from 0.1 to {right[-1]:g}, {rule} rule, with warmup=4, steps 0 to 6: "
                          f"{_rates(got)}; right is {_rates(right)}", _warmup_hint(got, right))
    yield "warm-up: from lr at step 0 evenly to the scaled rate at step `warmup`, then no more"
    for case, hint in (({"step": 0}, "No warm-up: the scaled rate from the first step on."),
                       ({"warmup": 4}, "Without a step there is no warm-up: return the scaled "
                        "rate when step is None.")):
        try:
            got = scale_learning_rate(**DOUBLED, **case)
        except (ZeroDivisionError, TypeError) as error:
            raise Mistake(f"{_said(case)} gives a {type(error).__name__}", hint) from None
        explain(f"0.1 at batch 256, batch 512, {_said(case)}: the rate", got, 0.2, hint=hint)
    yield "without a step, or without a warm-up, the scaled rate"
    for bad in ({"rule": "cubic"}, {"batch": 0}, {"base_batch": 0}, {"warmup": -1}):
        _refuses(scale_learning_rate, **{**DOUBLED, **bad})
    yield "an unknown rule, a batch of 0 and a negative warm-up are refused with a ValueError"


def _rates(rates):
    return ", ".join(f"{rate:.3g}" for rate in rates)


def _warmup_hint(got, right):
    if right[-1] < right[0] and is_near(got[0], right[-1]):
        return ("Here the batch is smaller than base_batch, and the rate goes down on the way: "
                "min() takes the end at once. Ask whether step >= warmup instead.")
    if is_near(got[0], 0.0):
        return ("Here warm-up does not begin at 0 but at lr, which is right for the small batch "
                "(Goyal et al. 2017): lr + (scaled - lr) * step / warmup.")
    if not is_near(got[-1], right[-1]):
        return "After `warmup` steps the rate stays as it is; it must not grow further."
    return "Evenly from lr to the scaled rate: lr + (scaled - lr) * step / warmup, from step 0 on."


def _refuses(fn, **arguments):
    try:
        got = fn(**arguments)
    except ValueError:
        return
    except (ZeroDivisionError, KeyError, TypeError) as error:  # which no good answer raises
        got = f"a {type(error).__name__}"
    raise Mistake(f"{_said(arguments)} gives {got}", "Say what is wrong, at once: raise "
                  "ValueError(...) with the numbers in it.")


def _said(arguments):
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
