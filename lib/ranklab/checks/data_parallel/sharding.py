"""Checks without ranks: shard_sampler against torch's sampler, scale_learning_rate."""

import math

import torch
from torch.utils.data import DistributedSampler

from ranklab.checks.exercise import Mistake

SIZES = ((12, 4), (7, 1), (10, 3), (1797, 4), (101, 8), (3, 8), (1, 4))  # (n, ranks)


def check_shard_sampler(shard_sampler):
    for n, ranks in SIZES:
        _compare_shards(shard_sampler, n, ranks)
    yield "every sample once, and every rank as many, on 1, 3, 4, 8 ranks; filled up from the start"
    _compare_epochs(shard_sampler)
    yield "another order in each epoch and for each seed, the same on all ranks"
    _compare_torchs(shard_sampler, drop_last=False)
    yield "the very lists of torch's DistributedSampler"
    _compare_torchs(shard_sampler, drop_last=True)
    yield "with drop_last as well: what does not divide is left out"
    state = torch.get_rng_state()
    shard_sampler(50, 0, 2, epoch=3)
    if not torch.equal(state, torch.get_rng_state()):
        raise Mistake("torch's own random numbers have moved on, or were seeded anew",
                      "Dropout and initialisation use them: make a torch.Generator() of your own.")
    yield "torch's own random numbers are left alone"
    for n, rank in ((10, 4), (10, -1), (0, 0)):
        try:
            got = shard_sampler(n, rank, 4)
        except ValueError:
            continue
        raise Mistake(f"n={n}, rank {rank} of 4 gives {got}",
                      "Say what is wrong, at once: raise ValueError(...) with the numbers in it.")
    yield "a rank that is none of the ranks, and no samples, are refused with a ValueError"


def _compare_shards(shard_sampler, n, ranks):
    shards = [shard_sampler(n, rank, ranks) for rank in range(ranks)]
    each = math.ceil(n / ranks)
    for rank, shard in enumerate(shards):
        if not isinstance(shard, list):
            raise Mistake(f"it returned a {type(shard).__name__}", "Return a list of ints: "
                          ".tolist() makes one of a tensor.")
        if any(isinstance(index, torch.Tensor) for index in shard):
            raise Mistake("it returned a list of tensors", "list(tensor) cuts a tensor into "
                          "tensors. Return a list of ints: .tolist() makes one.")
        if len(shard) != each:
            raise Mistake(f"n={n}, {ranks} ranks: rank {rank} gets {len(shard)} samples; {each} is "
                          "right", "Every rank gets as many, n / ranks rounded up, or some ranks "
                          "step more often than others and wait for ever. Fill the order up from "
                          "its own beginning, more than once round where n is smaller than ranks.")
    given = sorted(index for shard in shards for index in shard)
    missing = sorted(set(range(n)) - set(given))
    if missing:
        twice = len(given) - len(set(given)) - (each * ranks - n)
        raise Mistake(f"n={n}, {ranks} ranks: sample {missing[0]} belongs to nobody, and {twice} "
                      "samples to several ranks", "All ranks must shuffle alike (the same seed, "
                      "without the rank), and then take different parts of the one order.")


def _compare_epochs(shard_sampler):
    first = [shard_sampler(100, rank, 4) for rank in range(4)]
    for what, other in (("epoch 1", {"epoch": 1}), ("seed 1", {"seed": 1})):
        for rank in range(4):
            if shard_sampler(100, rank, 4, **other) == first[rank]:
                raise Mistake(f"{what} gives rank {rank} the same samples, in the same order",
                              "Seed the shuffle with seed + epoch: a new order for each epoch, "
                              "and all ranks know it without a word.")
    if sum(first, []) == list(range(100)) or first[0] == list(range(0, 100, 4)):
        raise Mistake("the samples are not shuffled", "torch.randperm(n, generator=...)")


def _compare_torchs(shard_sampler, drop_last):
    for n, ranks in SIZES:
        for rank in range(ranks):
            torchs = DistributedSampler(range(n), ranks, rank, seed=5, drop_last=drop_last)
            for epoch in (0, 3):
                torchs.set_epoch(epoch)
                right = list(torchs)
                got = list(shard_sampler(n, rank, ranks, epoch=epoch, seed=5, drop_last=drop_last))
                if got != right:
                    raise Mistake(f"n={n}, rank {rank} of {ranks}, epoch {epoch}, seed 5, "
                                  f"drop_last={drop_last}: {_some(got)}; torch has {_some(right)}",
                                  _order_hint(got, right, drop_last))


def _some(indices):
    shown = ", ".join(map(str, indices[:5]))
    return f"[{shown}{', ...' if len(indices) > 5 else ''}] ({len(indices)})"


