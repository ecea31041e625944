"""Checks without ranks: shard_sampler against torch's sampler, scale_learning_rate."""

from typing import NamedTuple

import torch
from torch.utils.data import DistributedSampler

from ranklab.checks.prover import Must, Proof, Slip, Stage, Told, must_refuse
from ranklab.data_parallel import scale_learning_rate, shard_sampler
from ranklab.engine.report import count_ranks

SIZES = ((12, 4), (7, 1), (10, 3), (1797, 4), (101, 8), (3, 8), (1, 4))  # (n, ranks)


class Shards(NamedTuple):
    n: int
    ranks: int
    epoch: int = 0
    seed: int = 0
    drop_last: bool = False

    def __str__(self):
        text = f"n={self.n}, {count_ranks(self.ranks)}, epoch {self.epoch}, seed {self.seed}"
        return text + ", drop_last=True" * self.drop_last


SHARDS = tuple(Shards(*size, *how) for how in ((), (3, 5), (0, 1), (0, 5, True), (3, 5, True))
               for size in SIZES)
BELONG, KINDS, STATE = ("the samples that belong to no rank", "what a rank gets",
                        "torch's own random numbers, afterwards,")


def _see_shards(fn, case):
    state = torch.get_rng_state()
    keywords = {name: value for name, value in (
        ("epoch", case.epoch), ("seed", case.seed), ("drop_last", case.drop_last)) if value}
    shards = [fn(case.n, rank, case.ranks, **keywords) for rank in range(case.ranks)]
    moved = not torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(state)
    every = {index for shard in shards if isinstance(shard, list | tuple) for index in shard}
    kinds = {_kind(shard) for shard in shards}
    yield {f"the list of rank {rank}": Told(shard, _in_short)
           for rank, shard in enumerate(shards)} | {
        BELONG: Must([] if case.drop_last else sorted({*range(case.n)} - every)[:5], []),
        KINDS: Must(" and ".join(sorted(kinds)), "a list of ints"),
        STATE: Must("moved" if moved else "as before", "as before")}


def _kind(shard):
    """Return the kind of a shard: "a list of ints", "a tuple of ints", "a list of Tensors"."""
    kind = f"a {type(shard).__name__}"
    if not isinstance(shard, list | tuple):
        return kind
    kinds = {"int" if isinstance(index, int) else type(index).__name__ for index in shard}
    return f"{kind} of {' and '.join(sorted(f'{each}s' for each in kinds or {'int'}))}"


def _in_short(got, due):
    """Describe a wrong list: by its type, or by its beginning."""
    if not isinstance(got, list | tuple):
        return f"a {type(got).__name__}"
    if not all(isinstance(index, int) for index in got):
        return f"a {type(got).__name__} that holds {str(got[:2])[:60]}"
    return f"{_some(got)}; torch has {_some(due)}"


def _some(indices):
    return f"[{', '.join(map(str, indices[:5]))}{', ...' * (len(indices) > 5)}] ({len(indices)})"


