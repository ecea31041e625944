"""The incidents of clinic/later.py: each mended program beside one process, in other settings.

The mend must be one of the cause. So the damage is at other places, the overflow at other steps,
the stop at other moments; with groups of one and of three ranks.
"""

import hashlib
from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.checks.beside import GROUPINGS, expect, located, on_groups
from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.failures import STUCK
from ranklab.clinic.later import (half_digits, resumed_digits, split_digits, stored_digits,
                                  validated_digits)
from ranklab.clinic.shards import SIZE, Shard, stored_shards
from ranklab.data.images import digits
from ranklab.engine import device
from ranklab.meter import MemoryCurve

LAB = "as in the lab", {}
SAME = "Only the cause is to be mended: data, sizes, optimizer and what is returned stay."
FAILURES = {STUCK: "All ranks must make the same calls. A rank that leaves something out still "
            "goes through each collective, and adds zeros."}


def _trial(program, ranks, situations, look, right):
    for where, keywords in situations:
        got = program(**keywords, **ranks.keywords)
        yield partial(located, f"{ranks}, {where}", _looked, got, look, right, ranks, keywords)


def _looked(got, look, right, ranks, keywords):
    due = right(ranks, **keywords)
    expect(isinstance(got, dict) and due.keys() <= got.keys(), f"it returns {str(got)[:60]}",
           f"Return a dict of {', '.join(due)}, as it was.")
    got = {name: _tensor(value) for name, value in got.items()}
    due = {name: _tensor(value) for name, value in due.items()}
    look(got, due, ranks, **keywords)


def _checked(program, situations, look, right):
    return on_groups(_trial, program, situations, look, right, failures=FAILURES,
                     groupings=GROUPINGS[:2])


def _tensor(value):
    return torch.as_tensor(value).detach().cpu().double()


def _is_near(got, due, tolerance=1e-4):
    return got.shape == due.shape and bool(
        (got - due).abs().max() <= tolerance * due.abs().max().clamp(min=1e-3)
        if due.numel() else True)


def _equal(name, got, due, hint, tolerance=1e-4):
    """A Mistake that says where they differ first."""
    got, due = got[name], due[name]
    expect(got.shape == due.shape, f"{name}: {got.numel()} numbers, not {due.numel()}", SAME)
    if not _is_near(got, due, tolerance):
        at = int(((got - due).abs().nan_to_num(torch.inf) > tolerance * due.abs().max()).nonzero()
                 [0, 0]) if due.dim() else 0
        raise Mistake(f"{name}: {got.flatten()[at]:.4g} at {at}, and one process has "
                      f"{due.flatten()[at]:.4g}" if due.dim() else
                      f"{name}: {got:.4g}, and one process has {due:.4g}", hint)


def _data(rows=None):
    images = digits()
    return images.train.flatten(1)[:rows].to(device()), images.train_labels[:rows].to(device())


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- float16 --------------------------------------------------------------------------------------

HALVES = (LAB, ("scale=2**20", {"scale": 2.0**20, "steps": 8}),
          ("growth=2", {"growth": 2, "steps": 12}))


def _half(ranks, steps=16, scale=2.0**16, growth=5, batch=60):
    """The parts of all ranks, one after the other, and torch's rule of scaling by hand."""
    (x, y), losses, clean = _data(), [], 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device())
    held = [*model.parameters()]
    for step in range(steps):
        parts, row = [], []
        for at in torch.arange(step * batch, (step + 1) * batch).tensor_split(ranks.size):
            with torch.autocast(device().type, torch.float16):
                loss = F.cross_entropy(model(x[at % len(x)]), y[at % len(x)])
            row.append(loss.item())
            parts.append(torch.autograd.grad(loss * scale, held))
        means = [sum(part) / ranks.size for part in zip(*parts)]
        is_clean = all(mean.isfinite().all() for mean in means)
        for p, mean in zip(held, means):
            p.data -= 0.1 * mean / scale if is_clean else 0
        clean = clean + 1 if is_clean else 0
        scale = scale * 2 if clean == growth else scale if is_clean else scale / 2
        clean %= growth
        losses.append(row[ranks.index])
    return {"losses": losses, "weights": _flat(model), "scale": scale}


