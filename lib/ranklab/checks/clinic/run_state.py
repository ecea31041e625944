"""The checks of clinic/run_state.py: a run goes wrong midway, or resumes wrongly after a stop."""

import contextlib
import hashlib
from collections import Counter
from types import SimpleNamespace

import torch
from torch import nn

from ranklab.checks.clinic.runs import FOUR, GROUPS, SAME, runs
from ranklab.checks.exercise import Exercise
from ranklab.checks.failures import STUCK
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.clinic import run_state
from ranklab.clinic.shards import SIZE, Shard, stored_shards
from ranklab.meter import MemoryCurve

STUCK_HERE = "All ranks in the run must make the same calls."


def _runs(program, answer, situations, one, stuck=STUCK_HERE):
    """Return the runs of {name: settings}, each on all ranks, then in groups."""
    cases = [(groups, settings, name) for groups in (FOUR, GROUPS)
             for name, settings in situations.items()]
    return runs(program, answer, *cases, one=one, failures={STUCK: stuck})


# --- float16 --------------------------------------------------------------------------------------

HALVES = {"as in the lab": {}, "scale=2**20": {"scale": 2.0**20, "steps": 8},
          "growth=2": {"growth": 2, "steps": 12}}
OWN_PART = """\
        at = torch.arange(step * batch, (step + 1) * batch).tensor_split(ranks)[rank] % len(x)
        with torch.autocast(device().type, torch.float16):
            loss = F.cross_entropy(model(x[at]), y[at])
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
"""
ALL_PARTS = """\
        losses.append([])
        optimizer.zero_grad()
        for at in torch.arange(step * batch, (step + 1) * batch).tensor_split({0}):
            with torch.autocast(device().type, torch.float16):
                loss = F.cross_entropy(model(x[at % len(x)]), y[at % len(x)])
            losses[-1].append(loss.item())
            scaler.scale(loss).backward()
"""
HALF = {"through": torch.float16, "roundings": 2**15}  # near: half a percent
STEPPED = ("A step has spoilt the weights: was its gradient finite on all ranks, and divided by "
           "the scale? What did a rank check before it stepped?")
HALVED = ("An overflow on any rank must halve the scale on all ranks. Keep float16, `scale` and "
          "`growth` as they are.")
TOO_LOW = "`scale` and `growth` are given. Only a step that overflows halves the scale."
SKIPPED = ("Skip a step only if the sum over ranks overflows. Otherwise, step with the mean of the "
           "gradients, divided by the scale.")


def check_half_digits(half_digits):
    for run in _runs(half_digits, run_state.half_digits, HALVES, lambda size, _: (
            (OWN_PART, ALL_PARTS.format(size), "p.grad /= ranks", f"p.grad /= {size}"), {})):
        one = run.one
        if run.found[0]["scale"] != one["scale"]:  # perhaps it divides before backward: fewer halve
            parts = ALL_PARTS.format(run.size).replace("scale(loss)", f"scale(loss / {run.size})")
            before = run.alone((OWN_PART, parts, "p.grad /= ranks", "p.grad /= 1"))
            one = before if run.found[0]["scale"] == before["scale"] else one
        for place, result in enumerate(run.found):
            losses, ends = torch.tensor(result["losses"]), (
                f"{run.at(place)}: the scale ends at {result['scale']:g}; one process that "
                f"takes the ranks' parts in turn has {one['scale']:g}")
            bad = (~losses.isfinite()).nonzero()
            expect(not len(bad), f"{run.at(place)}: the loss is not finite from step "
                   f"{int(bad[0, 0]) if len(bad) else 0} on", STEPPED)
            expect(result["scale"] <= one["scale"], ends, HALVED)
            expect(result["scale"] == one["scale"], ends, TOO_LOW)
        run.equal([{"losses": [of_step[place] for of_step in one["losses"]]}
                   for place in range(run.size)], **HALF)
        run.equal(one.part("weights"), hint=SKIPPED, **HALF)
    yield ("no loss is NaN, with 4, 3 and 1 ranks, from different scales, with overflows at "
           "different steps")
    yield "all ranks skip the same steps and have one scale; weights as in one process"


# --- memory ---------------------------------------------------------------------------------------

@contextlib.contextmanager
def _peak():
    """Measure the peak; its `bytes` is the largest sum of bytes alive at once."""
    peak = SimpleNamespace()
    with MemoryCurve(nn.Identity()) as curve:
        yield peak
    peak.bytes = curve.peak_bytes


GRAPH = ("Validating 360 images creates 213,120 bytes of activations. A number that you keep holds "
         "the graph that it came from, as long as you keep it. You keep two numbers.")
EACH_STEP = "Rank 0 validates after each step, and returns the numbers of all steps."


