"""The check of compress_to_budget: top-k's bytes, nothing lost, and a lower loss; and the score."""

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import IN_GROUPS, expect
from ranklab.checks.ddp.hooks import COUNT, Given, alike, hook_on_groups, steps_in_ddp, watched
from ranklab.checks.exercise import Mistake
from ranklab.ddp import TopK, compress_to_budget, top_k_bytes
from ranklab.engine import device, launch
from ranklab.models.gpt import GPT

FRACTION, BETTER, STEPS = 0.001, 0.03, 50  # BETTER: nats; right answers are 0.06 to 0.15 better
MANY, SPIKES = 70_000, [5, 33_333, 65_000, 69_999]
FEEDBACK = ("What is not sent in a step, also by rounding, must be added to the next gradient. "
            "Keep it by parameter, because DDP makes new buckets in its second step.")
PLACES = ("If places have 16 bits: int16 ends at 32,767, uint16 at 65,535. Count places in rows "
          "that are short enough.")
SAME = ("Every rank must add up the same numbers in the same order; its own as it sent them, "
        "rounded.")
FAILURES = {
    r"RuntimeError: The size of tensor a \(\d+\) must match .*": FEEDBACK,
    ".*Invalid scalar type": "gloo sends no 16-bit integers: .view(torch.uint8) before, "
    ".view(torch.int16) after.",
    "(Index|Runtime)Error: .* out of bounds .*": PLACES}


class Job(NamedTuple):
    """What a rank's gradients are in so many steps, and what must have come through."""

    gradient: Callable  # rank -> its gradient of the first step
    steps: int
    most: float | None  # from the mean over ranks, of its length; None: a NaN must be seen
    hint: str = FEEDBACK
    stays: bool = True  # False: zeros follow, and results are added up
    model: Callable = Given


def _normal(rank):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))


def _spikes(rank):
    return torch.zeros(MANY).index_fill(0, torch.tensor(SPIKES), 1.0 + rank)


def _broken(rank):
    return _normal(rank).index_fill(0, torch.tensor(130), torch.nan if rank in (0, 3) else 1.0)


JOBS = {
    "zeros": Job(lambda rank: torch.zeros(COUNT), 3, 0.0, "Zero over a scale of zero is NaN, and a "
                 "zero has no sign."),
    "a gradient that stays": Job(_normal, 60, 0.6),
    "55 numbers, then zeros": Job(lambda rank: _normal(rank) * (torch.arange(COUNT) % 4 == 0), 60,
                                  0.005, stays=False),
    "one number, over 100,000": Job(
        lambda rank: torch.full((1,), 1e5 * (1 + rank)), 8, 0.001, "float16 ends at 65,504, "
        f"bfloat16 does not. {FEEDBACK}", model=partial(nn.Linear, 1, 1, bias=False)),
    "4 of 70,000 numbers, then zeros": Job(_spikes, 60, 0.1, stays=False,
                                           model=partial(nn.Linear, MANY, 1, bias=False)),
    "a NaN of one rank": Job(_broken, 1, None, "A NaN that hides in the error stays there: send "
                             "it. topk takes a NaN for the largest; a comparison with it is "
                             "false."),
}


def check_compress_to_budget(hook):
    hook_on_groups(_trial, hook, failures=FAILURES, groupings=IN_GROUPS, group_hint="")
    yield "in groups of 3 and of 1 all ranks have the same, for at most top-k's bytes in each step"
    yield ("of a gradient that stays, the mean of 60 results is at most 60% away from the ranks' "
           "mean; zeros stay zeros")
    yield ("nothing is lost, 100,000 is finite, a NaN is seen; buckets of one number and of 70,000 "
           "are right")
    yield _score(*hook_on_groups(_training, hook, failures=FAILURES, ranks=2)[0])


