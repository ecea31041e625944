"""A run goes on after a stop: at the right place of its data, and with the files of all ranks."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.checks.beside import expect
from ranklab.checks.clinic.compared import LAB, SAME, checked, equal, flat, train_data
from ranklab.engine import device


# --- an epoch -------------------------------------------------------------------------------------

RESUMES = (LAB, ("two stops", {"stops": (4, 9)}), ("no stop", {"stops": ()}),
           ("a stop at the end of an epoch", {"stops": (6,)}),
           ("three stops in the third epoch", {"stops": (13, 14, 16), "steps": 18}),
           ("batch=100", {"stops": (9,), "batch": 100, "steps": 15}))


def _resumed(ranks, steps=12, stops=(), batch=120):
    """It is never stopped."""
    (x, y), losses, seen, epoch = train_data(700), [], [], 0
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
    return {"losses": losses, "seen": seen, "weights": flat(model)}


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
    equal("seen", got, due, "The same images, but in another order than without a stop.")
    equal("losses", got, due, "The data are right. Is all else as it was saved?")
    equal("weights", got, due, SAME)


def check_resumed_digits(resumed_digits):
    checked(resumed_digits, RESUMES, _look_resumed, _resumed)
    yield "each image as often as without a stop, and in the same order, on 4, 3 and 1 ranks"
    yield "stopped in any epoch, at its end, twice, in a small batch; losses as in one process"


# --- the files of all ranks -----------------------------------------------------------------------

SPLITS = (LAB, ("all have saved", {"first": 4}), ("rank 0 goes first", {"first": 0}),
          ("a save each 3 steps", {"every": 3, "stop": 9, "first": 2}),
          ("nobody has saved but in the last step", {"every": 5, "stop": 5, "first": 0}),
          ("a stop between saves", {"stop": 7, "first": 1}))


def _split(ranks, steps=12, every=4, stop=8, first=1, batch=120):
    (x, y), losses = train_data(), []
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
    equal("losses", got, due, f"It goes on from step {start}, but not with what all ranks had "
           "then: rows and momentum of one step, on every rank.")
    equal("rows", got, due, SAME)


def check_split_digits(split_digits):
    checked(split_digits, SPLITS, _look_split, _split)
    yield "it goes on from the newest step that all ranks have, whichever rank was first"
    yield "no step more is lost where all have saved; anew where nobody has; as in one process"
