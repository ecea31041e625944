"""The checks of clinic/sharding.py, in float64: results may differ by float32's rounding."""

import contextlib
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from ranklab.checks.clinic.runs import ELSEWHERE, FOUR, GROUPS, SAME, near, runs, traffic_and
from ranklab.checks.exercise import Exercise
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.clinic import sharding
from ranklab.clinic.sharding import (
    BLOCKS, CLIP, GATHER, HELD_OUT, KEEP, LOAD, OPTIMIZER, OWN, ROOT, SEEDS, SEND, STEP, SUM_ENDS,
)

IN_GROUPS = "in groups of 1 and 3 ranks"  # it does not end


def _runs(program, answer, *settings, groups=(FOUR, GROUPS, FOUR), **options):
    """Return the runs in float64. A group of three has a different seed than a group of one, and so
    different rows: that shows values that come from the other group.
    """
    return runs(program, answer, *(zip(groups, settings)), exact=True, **options)


# --- dropout_seeds --------------------------------------------------------------------------------

@contextlib.contextmanager
def _masks():
    """Record the factors that F.dropout multiplies by."""
    masks, dropout = [], F.dropout

    def noting(input, p=0.5, training=True, inplace=False):
        masks.append(dropout(torch.ones_like(input), p, training).detach())
        return input * masks[-1]

    with mock.patch.object(F, "dropout", noting):
        yield masks