def check_validated_digits(validated_digits):
    first, all_runs = {}, []
    for run in runs(validated_digits, run_state.validated_digits, *(
            (groups, {"steps": steps} | more) for groups, more in (
                (FOUR, {}), (GROUPS, {"batch": 36})) for steps in (3, 7)), watch=_peak):
        all_runs.append(run)
        of_three = first.setdefault(run.members, run)
        for place, (result, less) in enumerate(zip(run.found, of_three.found)):
            growth = (result.watched.bytes - less.watched.bytes) / 4
            expect(growth <= 1000, f"{run.at(place)}: each step leaves {growth:,.0f} more bytes",
                   GRAPH if growth > 1e5 else
                   "Something is kept from each step: a plain number takes only 4 bytes.")
    yield "7 steps take the memory of 3, on every rank"
    for run in all_runs:
        one, counts = run.one, tuple(len(run.found[0][name]) for name in ("losses", "sure"))
        expect(set(counts) == {run.settings["steps"]}, f"{run.at(0)}: it returns {counts[0]} and "
               f"{counts[1]} numbers, not {run.settings['steps']} of each", EACH_STEP)
        run.equal([one, *[one | {"losses": [], "sure": []}] * (run.size - 1)])
    yield "all numbers of each validation are there; they and the weights as in one process"


# --- a shard --------------------------------------------------------------------------------------

def _stores():
    """Return {what was done to the shards: {"shards": the result}}."""
    whole, end = stored_shards(()), 32 * 128 + SIZE
    label = whole[5].content[end - 7] ^ 1  # still one of 0 to 9
    hard = bytearray(whole[2].content)
    hard[1:end - SIZE:2] = (byte ^ 128 for byte in hard[1:end - SIZE:2])  # each number's sign
    hard = Shard(bytes(hard), hashlib.sha256(hard).hexdigest())
    in_a_row = stored_shards([(number, 999, b"\xff\x7f") for number in (4, 5, 6, 7)])
    return {"as in the lab": {},
            "one bit of a label is flipped":
                {"shards": stored_shards([(5, end - 7, bytes([label]))])},
            "the end of a shard is zeros": {"shards": stored_shards([(3, end - 512, bytes(512))])},
            "four shards in a row are damaged": {"shards": in_a_row, "steps": 6},
            "negatives, written as such": {"shards": [*whole[:2], hard, *whole[3:]], "steps": 6}}


OWN_SHARD = ("        shard = shards[(step * ranks + rank) % len(shards)]\n"
             "        x, y = shard.batch()\n")
ALL_WHOLE_SHARDS = """\
        read = [shards[(step * {0} + rank) % len(shards)] for rank in range({0})]
        whole = [hashlib.sha256(shard.content).hexdigest() == shard.sha256 for shard in read]
        x, y = map(torch.cat, zip(*([part[:len(part) * is_whole] for part in shard.batch()]
                                    for shard, is_whole in zip(read, whole))))
"""
CHECKSUM = "if hashlib.sha256(shard.content).hexdigest() != shard.sha256:"
SLIPS_OF_SHARDS = (
    Slip("It trains on a shard that is not what was written. Each shard comes with its checksum: "
         "compare it before use.", (CHECKSUM, "if False:"), (CHECKSUM, "if x.abs().max() > 10:"),
         (CHECKSUM, "if F.cross_entropy(model(x), y) > 4:")),
    Slip("Skipped images must not be counted either: the mean is over the images that all ranks "
         "together train on.", ("float(len(y))", f"{SIZE}.0")))
NO_PART = ("Skip only damaged shards; leave each other one in its step and on its rank. The "
           "checksum, not the loss, tells which is damaged; NaN times 0 is NaN.")
NOTHING = "A rank with nothing to contribute still joins every collective, with zeros."


def check_stored_digits(stored_digits):
    for run in _runs(stored_digits, run_state.stored_digits, _stores(), lambda size, _: (
            (OWN_SHARD, ALL_WHOLE_SHARDS.format(size), *run_state.STORED[0]), {}), stuck=(
                f"{STUCK_HERE} {NOTHING}")):
        run.equal(run.one.part("losses"), SLIPS_OF_SHARDS, NO_PART)
        run.equal(run.one.part("weights"), SLIPS_OF_SHARDS)
    yield "a damaged shard takes no part: a line of a log, zeros at its end, one bit of a label"
    yield "also where all ranks' shards are damaged; an intact shard takes part, however hard it is"


# --- an epoch -------------------------------------------------------------------------------------

RESUMES = {"as in the lab": {}, "two stops": {"stops": (4, 9)}, "no stop": {"stops": ()},
           "a stop at the end of an epoch": {"stops": (6,)},
           "three stops in the third epoch": {"stops": (13, 14, 16), "steps": 18},
           "batch=100": {"stops": (9,), "batch": 100, "steps": 15}}