def _look_half(got, due, ranks, **_):
    bad = (~got["losses"].isfinite()).nonzero()
    expect(not len(bad), f"the loss is not finite from step {int(bad[0, 0]) if len(bad) else 0} on",
           "A rank has stepped with a gradient that is not finite. What did it look at before it "
           "decided, and what came in after that?")
    expect(got["scale"] <= due["scale"], f"the scale ends at {got['scale']:g}, in one process at "
           f"{due['scale']:g}", "It is halved for an overflow on any rank, and on all of them; "
           "and float16, `scale` and `growth` stay what they are.")
    expect(got["scale"] == due["scale"], f"the scale ends at {got['scale']:g}, in one process at "
           f"{due['scale']:g}", "`scale` and `growth` are given. Only a step that overflows "
           "halves it.")
    _equal("losses", got, due, SAME, 5e-3)
    _equal("weights", got, due, "A step is skipped where the sum over ranks overflows, and no "
           "other. Else it is a step by the mean of the gradients, divided by the scale.", 5e-3)


def check_half_digits(half_digits):
    _checked(half_digits, HALVES, _look_half, _half)
    yield "no loss is NaN, with 4, 3 and 1 ranks, from other scales, with overflows at other steps"
    yield "all ranks skip the same steps and have one scale; weights as in one process"


# --- memory ---------------------------------------------------------------------------------------

def _grows(program, ranks):
    """A look at the bytes that a step leaves, between 3 steps and 7."""
    peaks = []
    for steps in (3, 7):
        with MemoryCurve(nn.Identity()) as curve:
            program(steps=steps, **ranks.keywords)
        peaks.append(curve.peak_bytes)
    yield partial(_flat_memory, f"{ranks}", (peaks[1] - peaks[0]) / 4)


def _flat_memory(where, growth):
    expect(growth <= 1000, f"{where}: each step leaves {growth:,.0f} bytes more", "The validation "
           "of 360 images makes activations of 213,120 bytes. A number that is kept holds the "
           "graph that it came from, until nothing holds the number. Two numbers are kept."
           if growth > 1e5 else "Something is kept of each step: a number alone has 4 bytes.")


