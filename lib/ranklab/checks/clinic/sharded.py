"""The checks of clinic/sharded.py: each mended program beside its training in one process.

First as in the lab, then what the lab does not show: groups of 1 and 3 ranks, other rows, other
settings. In float64; results may differ as far as float32 rounds.
"""

from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from ranklab.checks.beside import expect, located
from ranklab.checks.clinic.sharded_alone import flat_alone, gpt_alone, wide_alone
from ranklab.checks.clinic.sharded_causes import PREDICTIONS_OF_SHARDED
from ranklab.checks.exercise import Exercise
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.trial import GROUPS, explain, group_of_mine, on_ranks
from ranklab.clinic import sharded
from ranklab.meter import Traffic

__all__ = ["PREDICTIONS_OF_SHARDED", "SHARDED"]

ALL = ((0, 1, 2, 3),)
RATE = {"wide_layer": 0.5, "staged_gpt": 0.01, "gathered_model": 1.0, "moved_gpt": 0.01,
        "flat_model": 1.0}  # the stubs' own


# --- on ranks -------------------------------------------------------------------------------------

def _compared(program, look, *situations, trial=None):
    """look(where, settings, what each rank of a group returned) holds in all situations.

    situations  (ranks of each group, settings or function of a group's size that gives them):
                groups that have other rows notice what comes from the other one
    """
    for groups, settings in situations:
        where = "on 4 ranks" if groups == ALL else "in groups of 1 and 3 ranks"
        call = partial(on_ranks, trial or _run, program, groups, settings, ranks=4)
        seen = call() if groups == ALL else located(where, call)
        for members in groups:
            look(where, _settings(settings, members), [seen[rank] for rank in members])
        shown = ", ".join(f"{name}={value}" for name, value in _settings(settings, members).items())
        yield f"as one process, {where}, with {shown}"


def _settings(settings, members):
    return settings(len(members)) if callable(settings) else settings


def _run(program, groups, settings):
    torch.set_default_dtype(torch.float64)  # the rank ends with this run
    group = None if groups == ALL else group_of_mine()
    members = next(each for each in groups if torch.distributed.get_rank() in each)
    with Traffic() as traffic, Waits() as waits:
        got = program(**_settings(settings, members), group=group)
    return got | {"calls": traffic.calls, "missing": waits.missing(traffic.calls.total())}


def _run_with_masks(program, groups, settings):
    """What F.dropout multiplies with is noted, too."""
    masks, dropout = [], F.dropout

    def noting(input, p=0.5, training=True, inplace=False):
        masks.append(dropout(torch.ones_like(input), p, training).detach())
        return input * masks[-1]

    with mock.patch.object(F, "dropout", noting):
        return _run(program, groups, settings) | {"masks": masks}


def _same(where, got, right, slips=None, hint=""):
    """Lists of numbers, or tensors."""
    got, right = (torch.as_tensor(each).float() for each in (got, right))
    named = {what: (torch.as_tensor(wrong).float(), advice)
             for what, (wrong, advice) in (slips or {}).items()}
    explain(where, got, right, named, hint)


def _each(where, values, name, right, slips=None, hint=""):
    for place, got in enumerate(values):
        _same(f"{where}, rank {place} of {len(values)}: {name}", got[name], right, slips, hint)


# --- dropout_seeds --------------------------------------------------------------------------------

def check_wide_layer(program):
    steps = {"steps": 4}
    return _compared(program, _look_at_wide_layer, (ALL, steps | {"tensor": 2, "seed": 0}),
                     (GROUPS, lambda size: steps | {"tensor": size, "seed": size}),
                     (ALL, steps | {"tensor": 1, "seed": 2}), trial=_run_with_masks)


