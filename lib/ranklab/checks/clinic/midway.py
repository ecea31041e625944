"""A run goes wrong midway: an overflow of float16, memory that grows, a damaged shard."""

import hashlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.checks.beside import GROUPINGS, expect, on_groups
from ranklab.checks.clinic.compared import (FAILURES, LAB, SAME, as_double, checked, equal, flat,
                                            is_near, train_data)
from ranklab.clinic.shards import SIZE, Shard, stored_shards
from ranklab.data.images import digits
from ranklab.engine import device
from ranklab.meter import MemoryCurve


# --- float16 --------------------------------------------------------------------------------------

HALVES = (LAB, ("scale=2**20", {"scale": 2.0**20, "steps": 8}),
          ("growth=2", {"growth": 2, "steps": 12}))


def _half(ranks, steps=16, scale=2.0**16, growth=5, batch=60):
    """The parts of all ranks, one after the other, and torch's rule of scaling by hand."""
    (x, y), losses, clean = train_data(), [], 0
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
    return {"losses": losses, "weights": flat(model), "scale": scale}


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
    equal("losses", got, due, SAME, 5e-3)
    equal("weights", got, due, "A step is skipped where the sum over ranks overflows, and no "
           "other. Else it is a step by the mean of the gradients, divided by the scale.", 5e-3)


def check_half_digits(half_digits):
    checked(half_digits, HALVES, _look_half, _half)
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
    (x, y), images = train_data(), digits()
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
    return {"losses": losses, "sure": sure, "weights": flat(model)}


def _look_validated(got, due, ranks, **_):
    kept = len(got["losses"]), len(got["sure"])
    expect(kept == (len(due["losses"]), len(due["sure"])), f"it returns {kept[0]} and {kept[1]} "
           f"numbers, not {len(due['losses'])} of each", "Rank 0 validates after each step, and "
           "returns all of it.")
    for name in due:
        equal(name, got, due, SAME)


def check_validated_digits(validated_digits):
    on_groups(_grows, validated_digits, failures=FAILURES, groupings=GROUPINGS[:2])
    yield "7 steps take the memory of 3, on every rank"
    checked(validated_digits, (LAB, ("steps=3", {"steps": 3, "batch": 36})), _look_validated,
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


def _is_whole(shard):
    return hashlib.sha256(shard.content).hexdigest() == shard.sha256


def _stored(ranks, steps=12, shards=None, takes=_is_whole, counts_all=False):
    """The shards that `takes` takes, one after the other; a mean over these, or over all."""
    shards, losses = shards or stored_shards(), []
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to(device())
    for step in range(steps):
        total, n = sum(p.sum() for p in model.parameters()) * 0, 0
        for rank in range(ranks.size):
            shard = shards[(step * ranks.size + rank) % len(shards)]
            x, y = shard.batch()
            loss = F.cross_entropy(model(x), y, reduction="sum")
            n += SIZE * (counts_all or takes(shard))
            total = total + loss if takes(shard) else total
        mean = total / max(n, 1)
        for p, gradient in zip(model.parameters(), torch.autograd.grad(mean, model.parameters())):
            p.data -= 0.1 * gradient
        losses.append(mean.item())
    return {"losses": losses, "weights": flat(model)}


def _look_stored(got, due, ranks, **keywords):
    for slip, hint in (
        ({"takes": lambda shard: True}, "It trains on a shard that is not what was written. Beside "
         "each one stands its checksum: compare before use."),
        ({"counts_all": True}, "What is left out does not count, either: the mean is over the "
         "images that are trained on, of all ranks."),
    ):
        wrong = as_double(_stored(ranks, **keywords, **slip)["weights"])
        if is_near(got["weights"], wrong):
            equal("weights", got, due, hint)
    equal("losses", got, due, "A damaged shard is left out, whatever its loss; one that is whole "
          "is trained on, whatever its loss. Its checksum tells. And NaN times 0 is NaN.")
    equal("weights", got, due, SAME)


def check_stored_digits(stored_digits):
    checked(stored_digits, _stores(), _look_stored, _stored)
    yield "a damaged shard takes no part: a line of a log, zeros at its end, one bit of a label"
    yield "also where all ranks' shards are damaged; one that is whole does, however hard it is"