def _validated(ranks, steps=8, batch=60):
    (x, y), images = _data(), digits()
    held_out, labels = images.held_out.flatten(1).to(device()), images.held_out_labels.to(device())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device())
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        at = torch.arange(step * batch, (step + 1) * batch) % len(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        optimizer.step()
        with torch.no_grad():
            logits = model(held_out)
            found.append((F.cross_entropy(logits, labels).item(),
                          logits.softmax(1).amax(1).mean().item()))
    losses, sure = zip(*found) if ranks.index == 0 else ((), ())
    return {"losses": losses, "sure": sure, "weights": _flat(model)}


def _look_validated(got, due, ranks, **_):
    kept = len(got["losses"]), len(got["sure"])
    expect(kept == (len(due["losses"]), len(due["sure"])), f"it returns {kept[0]} and {kept[1]} "
           f"numbers, not {len(due['losses'])} of each", "Rank 0 validates after each step, and "
           "returns all of it.")
    for name in due:
        _equal(name, got, due, SAME)


def check_validated_digits(validated_digits):
    on_groups(_grows, validated_digits, failures=FAILURES, groupings=GROUPINGS[:2])
    yield "7 steps take the memory of 3, on every rank"
    _checked(validated_digits, (LAB, ("steps=3", {"steps": 3, "batch": 36})), _look_validated,
             _validated)
    yield "all numbers of each validation are there; they and the weights as in one process"


# --- a shard --------------------------------------------------------------------------------------

def _stores():
    """[(what was done to the shards, {"shards": them})]"""
    whole, end = stored_shards(()), 32 * 128 + SIZE
    label = whole[5].content[end - 7] ^ 1  # still one of 0 to 9
    hard = bytearray(whole[2].content)
    hard[1:end - SIZE:2] = (byte ^ 128 for byte in hard[1:end - SIZE:2])  # each number's sign
    hard = bytes(hard)
    marked = Shard(hard, hashlib.sha256(hard).hexdigest())
    return (LAB, ("one bit of a label is another", {"shards": stored_shards(
        ((5, end - 7, bytes([label])),))}), ("the end of a shard is zeros", {
            "shards": stored_shards(((3, end - 512, bytes(512)),))}),
        ("four shards in a row are damaged", {"shards": stored_shards(
            tuple((number, 999, b"\xff\x7f") for number in (4, 5, 6, 7))), "steps": 6}),
        ("negatives, written as such", {"shards": [*whole[:2], marked, *whole[3:]], "steps": 6}))


def _stored(ranks, steps=12, shards=None, takes=lambda shard, loss: shard.sha256 ==
            hashlib.sha256(shard.content).hexdigest(), count=None):
    shards, losses = shards or stored_shards(), []
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to(device())
    for step in range(steps):
        total, n = sum(p.sum() for p in model.parameters()) * 0, 0
        for rank in range(ranks.size):
            shard = shards[(step * ranks.size + rank) % len(shards)]
            x, y = shard.batch()
            loss = F.cross_entropy(model(x), y, reduction="sum")
            if takes(shard, loss / SIZE):
                total, n = total + loss, n + SIZE
        mean = total / (count(ranks) if count else max(n, 1))
        for p, gradient in zip(model.parameters(), torch.autograd.grad(mean, model.parameters())):
            p.data -= 0.1 * gradient
        losses.append(mean.item())
    return {"losses": losses, "weights": _flat(model)}


def _look_stored(got, due, ranks, **keywords):
    for takes, count, hint in (
        (lambda *_: True, None, "It trains on a shard that is not what was written. Beside each "
         "one stands its checksum: compare before use."),
        (None, lambda ranks: ranks.size * SIZE, "What is left out does not count, either: the mean "
         "is over the images that are trained on, of all ranks."),
    ):
        wrong = _stored(ranks, **keywords, count=count, **({"takes": takes} if takes else {}))
        wrong = {name: _tensor(value) for name, value in wrong.items()}
        if _is_near(got["weights"], wrong["weights"]):
            _equal("weights", got, due, hint)
    _equal("losses", got, due, "A damaged shard is left out, whatever its loss; one that is whole "
           "is trained on, whatever its loss. Its checksum tells, and nothing else does.")
    _equal("weights", got, due, SAME)


def check_stored_digits(stored_digits):
    _checked(stored_digits, _stores(), _look_stored, _stored)
    yield "a damaged shard takes no part: a line of a log, zeros at its end, one bit of a label"
    yield "also where all ranks' shards are damaged; one that is whole does, however hard it is"


# --- an epoch -------------------------------------------------------------------------------------

RESUMES = (LAB, ("two stops", {"stops": (4, 9)}), ("a stop at the end of an epoch", {"stops": (6,)}),
           ("three stops in the third epoch", {"stops": (13, 14, 16), "steps": 18}),
           ("batch=100", {"stops": (9,), "batch": 100, "steps": 15}), ("no stop", {"stops": ()}))


def _resumed(ranks, steps=12, stops=(), batch=120):
    """It is never stopped."""
    (x, y), losses, seen, epoch = _data(700), [], [], 0
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    while len(losses) < steps:
        order = torch.randperm(700, generator=torch.Generator().manual_seed(epoch))
        for at in order.split(batch)[:steps - len(losses)]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[at]), y[at])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += at.tensor_split(ranks.size)[ranks.index].tolist()
        epoch += 1
    return {"losses": losses, "seen": seen, "weights": _flat(model)}


def _look_resumed(got, due, ranks, steps=12, stops=(8,), batch=120):
    expect(len(got["losses"]) == steps, f"it trains {len(got['losses'])} steps, not {steps}",
           "A run that goes on does what is left, and no step twice.")
    times = Counter(got["seen"].tolist())
    usual = Counter(due["seen"].tolist())
    more = sum(times[i] > usual[i] for i in times)
    expect(not more, f"{more} images are trained on more often than in a run without a stop",
           "What comes after a stop begins with the batch that is next in its epoch. A checkpoint "
           "must say, or tell by its step, which that is: in any epoch, also with a smaller last "
           "batch, and after a second stop.")
    _equal("seen", got, due, "The same images, but in another order than without a stop.")
    _equal("losses", got, due, "The data are right. Is all else as it was saved?")
    _equal("weights", got, due, SAME)