NEXT = ("Resume with the next batch of the epoch. The checkpoint, or its step, must tell which "
        "one: in any epoch, with a smaller last batch, after a second stop.")
ANOTHER_ORDER = "These are the same images, but not in the same order as without a stop."
AS_SAVED = "The data are right. Is everything else restored as it was saved?"


def check_resumed_digits(resumed_digits):
    for run in _runs(resumed_digits, run_state.resumed_digits, RESUMES, lambda size, _: (
            ("seen += mine.tolist()", "seen.append(at)"), {"stops": ()})):
        one = run.one
        steps, rights = len(one["losses"]), [{"seen": torch.cat(
            [at.tensor_split(run.size)[place] for at in one["seen"]])} for place in range(run.size)]
        for place, result in enumerate(run.found):
            expect(len(result["losses"]) == steps, f"{run.at(place)}: it trains "
                   f"{len(result['losses'])} steps, not {steps}",
                   "A resumed run does only what is left, and no step twice.")
            more = Counter(result["seen"]) - Counter(rights[place]["seen"].tolist())
            expect(not more, f"{run.at(place)}: {len(more)} images are trained on more often than "
                   "in a run without a stop", NEXT)
            count, due = len(result["seen"]), len(rights[place]["seen"])
            expect(count == due, f"{run.at(place)}: it trains on {count} images; on {due} without "
                   "a stop", ("The rest of the epoch is still to be trained on, down to its last "
                              "image."))
        run.equal(rights, hint=ANOTHER_ORDER, through=None, roundings=0)
        run.equal(one.part("losses"), hint=AS_SAVED)
        run.equal(one.part("weights"))
    yield "each image as often as without a stop, and in the same order, on 4, 3 and 1 ranks"
    yield "stopped in any epoch, at its end, twice, in a small batch; losses as in one process"


# --- the files of all ranks -----------------------------------------------------------------------

SPLITS = {"as in the lab": {}, "all have saved": {"first": 4}, "rank 0 goes first": {"first": 0},
          "a save every 3 steps": {"every": 3, "stop": 9, "first": 2},
          "no rank has saved, except in the last step": {"every": 5, "stop": 5, "first": 0},
          "a stop between saves": {"stop": 7, "first": 1}}
NEWEST_OF_ALL = "Which is the newest state that all ranks have saved, and is it still there?"
A_NEWER_ONE = "All ranks of the group have a newer state than this one."
FROM_ZERO = "Start from zero only if there is no state that all ranks have."
OF_ONE_STEP = ("but not with the state that the ranks had then: every rank needs the rows and the "
               "momentum of that step.")


def check_split_digits(split_digits):
    for run in _runs(split_digits, run_state.split_digits, SPLITS,
                     lambda size, _: ((), {"stop": 0})):
        every, stop, first = ({"every": 4, "stop": 8, "first": 1} | run.settings).values()
        one, saved = run.one, stop // every * every
        right = saved - every if saved == stop and first < run.size else saved
        for place, result in enumerate(run.found):
            start = stop + len(one["losses"]) - len(result["losses"])
            too_new = (f"With a save every {every} steps the lost rank does not have step {start}: "
                       f"the break comes before it saves. {NEWEST_OF_ALL} `losses` keeps those of "
                       "the steps that are lost.")
            expect(start == right, f"{run.at(place)}: it returns {len(result['losses'])} losses, "
                   f"as if it continued from step {start}, not {right}",
                   too_new if start > right else A_NEWER_ONE if start else FROM_ZERO)
        run.equal({"losses": one["losses"][:stop] + one["losses"][right:]},
                  hint=f"It continues from step {right}, {OF_ONE_STEP}")
        run.equal([{"rows": rows} for rows in one["rows"].tensor_split(run.size)])
    yield "it continues from the newest step that all ranks have, whichever rank was first"
    yield ("no further step is lost where all ranks have saved; it starts anew where none has; as "
           "in one process")