def check_wide_layer(program):
    for run in _runs(program, sharding.wide_layer, {"steps": 4, "tensor": 2, "seed": 0},
                     lambda size, _: {"steps": 4, "tensor": size, "seed": size},
                     {"steps": 4, "tensor": 1, "seed": 2}, one=None, watch=_masks):
        T, D = run.settings["tensor"], run.size // run.settings["tensor"]
        counts = [len(result.watched) for result in run.found]
        other = next((count for count in counts if count != 8), 8)
        expect(other == 8, f"{run.where}: a rank calls F.dropout {other} times in 4 steps, not "
               "twice a step", ("Keep both dropouts, as F.dropout or nn.Dropout: the check "
                                     "reads their masks."))
        wide, narrow = ([got.watched[first::2] for got in run.found] for first in (0, 1))
        _look_at_masks(run.where, T, wide, narrow)
        masks = [(torch.cat([torch.cat([wide[T * d + t][step] for t in range(T)], 1)
                             for d in range(D)]), torch.cat([each[step] for each in narrow[::T]]))
                 for step in range(4)]
        one = run.alone(BY_MASKS, tensor=1, masks=masks, parts=D)
        run.equal([{"losses": [of_step[rank // T] for of_step in one["losses"]], "weights": {
            name: right.chunk(T, DIMS[name])[rank % T] if name in DIMS else right
            for name, right in one["weights"].items()}} for rank in range(run.size)],
            hint="The masks are right, but one process with the same masks gets other results.",
            roundings=0)
        yield f"as one process, {run.where}"


DIMS = {"up.weight": 0, "down.weight": 1}  # in which they are cut
# All rows on one rank, which drops what it is told: the losses are those of each part of the rows.
BY_MASKS = (
    "group=None):", "group=None, masks=(), parts=1):",
    'F.dropout(F.relu(model["up"](x)), p)', 'F.relu(model["up"](x)) * masks[step][0].to(device())',
    'F.dropout(reduce_from_region(model["down"](h), inside), p)',
    'reduce_from_region(model["down"](h), inside) * masks[step][1].to(device())',
    "targets[:, -1])",
    "targets[:, -1], reduction='none')\n        each, loss = loss, loss.mean()",
    "losses.append(loss.item())",
    "losses.append([rows.mean().item() for rows in each.chunk(parts)])")
STAYS = "Keep the dropout."
ANEW = ("Each step must draw a new mask: a seed that is set in every step must depend on the step "
        "as well.")
BEFORE = "Compare what both ranks have before this dropout, and after it."
OTHER_ROWS = ("In one process each row has its own mask. If different rows share one, less of the "
              "noise averages out.")
OTHER_PART = ("Each rank has its own part, or its own rows, of the wide layer: one process would "
              "drop different places in each.")


def _look_at_masks(where, T, wide, narrow):
    keep = torch.cat([mask.flatten() for of_rank in (*wide, *narrow) for mask in of_rank]) != 0
    expect(abs(keep.double().mean() - 0.75) < 0.05, f"{where}: {1 - keep.double().mean():.0%} of "
           "the numbers are dropped, not 25%", STAYS)
    for a in range(len(wide)):
        expect(not torch.equal(narrow[a][0], narrow[a][1]) and not torch.equal(*wide[a][:2]),
               f"{where}: rank {a} drops the same in steps 0 and 1", ANEW)
        for b in range(a):
            pair, one = f"ranks {b} and {a}", b // T == a // T
            equal = torch.equal(narrow[a][0], narrow[b][0])
            expect(equal or not one, f"{where}: {pair} share a wide layer, but drop different "
                                     "places in the second dropout of a step", BEFORE)
            expect(not equal or one, f"{where}: {pair} have different rows, but drop the same "
                                     "places in them", OTHER_ROWS)
            expect(not torch.equal(wide[a][0], wide[b][0]), f"{where}: {pair} drop the same places "
                   "of the wide layer", OTHER_PART)


# --- tied_weights ---------------------------------------------------------------------------------

SUM = "dist.all_reduce(end.weight.grad, group=ends)"
TIED = (
    Slip("It is trained with the mean of both gradients. The matrix is used twice in one loss, so "
         "the gradients of the two uses add up.",
         (SUM, f"{SUM}\n            end.weight.grad /= 2")),
    Slip("It is trained with the embedding's gradient only. The head's gradient is lost.",
         (SUM, "dist.broadcast(end.weight.grad, group=ends, group_src=0)")),
    Slip("It is trained with the head's gradient only. The embedding's gradient is lost.",
         (SUM, "dist.broadcast(end.weight.grad, group=ends, group_src=1)")),
    Slip("It is trained with twice the sum of both gradients. Each one must count only once.",
         (SUM, f"{SUM}\n            end.weight.grad *= 2")))
APART = "They start out equal. Which gradients has each of them had since?"
BOTH = ("The copies agree with each other, but not with one process, which takes each step with "
        "the sum of both gradients.")


def check_staged_gpt(program):
    for run in _runs(program, sharding.staged_gpt, {"steps": 4, "seed": 0},
                     lambda size, _: {"steps": 4, "seed": size}):
        one, stages = run.one, [result["weights"] for result in run.found]
        one["weights"]["head.weight"] = one["weights"]["token.weight"]
        if run.size > 1:
            apart = (stages[0]["token.weight"] - stages[-1]["head.weight"]).abs().max().item()
            expect(apart < 1e-6, f"{run.where}: after 4 steps token.weight of the first and "
                   f"head.weight of the last stage are up to {apart:.2g} apart", APART)
        run.equal([{"token.weight": one["weights"]["token.weight"]}] + [{}] * (run.size - 1), TIED,
                  BOTH, of=lambda result: result["weights"], roundings=0)
        run.equal([{"losses": [] if stage is not stages[-1] else one["losses"],
                    "weights": {name: one["weights"][name] for name in stage}}
                   for stage in stages], roundings=0)
        yield f"as one process, {run.where}"


# --- stale_weights --------------------------------------------------------------------------------

FORWARD = Slip("That is the loss of the initial weights, but step 0 has already changed the "
               "shards. Which numbers does the forward use?",
               (STEP + GATHER, f"{GATHER}        coming.wait()\n{STEP}"),
               (STEP + GATHER, KEEP + SEND + STEP, "SGD([shard], lr,", "SGD([shard], lr / 4,"))
BY_WHICH = ("Which weights does each step compute with? Print their sum next to the sum in a run "
            "with one process.")
EVALUATED = Slip("That is the loss of the weights before the step. Training is right. Which "
                 "numbers does the evaluation use?", (LOAD + HELD_OUT, HELD_OUT + LOAD))
END = Slip("These are the weights from before the last step, so that step is lost.", (
    LOAD, f"        before = flat.clone()\n{LOAD}", '"weights": flat', '"weights": before'))


def check_gathered_model(program):
    for run in _runs(program, sharding.gathered_model, {"steps": 8, "lr": 1.0, "seed": 0},
                     lambda size, _: {"steps": 6, "lr": 0.3, "seed": size}):
        one = run.one
        run.awaited()
        run.equal({"the loss of step 1": one["losses"][1]}, [FORWARD], BY_WHICH, roundings=0,
                  of=lambda result: {"the loss of step 1": result["losses"][1]})
        run.equal(one.part("losses"), hint=BY_WHICH, roundings=0)
        run.equal(one.part("held_out"), [EVALUATED], roundings=0)
        run.equal(one.part("weights"), [END], roundings=0)
        yield f"as one process, {run.where}"


# --- optimizer_before_sharding --------------------------------------------------------------------

HAS_THEM = ("Does the optimizer hold these weights? Compare its parameters with the model's, using "
            "`is`.")
SHARDED = "Keep the two blocks and the rest sharded by fully_shard: that is why the run was moved."
OTHERS = "The extra ones stay in memory, and no step changes them."


def _given(optimizer):
    """Return how many parameters an optimizer has."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def check_moved_gpt(program):
    for run in _runs(program, sharding.moved_gpt, {"steps": 3, "seed": 0},
                     lambda size, _: {"steps": 3, "seed": size},
                     watch=partial(traffic_and, _given)):
        for place, result in enumerate(run.found):
            weights = result["weights"]
            if near(weights, run.one["weights"], roundings=0):
                continue
            start = run.alone(steps=0)["weights"]
            still = [name for name in weights if near(weights[name], start[name], None, 0)]
            expect(not still, f"{run.at(place)}: {len(still)} of {len(weights)} weights are what "
                   f"they were before training: {', '.join(still[:3])} ...", HAS_THEM)
        run.equal(run.one, roundings=0)
        for place, result in enumerate(run.found):
            scatters = sum("reduce_scatter" in op.name for op in result.watched.ops)
            expect(run.size == 1 or scatters >= 9, f"{run.at(place)}: {scatters} reduce-scatters "
                   "in 3 steps, not 3 a step", SHARDED)
            count, own = result.watched.of_optimizers, len(result["weights"])
            expect(count <= own, f"{run.at(place)}: the optimizer has {count} parameters, and the "
                   f"model {own}", OTHERS)
        yield f"as one process, {run.where}"


# --- shard_norm -----------------------------------------------------------------------------------

SQUARE = "dist.all_reduce(square, group=group)"
SLIPS_OF_NORM = (
    Slip("That is the norm of this rank's shard. The gradient is one vector, and this rank holds "
         "only part of it.", (SQUARE, "pass")),
    Slip("That is the sum of the shards' norms. Norms do not add up; squares do.",
         (SQUARE, "pass", "norm = square.sqrt()",
          "norm = square.sqrt()\n        dist.all_reduce(norm, group=group)")),
    Slip("That is the largest of the shards' norms, and covers only part of the vector.",
         (SQUARE, SQUARE.replace("square,", "square, dist.ReduceOp.MAX,"))),
    Slip("That is the root of the mean square. Add up the squares; their mean is too small.",
         (SQUARE, f"{SQUARE}\n        square /= R")))
LENGTHENED = Slip("A gradient that is short enough must stay unchanged: the factor is at most 1.",
                  (".clamp(max=1)", ""))
CLIPPED = "The norm of step 0 is right. When is the gradient clipped, and by which norm?"


def check_flat_model(program):
    for run in _runs(program, sharding.flat_model, {"steps": 6, "max_norm": 0.5, "seed": 0},
                     lambda size, _: {"steps": 6, "max_norm": 1.2, "seed": size},
                     {"steps": 3, "max_norm": 1e3, "seed": 1}):
        one, logged = run.one, [f"{result['norms'][0]:.3g}" for result in run.found]
        hint = f"The ranks log {', '.join(logged)}, but one gradient has only one norm."
        run.equal({"the norm of step 0": one["norms"][0]}, SLIPS_OF_NORM,
                  hint if len({*logged}) > 1 else SAME, roundings=0,
                  of=lambda result: {"the norm of step 0": result["norms"][0]})
        run.equal(one.part("norms"), [LENGTHENED], CLIPPED, roundings=0)
        run.equal(one, roundings=0)
        yield f"as one process, {run.where}"


SOME_RANKS = "ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)"
BY_HAND = """        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= R
"""
IF_ENDS, FACTOR = "".join(SUM_ENDS.splitlines(True)[:2]), "shard.grad *= (max_norm"
SHARDING = tuple(Exercise(program, check, hints, mistakes) for program, check, hints, mistakes in (
    (sharding.wide_layer, check_wide_layer, (
        "Print what F.dropout gets and what it returns, on the two ranks of a pair, in step 0.",
        "Both ranks of a pair have the same y, so they need the same mask. They have different "
        "parts of h, and other pairs different rows: those need different masks.",
        "Lab 08: shared, own = dropout_seeds(seed, row, column, tensor); torch.manual_seed(shared) "
        "before the loop; with own_random(own): around the dropout of h."), (
        Slip(OTHER_PART, (SEEDS, "    torch.manual_seed(seed)\n", *OWN)),
        Slip(BEFORE, (SEEDS, "    torch.manual_seed(seed + rank)\n", *OWN,
                      "losses.append(loss.item())", "loss = loss.detach()\n        dist.all_reduce("
                      "loss, group=inside)\n        losses.append(loss.item() / tensor)")),
        Slip(STAYS, ("p=0.25", "p=0.0")),
        Slip(OTHER_ROWS, ("dropout_seeds(seed, row, column", "dropout_seeds(seed, 0, column")),
        Slip(ANEW, ("        with own_random(own):", "        torch.manual_seed(shared)\n"
                    "        with own_random(own):")),
        Slip(IN_GROUPS, (SOME_RANKS, "ranks, rank = [*range(4)], dist.get_rank()")))),
    (sharding.staged_gpt, check_staged_gpt, (
        "The two copies are equal before the first step. When do they diverge, and which gradients "
        "has each one had by then?",
        "In one process the matrix has one gradient: the sum of those from its use as embedding "
        "and as head. Here each end has only one of the two.",
        "Make a group of the first and the last rank. In it, all-reduce the shared matrix's "
        "gradient after backward and before the step. A single rank has nothing to do."), (
        *TIED,
        Slip(BOTH, (SUM_ENDS + STEP, f"{STEP}{IF_ENDS}            dist.all_reduce(end.weight.data, "
                    "group=ends)\n            end.weight.data /= 2\n")),
        Slip(APART, (SUM_ENDS + STEP, STEP + SUM_ENDS)),
        Slip(IN_GROUPS, ("[ranks[0], ranks[-1]]", "[0, 3]")))),
    (sharding.gathered_model, check_gathered_model, (
        "Run two steps with lr=0 and with lr=100. Which weights give the loss of step 1?",
        "Follow the shard: when does the step change it, when is it sent, and when do the numbers "
        "that arrive get into the model? Then ask the same about the evaluation.",
        "Step, start the gather of the shard, do something else, wait, copy into flat, evaluate."),
        (FORWARD, EVALUATED, END,
         Slip(BY_WHICH, ("[shard], lr,", "[shard], lr / 2,")),
         Slip("of its calls were never waited for", ("        coming.wait()\n", "")))),
    (sharding.moved_gpt, check_moved_gpt, (
        "Which weights have changed after a step? And which of them have gradients?",
        "fully_shard replaces the model's parameters with new ones, DTensors. The optimizer keeps "
        "those it was given.",
        "Make the optimizer after the last fully_shard, the root's: the root holds the embedding."),
     (
        Slip(HAS_THEM, (ROOT + OPTIMIZER, OPTIMIZER + ROOT),
             (BLOCKS + ROOT + OPTIMIZER, OPTIMIZER.replace("lr,", "9 * lr,") + BLOCKS + ROOT)),
        Slip(SHARDED, (BLOCKS, ""), (BLOCKS + ROOT, "", "        loss.backward()\n", BY_HAND,
                                     "weight.full_tensor()", "weight")),
        Slip(OTHERS, (BLOCKS + ROOT + OPTIMIZER, f"{OPTIMIZER}{BLOCKS}{ROOT}    optimizer."
                      'add_param_group({"params": [*model.parameters()]})\n')),
        Slip(ELSEWHERE, ("DeviceMesh.from_group(group, device().type) if group else None",
                         "None")))),
    (sharding.flat_model, check_flat_model, (
        "Compare the norms of step 0 on four ranks with the norm on one rank. What do their "
        "squares tell you?",
        "Each rank holds part of the vector. The norm of the vector follows from the parts' "
        "squares, and one factor scales all parts.",
        "square = shard.grad.square().sum(); all-reduce it in the group; norm = its root; "
        "shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)"), (
        *SLIPS_OF_NORM, LENGTHENED,
        Slip(CLIPPED, (CLIP, CLIP.replace(FACTOR, "nn.utils.clip_grad_norm_([shard], max_norm)\n"
                                          "        shard.grad *= 1 + 0 * (max_norm"))),
        Slip(ELSEWHERE, (SQUARE, "dist.all_reduce(square)")))),
))