def _look_at_wide_layer(where, settings, values):
    steps, T = settings["steps"], settings["tensor"]
    counts = [len(got["masks"]) for got in values]
    expect(set(counts) == {2 * steps}, f"{where}: F.dropout is called {counts[0]} times in {steps} "
           "steps, not twice a step", "Keep both, as F.dropout or nn.Dropout: the masks are read.")
    wide, narrow = ([got["masks"][first::2] for got in values] for first in (0, 1))
    _look_at_masks(f"{where}, tensor={T}", T, wide, narrow)
    masks = [[(torch.cat([wide[rank + t][step] for t in range(T)], 1), narrow[rank][step])
              for rank in range(0, len(values), T)] for step in range(steps)]
    losses, weights = wide_alone(steps, RATE["wide_layer"], settings["seed"], masks)
    for rank, got in enumerate(values):
        at = f"{where}, tensor={T}: rank {rank}"
        _same(f"{at}: the losses", got["losses"], losses[rank // T], hint="The masks are "
              "right. One process that drops the same computes something else.")
        for name, right in weights.items():
            dim = {"up.weight": 0, "down.weight": 1}.get(name)
            right = right if dim is None else right.chunk(T, dim)[rank % T]
            _same(f"{at}: {name}", got["weights"][name], right)


def _look_at_masks(where, T, wide, narrow):
    kept = torch.cat([mask.flatten() for of_rank in (*wide, *narrow) for mask in of_rank]) != 0
    expect(abs(kept.double().mean() - 0.75) < 0.05, f"{where}: {1 - kept.double().mean():.0%} of "
           "the numbers are dropped, not 25%", "Dropout is to stay.")
    for a in range(len(wide)):
        expect(not torch.equal(narrow[a][0], narrow[a][1]) and not torch.equal(*wide[a][:2]),
               f"{where}: rank {a} drops the same in steps 0 and 1", "Each step draws anew: a seed "
               "that is set in each step must follow from the step, too.")
        for b in range(a):
            pair, one = f"ranks {b} and {a}", b // T == a // T
            equal = torch.equal(narrow[a][0], narrow[b][0])
            expect(equal or not one, f"{where}: {pair} hold the same numbers after the all-reduce, "
                   "and drop different ones", "Look at what both have before dropout, and after.")
            expect(not equal or one, f"{where}: {pair} have different rows, and drop the same "
                   "places of them", "Rows that are dropped alike are less noise averaged out: in "
                   "one process each row has its own.")
            expect(not torch.equal(wide[a][0], wide[b][0]), f"{where}: {pair} drop the same places "
                   "of the wide layer", "Each rank has its own part, or its own rows, of it: one "
                   "process would drop other places in each.")


# --- tied_weights ---------------------------------------------------------------------------------

def check_staged_gpt(program):
    return _compared(program, _look_at_staged_gpt, (ALL, {"steps": 4, "seed": 0}),
                     (GROUPS, lambda size: {"steps": 4, "seed": size}))


def _look_at_staged_gpt(where, settings, values):
    alone = partial(gpt_alone, **settings, lr=RATE["staged_gpt"], batch=8, n_layer=4)
    losses, right = alone()
    first, last = values[0]["weights"], values[-1]["weights"]
    where = f"{where}, {len(values)} stages"
    if len(values) > 1:
        apart = (first["token.weight"] - last["head.weight"]).abs().max().item()
        expect(apart < 1e-6, f"{where}: after {settings['steps']} steps token.weight of the first "
               f"and head.weight of the last are up to {apart:.2g} apart", "They begin alike. "
               "Which gradients has each of them had?")
    name, slips = f"{where}: the shared matrix", {}
    if not torch.allclose(first["token.weight"], right["token.weight"], atol=1e-6):
        slips = {f"trained by {what}": (alone(tied=both)[1]["token.weight"], hint)
                 for what, both, hint in TIED}
    _same(name, first["token.weight"], right["token.weight"], slips, "The copies are alike, and "
          "not what one process has: it takes each step by the sum of both gradients.")
    _same(f"{where}: the losses", values[-1]["losses"], losses)
    for rank, got in enumerate(values):
        for weight, tensor in got["weights"].items():
            _same(f"{where}, stage {rank}: {weight}", tensor, right[weight])


TIED = (("the mean of both gradients", lambda e, h: (e + h) / 2, "One matrix, used twice in one "
         "loss: gradients of two uses add up."),
        ("the embedding's gradient alone", lambda e, h: e, "What the head sees is lost."),
        ("the head's gradient alone", lambda e, h: h, "What the embedding sees is lost."),
        ("twice the sum of both gradients", lambda e, h: 2 * (e + h), "Each is in it twice."))


# --- stale_weights --------------------------------------------------------------------------------

def check_gathered_model(program):
    return _compared(program, _look_at_gathered_model, (ALL, {"steps": 8, "lr": 1.0, "seed": 0}),
                     (GROUPS, lambda size: {"steps": 8, "lr": 0.3, "seed": size}))


def _look_at_gathered_model(where, settings, values):
    right = flat_alone(**settings, max_norm=float("inf"), momentum=0.5)
    for place, got in enumerate(values):
        at = f"{where}, rank {place} of {len(values)}"
        all_awaited(got["missing"], at)
        _same(f"{at}: the loss of step 1", got["losses"][1], right["losses"][1], {
            "that of the first weights": (right["stale"][1], "Step 0 has changed the shards by "
                                          "then. Which numbers does the forward use?")})
    _each(where, values, "losses", right["losses"])
    _each(where, values, "held_out", right["held_out"][3::4], {
        "that of the weights before the step": (right["held_out_stale"][3::4], "Training is right. "
                                                "Which numbers does the evaluation use?")})
    _each(where, values, "weights", right["weights"], {
        "those before the last step": (right["before"], "The last step is lost.")})


# --- optimizer_before_sharding --------------------------------------------------------------------

def check_moved_gpt(program):
    return _compared(program, _look_at_moved_gpt, (ALL, {"steps": 3, "seed": 0}),
                     (GROUPS, lambda size: {"steps": 3, "seed": size}))


def _look_at_moved_gpt(where, settings, values):
    alone = partial(gpt_alone, lr=RATE["moved_gpt"], batch=12, seed=settings["seed"])
    (losses, right), (_, start) = alone(settings["steps"]), alone(0)
    for rank, got in enumerate(values):
        at = f"{where}, rank {rank} of {len(values)}"
        still = [name for name in got["weights"] if torch.equal(got["weights"][name], start[name])]
        expect(not still, f"{at}: {len(still)} of {len(got['weights'])} weights are what they were "
               f"before training: {', '.join(still[:3])} ...", "Does the optimizer have them? "
               "Compare its parameters with the model's, by `is`.")
        _same(f"{at}: the losses", got["losses"], losses)
        for name, weight in got["weights"].items():
            _same(f"{at}: {name}", weight, right[name])
        scatters = sum(n for name, n in got["calls"].items() if "reduce_scatter" in name)
        expect(len(values) == 1 or scatters >= settings["steps"] * 3, f"{at}: {scatters} "
               f"reduce-scatters in {settings['steps']} steps, not 3 a step", "Two blocks and the "
               "rest stay sharded by fully_shard: that is what the run was moved for.")


# --- shard_norm -----------------------------------------------------------------------------------

def check_flat_model(program):
    return _compared(program, _look_at_flat_model,
                     (ALL, {"steps": 6, "max_norm": 0.5, "seed": 0}),
                     (GROUPS, lambda size: {"steps": 6, "max_norm": 1.5, "seed": size}))


def _look_at_flat_model(where, settings, values):
    R, alone = len(values), partial(flat_alone, **settings | {"lr": RATE["flat_model"]})
    right = alone()
    own = torch.stack([part.norm() for part in right["gradient"].chunk(R)])
    logged = [f"{got['norms'][0]:.3g}" for got in values]
    hint = f"The ranks log {', '.join(logged)}." if len(set(logged)) > 1 else ""
    for rank, got in enumerate(values):
        _same(f"{where}, rank {rank} of {R}: the norm of step 0", got["norms"][0],
              right["norms"][0], {
                  "that of this rank's shard": (own[rank], "The gradient is one vector, and this "
                                                "rank has a part of it."),
                  "the sum of the shards' norms": (own.sum(), "Norms do not add up; squares do."),
                  "the largest of the shards' norms": (own.max(), "That is a part of the vector."),
                  "the root of the mean square": (own.norm() / R**0.5, "Squares add up; a mean of "
                                                  "them is too small.")}, hint)
    _each(where, values, "norms", right["norms"], hint="That of step 0 is right. When is the "
          "gradient clipped, and by which norm?")
    _each(where, values, "losses", right["losses"])
    _each(where, values, "weights", right["weights"])


SHARDED = tuple(Exercise(program, check, hints) for program, check, hints in (
    (sharded.wide_layer, check_wide_layer, (
        "Print what F.dropout gets and what it returns, on the two ranks of a pair, in step 0.",
        "y is the same on both ranks of a pair: they must drop the same of it. h is another part "
        "on each: they must not. And other rows are dropped otherwise.",
        "Lab 08: shared, own = dropout_seeds(seed, row, column, tensor); torch.manual_seed(shared) "
        "before the loop; with own_random(own): around the dropout of h.")),
    (sharded.staged_gpt, check_staged_gpt, (
        "The two copies are alike before the first step. When do they part, and which gradients "
        "have they had by then?",
        "In one process the matrix has one gradient: that of its use as embedding and that of its "
        "use as head, added up. Here each end has one of the two.",
        "A group of the first and the last rank; after backward, before the step, an all-reduce of "
        "the shared matrix's gradient in it. A single rank has nothing to do.")),
    (sharded.gathered_model, check_gathered_model, (
        "Run two steps with lr=0 and with lr=100. Which weights give the loss of step 1?",
        "Follow the shard: when does the step change it, when is it sent, when do the numbers that "
        "arrive come into the model? Then the same for the evaluation.",
        "Step, start the gather of the shard, do something else, wait, copy into flat, evaluate.")),
    (sharded.moved_gpt, check_moved_gpt, (
        "Which weights have changed after a step? And which gradients are there?",
        "fully_shard puts new parameters, DTensors, in the place of the model's. The optimizer "
        "keeps those that it was given.",
        "Make the optimizer after the last fully_shard, that of the root: it has the embedding.")),
    (sharded.flat_model, check_flat_model, (
        "Compare the norms of step 0 on four ranks with that of one rank. What do squares give?",
        "Each rank has a part of the vector. The norm of the vector follows from the parts' "
        "squares, and one factor scales all parts.",
        "square = shard.grad.square().sum(); all-reduce it in the group; norm = its root; "
        "shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)")),
))