SCALE, NO_GRAD = run_state.SCALE, run_state.VALIDATED[0][0]
UNSCALE, STEP = f"{SCALE}        scaler.unscale_(optimizer)\n", "        scaler.step(optimizer)\n"
NO_GRAPH = "            logits = model(held_out)\n"
LOSS = "losses.append(F.cross_entropy(logits, labels)"
ORDER = "order.split(batch)[step % in_epoch:]"
NEWEST = "dist.all_reduce(start, dist.ReduceOp.MIN, group=group)"
OWN = "state = torch.load(Path(disk, str(start.item())), map_location=device())"
RUN_STATE = (
    Exercise(run_state.half_digits, check_half_digits, mistakes=(
        Slip(STEPPED, (SCALE, f"{UNSCALE}        dist.barrier(group)\n")),
        Slip(HALVED, (SCALE, UNSCALE, STEP, "        for p in model.parameters():\n"
                      f"            p.grad.nan_to_num_(0.0, 0.0, 0.0)\n{STEP}"),
             ("torch.float16", "torch.bfloat16"),
             (SCALE, f"{UNSCALE}        fine = torch.stack([p.grad.isfinite().all() for p in "
              "model.parameters()]).all().float()\n        dist.all_reduce(fine, dist.ReduceOp."
              "MIN, group=group)\n", STEP, f"        if fine:\n    {STEP}")),
        Slip(TOO_LOW, ("init_scale=scale", "init_scale=1024.0")),
    ), hints=(
        "In which step does a loss first become NaN? Print scaler.get_scale() on each rank around "
        "that step.",
        "Where in a step does GradScaler look for infinities, and what does each rank hold in "
        "p.grad then?",
        "Leave out scaler.unscale_: step() does it, after the gradients are summed. If you clip, "
        "unscale after the all-reduces.")),
    Exercise(run_state.validated_digits, check_validated_digits, mistakes=(
        Slip(GRAPH, (NO_GRAD, f"            model.eval()\n{NO_GRAPH}            model.train()\n"),
             (NO_GRAD, NO_GRAPH, LOSS, f"{LOSS}.detach()")),
        Slip(EACH_STEP, (NO_GRAD, f"            del losses[:-1], sure[:-1]\n{NO_GRAPH}")),
        Slip(SAME, (NO_GRAD, NO_GRAD.replace("held_out", "x[at]"),
                    LOSS, LOSS.replace("labels", "y[at]"))),
    ), hints=(
        "Run 4 steps and 8 steps in a MemoryCurve on each rank: how many bytes does each step "
        "leave behind?",
        "What does a tensor with a grad_fn keep alive, and until when?",
        "with torch.no_grad(): logits = model(held_out). Or .item() for everything that is kept.")),
    Exercise(run_state.stored_digits, check_stored_digits, mistakes=(
        *SLIPS_OF_SHARDS,
        Slip(NO_PART, (CHECKSUM, "if False:", "        optimizer.step()\n",
                       "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
                       "        optimizer.step()\n")),
        Slip(NOTHING, ("x, y = x[:0], y[:0]", "continue")),
    ), hints=(
        "Which shard does each rank read in step 5, and what is its x.abs().max()?",
        "Each shard comes with the checksum that its content must give: "
        "hashlib.sha256(...).hexdigest(). And a rank that skips its shard must not leave the "
        "others waiting.",
        "x, y = x[:0], y[:0]: the sum over no images is 0, its gradients are zeros, and the count "
        "is 0.")),
    Exercise(run_state.resumed_digits, check_resumed_digits, mistakes=(
        Slip(NEXT, (ORDER, "order[step * batch % len(x):].split(batch)"),
             (ORDER, ORDER.replace("in_epoch", "in_epoch if last == steps else 0")),
             ("step // in_epoch", "-(-step // in_epoch)", ORDER, "order.split(batch)"),
             (ORDER, "(order.split(batch) if len(losses) == step and step % in_epoch == 0 else "
              "order.flip(0).split(batch)[step % in_epoch:])")),
        Slip(ANOTHER_ORDER, ("mine.tolist()", "sorted(mine.tolist())")),
        Slip(AS_SAVED, ('            optimizer.load_state_dict(state["optimizer"])\n', "")),
    ), hints=(
        "Collect `seen` from all ranks, and count how often each image appears in two epochs.",
        "How many batches of the epoch are already done when the run resumes?",
        "order.split(batch)[step % in_epoch:], which is all batches at the start of an epoch.")),
    Exercise(run_state.split_digits, check_split_digits, mistakes=(
        Slip(NEWEST_OF_ALL, (NEWEST, "dist.broadcast(start, group=group, group_src=0)",
                             OWN, OWN.replace("start.item()", "newest"))),
        Slip(A_NEWER_ONE, (NEWEST, f"{NEWEST.replace('MIN', 'MAX')}\n"
                           "            start = (start - every).clamp(min=0)")),
        Slip(FROM_ZERO, ("start > 0", "start < 0", "int(start) + 1", "1")),
        Slip(OF_ONE_STEP, (NEWEST, f"{NEWEST}\n            newest and start.fill_(max(int(start), "
                           "0))", OWN, OWN.replace("start.item()", "newest"))),
    ), hints=(
        'Print state["step"] on every rank after loading it.',
        "Two things are needed: the ranks must agree on the newest step that all have saved, and "
        "every rank must still have that one.",
        "Save a file for each step, Path(disk, str(done)); all_reduce(newest, MIN) over the ranks' "
        "newest steps; load that file, or start again from 0.")),
)