def _trial(hook, ranks):
    for name, job in JOBS.items():
        model, given = job.model(), [job.gradient(rank) for rank in range(4)]
        mine = given[dist.get_rank()]
        inputs = [mine] + [mine * job.stays] * (job.steps - 1)
        gradients, steps = zip(*steps_in_ddp({"group": ranks.group}, hook, model, inputs,
                                             ranks.group))
        yield partial(_fits, f"{name}, {ranks}", model, ranks, steps)
        results = torch.stack(gradients)
        yield alike(f"{name}, {ranks}: what comes through", results.to(device()), ranks, SAME)
        yield partial(_comes_through, f"{name}, {ranks}", job, results.double(),
                      [given[rank].double() for rank in ranks.members], sum(given) / 4)


def _fits(where, model, ranks, steps):
    trained = [p for p in model.parameters() if p.requires_grad]
    most = (ranks.size - 1) * top_k_bytes(trained, FRACTION)
    sent = [sum(op.sent_bytes for call in calls for op in call.ops) for calls in steps]
    for step, nbytes in enumerate(sent):
        expect(nbytes <= most, f"{where}: step {step} sends {nbytes:,} bytes, top-k 0.1% {most:,}",
               "8 (R-1) bytes for each entry of top-k: count values, places and scales. An "
               "all-gather sends (R-1) times what a rank has, an all-reduce 2 (R-1)/R of it.")
    return max(sent)


def _comes_through(where, job, results, given, of_all):
    if job.most is None:
        return expect(not results.isfinite().all(), f"{where} is not seen in the result", job.hint)
    right, got = sum(given) / len(given), results.sum(0) / (len(results) if job.stays else 1)
    apart = (got - right).norm()
    if apart <= job.most * right.norm():
        return None
    hints = {
        "Largest in size: -5 counts as 5. Take topk of .abs().":
            (right < 0).any() and not (got < 0).any(),
        "That is the sum over ranks: divide by their number.": _is_like(got, sum(given), right),
        "That is the mean of all 4 ranks: state.get('group') is the group.":
            _is_like(got, of_all, right),
        PLACES: not job.stays and (got[right == 0].abs() > right.abs().max() / 2).any()}
    raise Mistake(f"{where}: the {'mean' if job.stays else 'sum'} of {len(results)} results is "
                  f"{apart:.3g} away from the mean of the ranks, which is {right.norm():.3g} long",
                  next((hint for hint, fits in hints.items() if fits), job.hint))


def _is_like(got, wrong, right):
    return (got - wrong).norm() < 0.4 * wrong.norm() and not torch.equal(wrong, right)


# --- the score ------------------------------------------------------------------------------------

def _training(hook, ranks):
    """The project's training: notes the most bytes of a step, and the Row."""
    project, steps = _project(), []
    row, = project.train_with_each({"yours": lambda: ({}, watched(hook, steps))}, STEPS, 0)
    where = f"the lab's model, {ranks}"
    yield partial(_fits, where, GPT(project.MODEL), ranks, steps)
    yield alike(f"{where}: the loss", torch.tensor([row.loss], device=device()), ranks, SAME)
    yield lambda: row


def _score(sent, row):
    """What is printed of the training."""
    plain, top_k, library = (other.loss for other in _others())
    told = (f"held-out loss {row.loss:.3f}, {sent:,} bytes a step (top-k 0.1% {top_k:.3f}, the "
            f"library's {library:.3f}, uncompressed {plain:.3f})")
    expect(row.loss < top_k - BETTER, f"the lab's model: {told}", f"The loss must be {BETTER} "
           "below top-k's. Its entry has 8 bytes. How many does a value need, and how many a place?"
           " Send more entries, the largest of the whole bucket, not some of each part.")
    return told


def _project():
    from ranklab.projects.ddp import compression  # here: it imports what no other check needs

    return compression


@functools.cache
def _others():
    """The Rows of no compression, of top-k 0.1% and of the library's answer."""
    made = {"float32": None, "top-k": lambda: (TopK(FRACTION), TopK.hook),
            "library": lambda: ({}, compress_to_budget)}
    return launch(_project().train_with_each, made, STEPS, 0, ranks=2)[0]