def by_torch(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    sampler = DistributedSampler(range(n), ranks, rank, seed=seed, drop_last=drop_last)
    sampler.set_epoch(epoch)
    return [*sampler]


def _see_refusal(fn, case):
    yield {"what it raises": must_refuse(fn, **case)}


def not_shuffled(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    share = n // ranks if drop_last else -(-n // ranks)
    return (list(range(n)) * ranks)[rank : share * ranks : ranks]


def pads_with_the_last(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    share = n // ranks if drop_last else -(-n // ranks)
    order += order[-1:] * (share * ranks - n)
    return order[rank : share * ranks : ranks]


SHUFFLE, SHARE = "(seed + epoch)", "n // ranks if drop_last else -(-n // ranks)"
PART = "order[rank : share * ranks : ranks]"
FILL = "        order += order[: share * ranks - len(order)]\n"
SHARD = Proof(
    shard_sampler,
    Stage({"every sample once, the same number on each of 1, 3, 4, 8 ranks; filled up from the "
           "start": (),
           "another order in each epoch and for each seed, the same on all ranks": (),
           "the same lists as torch's DistributedSampler, also with drop_last": (),
           "torch's own random numbers are left alone": (STATE,)},
          _see_shards, SHARDS, oracle=by_torch),
    Stage("a ValueError for a rank that is not one of the ranks, and for no samples", _see_refusal,
          tuple({"n": n, "rank": rank, "ranks": 4} for n, rank in ((10, 4), (10, -1), (0, 0))),
          note=("Report the problem at once: raise ValueError(...) with the numbers in its "
                "message.")),
    mistakes=(
        Slip("Each epoch needs a new order: seed the shuffle with seed + epoch, which all ranks "
             "know without a message.", (SHUFFLE, "(seed)")),
        Slip("A different seed must give a different order: seed the shuffle with seed + epoch.",
             (SHUFFLE, "(epoch)")),
        Slip("All ranks must shuffle identically (the same seed, without the rank), then take "
             "different parts.", (SHUFFLE, "(seed + epoch + rank)")),
        Slip("The samples are not shuffled: use torch.randperm(n, generator=...).", not_shuffled,
             ("torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()",
              "list(range(n))")),
        Slip("Without drop_last, the end of the order must not be lost: round n / ranks up.",
             (f"share = {SHARE}", "share = n // ranks")),
        Slip("Every rank must get the same number of samples, or some ranks wait forever: pad the "
             "order from its own beginning.", (FILL, "        break\n")),
        Slip("Pad more than once if necessary: n may be smaller than `ranks`.",
             ("while len(order) <", "if len(order) <")),
        Slip("Pad with the beginning of the order, not with its last sample.",
             pads_with_the_last),
        Slip("Pad with the beginning of the shuffled order, not of range(n).",
             (FILL, "        order += list(range(n))[: share * ranks - len(order)]\n")),
        Slip("With drop_last, each rank gets n // ranks samples, and the end of the order is "
             "dropped.",
             (SHARE, "-(-n // ranks)")),
        Slip("With drop_last, all ranks still get the same number of samples, n // ranks: cut the "
             "order.",
             (PART, "order[rank::ranks] if drop_last else order[rank : share * ranks : ranks]")),
        Slip("Take every `ranks`-th index of the shared order: order[rank::ranks].",
             (PART, "order[rank * share : (rank + 1) * share]")),
        Slip("Dropout and initialisation use torch's global random state: don't reseed it, make a "
             "torch.Generator() of your own.",
             ("torch.Generator().manual_seed", "torch.manual_seed")),
        Slip("Return a list of ints, not a tensor: .tolist() converts it.",
             ("return order[", "return torch.tensor(order)[")),
        Slip("Return a list, not a tuple: list(...) converts it.",
             ("return order[", "return tuple(order)[")),
        Slip("list(tensor) gives a list of tensors. Return a list of ints, with .tolist().",
             ("torch.randperm(", "list(torch.randperm(", ").tolist()", "))")),
        Slip("Keep the check of `rank`, which raises a ValueError.",
             ("not 0 <= rank < ranks", "False"), ("not 0 <= rank < ranks", "rank >= ranks"),
             ("not 0 <= rank < ranks", "not 0 <= rank <= ranks")),
        Slip("Having no samples is an error as well: raise a ValueError.", ("n < 1", "False")),
    ), hints=(
        "All ranks build the same order of all samples, and each takes its own part.",
        "Use torch.randperm(n, generator=...) with seed + epoch. Pad to a multiple of `ranks` from "
        "the start of the order itself (more than once if need be), or cut.",
        "share = n // ranks if drop_last else -(-n // ranks); while len(order) < share * ranks: "
        "order += order[: share * ranks - len(order)]; return order[rank : share * ranks : ranks]",
    ))


# --- scale_learning_rate --------------------------------------------------------------------------

class Rates(NamedTuple):
    """Learning rates scaled from 0.1 at a batch of 256."""

    batch: int
    rule: str = "linear"
    keywords: dict = {}
    steps: tuple = ()

    def __str__(self):
        words = ", ".join(f"{name}={value}" for name, value in self.keywords.items())
        steps = f"steps 0 to {self.steps[-1]}" if self.steps else ""
        return ", ".join(filter(None, (f"0.1 at batch 256, now {self.batch}", f"{self.rule} rule",
                                       words, steps)))


RATES = (Rates(8192), Rates(384), Rates(256), Rates(64), Rates(4096, "sqrt"), Rates(64, "sqrt"),
         Rates(512, "default"))
STEPS = tuple(range(7))
WARMUPS = (Rates(1280, "linear", {"warmup": 4}, STEPS), Rates(1024, "sqrt", {"warmup": 4}, STEPS),
           Rates(128, "linear", {"warmup": 4}, STEPS))
WITHOUT = (Rates(512, keywords={"step": 0}), Rates(512, keywords={"warmup": 4}),
           Rates(512, keywords={"step": 9, "warmup": 4}))


def _see_rates(fn, case):
    rule = {} if case.rule == "default" else {"rule": case.rule}
    if not case.steps:
        try:
            rate = fn(0.1, case.batch, 256, **case.keywords, **rule)
        except ZeroDivisionError:
            if "step" not in case.keywords:  # an error of the learner's own, with its line
                raise
            rate = "a ZeroDivisionError"  # step / warmup, and warmup is 0
        yield {"the rate": rate}
        return
    rates = [fn(0.1, case.batch, 256, step=step, **case.keywords, **rule) for step in case.steps]
    yield {"the rate of each step": Told(rates, _with_three_digits)}


def _with_three_digits(got, due):
    texts = [", ".join(f"{rate:.3g}" if isinstance(rate, int | float) else f"{rate}"
                       for rate in rates) for rates in (got, due)]
    return "{}; right is {}".format(*texts)


def by_steps(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """Add up equal steps of the warm-up."""
    factor = {"linear": batch / base_batch, "sqrt": (batch / base_batch) ** 0.5}[rule]
    if step is None or not warmup:
        return lr * factor
    return lr + sum([(factor - 1) * lr / warmup] * min(step, warmup))


DOUBLED = {"lr": 0.1, "batch": 512, "base_batch": 256}
GROWN, K, DONE = "lr + (scaled - lr) * step / warmup", "(batch / base_batch)", "step >= warmup"
POWER = " ** powers[rule]"
LEARNING_RATE = Proof(
    scale_learning_rate,
    Stage("linear: k times the batch, k times the rate; sqrt: the root of k; also for smaller "
          "batches",
          _see_rates, RATES, oracle=by_steps),
    Stage("warm-up: linearly from lr at step 0 to the scaled rate at step `warmup`, then constant",
          _see_rates, WARMUPS, oracle=by_steps),
    Stage("without a step, or without a warm-up, the scaled rate", _see_rates, WITHOUT,
          oracle=by_steps),
    Stage("an unknown rule, a batch of 0 and a negative warm-up are refused with a ValueError",
          _see_refusal, tuple({**DOUBLED, **bad} for bad in (
              {"rule": "cubic"}, {"batch": 0}, {"base_batch": 0}, {"warmup": -1})),
          note=("Report the problem at once: raise ValueError(...) with the numbers in its "
                "message.")),
    mistakes=(
        Slip("A larger batch gets a larger rate: multiply by batch / base_batch, do not divide.",
             ("batch / base_batch", "base_batch / batch")),
        Slip('rule="sqrt" takes the square root of batch / base_batch.', (POWER, "")),
        Slip("The linear rule multiplies by batch / base_batch itself, not by its square root.",
             ('"linear": 1,', '"linear": 0.5,')),
        Slip("The two rules are swapped.", ('"linear": 1, "sqrt": 0.5',
                                                   '"linear": 0.5, "sqrt": 1')),
        Slip("The square root of k is k ** 0.5.", ('"sqrt": 0.5', '"sqrt": 2')),
        Slip("A smaller batch gets a smaller rate: the rule holds in both directions.",
             (K, "max(1, batch / base_batch)")),
        Slip("k need not be a whole number: use batch / base_batch, not //.",
             (K, "(batch // base_batch or batch / base_batch)"), (K, "(batch // base_batch)")),
        Slip('The default rule is "linear".', ('rule="linear"', 'rule="sqrt"')),
        Slip("Here warm-up starts not at 0 but at lr, which is right for the small batch (Goyal et "
             "al. 2017): lr + (scaled - lr) * step / warmup.",
             (GROWN, "scaled * step / warmup")),
        Slip("After `warmup` steps the rate stays at the scaled rate; it must not keep growing.",
             (DONE, "not warmup")),
        Slip("Here the batch is smaller than base_batch, so the rate falls during warm-up, and "
             "min() jumps to the end at once. Test step >= warmup instead.",
             (DONE, "not warmup", GROWN, f"min(scaled, {GROWN})")),
        Slip("Steps count from 0: at step 0 the rate is lr, so divide step, not step + 1, by "
             "warmup.", ("* step / warmup", "* (step + 1) / warmup")),
        Slip("The rate changes linearly, by the same amount in each step, not by the same factor.",
             (GROWN, "lr * (scaled / lr) ** (step / warmup)")),
        Slip("There is no warm-up here: before step `warmup`, the rate must still be on its way "
             "from lr to the scaled rate.",
             (f"    return {GROWN}", "    return scaled")),
        Slip("Your rate stays at lr until step `warmup`: it must move towards the scaled rate in "
             "each step.",
             (f"return {GROWN}", "return lr")),
        Slip("At step `warmup` the scaled rate is reached: divide by warmup, not by warmup - 1.",
             ("* step / warmup", "* step / (warmup - 1)")),
        Slip("Without a step there is no warm-up: return the scaled rate when step is None.",
             ("step is None", "not warmup")),
        Slip("warmup=0 means no warm-up: use the scaled rate from the first step on.",
             (DONE, "step > warmup")),
        Slip("Keep the check of `rule`, which raises a ValueError.",
             ("rule not in powers", "False", "powers[rule]", "powers.get(rule, 1)")),
        Slip("Keep the check of `batch`, `base_batch` and `warmup`, which raises a ValueError.",
             ("batch < 1 or base_batch < 1 or warmup < 0", "False")),
    ), hints=(
        "k = batch / base_batch. How does the learning rate depend on k in each rule?",
        "linear: lr * k; sqrt: lr * k ** 0.5. Warm-up: a straight line from lr at step 0 to the "
        "scaled rate at step `warmup`.",
        "if step is None or step >= warmup: return scaled; return lr + (scaled - lr) * step / "
        "warmup",
    ))