def _order_hint(got, right, drop_last):
    if drop_last and len(got) != len(right):
        return "With drop_last each rank gets n // ranks samples, and the end of the order is lost."
    return ("Take every ranks-th index of the one order, from your own rank on: "
            "order[rank::ranks]. Fill up from the beginning of the order; and the shuffle is "
            "torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).")


# --- scale_learning_rate ------------------------------------------------------------------------

WARMUPS = (  # batch, rule, the rates of steps 0 to 6
    (1280, "linear", (0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5)),
    (1024, "sqrt", (0.1, 0.125, 0.15, 0.175, 0.2, 0.2, 0.2)),
    (128, "linear", (0.1, 0.0875, 0.075, 0.0625, 0.05, 0.05, 0.05)),
)


def check_scale_learning_rate(scale_learning_rate):
    cases = (("linear", 8192, 3.2), ("linear", 384, 0.15), ("linear", 256, 0.1),
             ("linear", 64, 0.025), ("sqrt", 4096, 0.4), ("sqrt", 64, 0.05))
    for rule, batch, right in cases:
        got = scale_learning_rate(0.1, batch, 256, rule=rule)
        if not _near(got, right):
            raise Mistake(f"0.1 at batch 256, {rule} rule, batch {batch}: {got}; {right} is right",
                          _rule_hint(rule, got, batch))
    if not _near(scale_learning_rate(0.1, 512, 256), 0.2):
        raise Mistake("without `rule` it does not scale linearly", 'The default is "linear".')
    yield "linear: k times the batch, k times the rate; sqrt: the root of k; smaller batches too"
    for batch, rule, right in WARMUPS:
        got = [scale_learning_rate(0.1, batch, 256, step, 4, rule) for step in range(7)]
        if not all(map(_near, got, right)):
            raise Mistake(f"from 0.1 to {right[-1]:g}, {rule} rule, with warmup=4, steps 0 to 6: "
                          f"{_rates(got)}; right is {_rates(right)}", _warmup_hint(got, right))
    yield "warm-up: from lr at step 0 evenly to the scaled rate at step `warmup`, then no more"
    for case, hint in (({"step": 0}, "No warm-up: the scaled rate from the first step on."),
                       ({"warmup": 4}, "Without a step nobody asks for the way: return the scaled "
                        "rate when step is None.")):
        got = _caught(scale_learning_rate, case)
        if not _near(got, 0.2):
            raise Mistake(f"0.1 at batch 256, batch 512, {_said(case)}: {got}; 0.2 is right", hint)
    yield "without a step, or without a warm-up, the scaled rate"
    for bad in ({"rule": "cubic"}, {"batch": 0}, {"base_batch": 0}, {"warmup": -1}):
        _refuses(scale_learning_rate, bad)
    yield "an unknown rule, a batch of 0 and a negative warm-up are refused with a ValueError"


def _near(got, right):
    return isinstance(got, (int, float)) and math.isclose(got, right, rel_tol=1e-6)


def _rates(rates):
    return ", ".join(f"{rate:.3g}" for rate in rates)


def _rule_hint(rule, got, batch):
    k = batch / 256
    if _near(got, 0.1 / k) and k != 1:
        return "Larger batch, larger steps: multiply by batch / base_batch, do not divide."
    if rule == "sqrt" and _near(got, 0.1 * k):
        return 'rule="sqrt" takes the square root of batch / base_batch.'
    if k < 1 and _near(got, 0.1):
        return "A smaller batch gets a smaller rate: the rule holds in both directions."
    return "k = batch / base_batch; lr * k, or lr * k ** 0.5."


def _warmup_hint(got, right):
    if right[-1] < right[0] and _near(got[0], right[-1]):
        return ("Here the batch is smaller than base_batch, and the rate goes down on the way: "
                "min() takes the end at once. Ask whether step >= warmup instead.")
    if _near(got[0], 0.0):
        return ("Here warm-up does not begin at 0 but at lr, which is right for the small batch "
                "(Goyal et al. 2017): lr + (scaled - lr) * step / warmup.")
    if not _near(got[-1], right[-1]):
        return "After `warmup` steps the rate stays: it must not grow on."
    return "Evenly from lr to the scaled rate: lr + (scaled - lr) * step / warmup, from step 0 on."


def _refuses(scale_learning_rate, bad):
    try:
        got = _caught(scale_learning_rate, bad)
    except ValueError:
        return
    raise Mistake(f"{_said(bad)} gives {got}", "Say what is wrong, at once: raise "
                  "ValueError(...) with the numbers in it.")


def _said(arguments):
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _caught(scale_learning_rate, arguments):
    """The rate, or the name of an error that no good answer raises."""
    try:
        return scale_learning_rate(**{"lr": 0.1, "batch": 512, "base_batch": 256, **arguments})
    except (ZeroDivisionError, KeyError, TypeError) as error:
        return f"a {type(error).__name__}"