def check_resumed_digits(resumed_digits):
    _checked(resumed_digits, RESUMES, _look_resumed, _resumed)
    yield "each image as often as without a stop, and in the same order, on 4, 3 and 1 ranks"
    yield "stopped in any epoch, at its end, twice, in a small batch; losses as in one process"


# --- the files of all ranks -----------------------------------------------------------------------

SPLITS = (LAB, ("all have saved", {"first": 4}), ("rank 0 goes first", {"first": 0}),
          ("a save each 3 steps", {"every": 3, "stop": 9, "first": 2}),
          ("nobody has saved but in the last step", {"every": 5, "stop": 5, "first": 0}),
          ("a stop between saves", {"stop": 7, "first": 1}))


def _split(ranks, steps=12, every=4, stop=8, first=1, batch=120):
    (x, y), losses = _data(), []
    w, momentum = torch.zeros(64, 10, device=device()), 0
    for step in range(steps):
        at = torch.arange(step * batch, (step + 1) * batch) % len(x)
        logits = (x[at] @ w).requires_grad_()
        loss = F.cross_entropy(logits, y[at])
        loss.backward()
        momentum = 0.9 * momentum + x[at].T @ logits.grad
        w = w - 0.1 * momentum
        losses.append(loss.item())
    saved = stop // every * every
    start = saved - every if saved == stop and first < ranks.size else saved
    return {"losses": losses[:stop] + losses[start:],
            "rows": w.tensor_split(ranks.size)[ranks.index]}


def _look_split(got, due, ranks, steps=12, every=4, stop=8, first=1, batch=120):
    start, right = (stop + steps - len(each["losses"]) for each in (got, due))
    expect(start >= right, f"it goes on from step {start}, not {right}", "The newest state that "
           "all ranks have is a newer one." if start else "Begin anew only where there is no "
           "state that all ranks have.")
    expect(start == right, f"it goes on from step {start}, not {right}", "Some rank has no state "
           f"of step {start}. Which is the newest that all have, and is it still there?")
    _equal("losses", got, due, f"It goes on from step {start}, but not with what all ranks had "
           "then: rows and momentum of one step, on every rank.")
    _equal("rows", got, due, SAME)


def check_split_digits(split_digits):
    _checked(split_digits, SPLITS, _look_split, _split)
    yield "it goes on from the newest step that all ranks have, whichever rank was first"
    yield "no step more is lost where all have saved; anew where nobody has; as in one process"


# --- for the lab ----------------------------------------------------------------------------------

LATER = (
    Exercise(half_digits, check_half_digits, hints=(
        "In which step does the first loss become NaN? Print scaler.get_scale() of each rank "
        "around it.",
        "Where in a step does GradScaler look for infinities, and what has each rank in p.grad "
        "then?",
        "Leave out scaler.unscale_: step() does it, after the sum is there. If you clip, unscale "
        "after the all-reduces.")),
    Exercise(validated_digits, check_validated_digits, hints=(
        "MemoryCurve of 4 steps and of 8, on each rank: how many bytes does a step leave?",
        "What does a tensor hold that has a grad_fn, and until when?",
        "with torch.no_grad(): logits = model(held_out). Or .item() for all that is kept.")),
    Exercise(stored_digits, check_stored_digits, hints=(
        "Which shard does which rank read in step 5, and what is x.abs().max()?",
        "Beside a shard's content stands what its content must give: hashlib.sha256(...)"
        ".hexdigest(). And a rank that leaves its shard out must not leave the others alone.",
        "x, y = x[:0], y[:0]: the sum over no images is 0, its gradients are zeros, and the count "
        "is 0.")),
    Exercise(resumed_digits, check_resumed_digits, hints=(
        "Collect `seen` of all ranks, and count how often each image comes in two epochs.",
        "How many batches of its epoch are over when the run goes on?",
        "order.split(batch)[step % in_epoch:], which is all of it where an epoch begins.")),
    Exercise(split_digits, check_split_digits, hints=(
        'Print state["step"] on every rank, after it was loaded.',
        "Two things are needed: to agree on the newest step that all have, and that every rank "
        "still has that one.",
        "A file for each step, Path(disk, str(done)); all_reduce(newest, MIN) of the ranks' newest "
        "ones; load that file, or begin anew at 0.")),
)
