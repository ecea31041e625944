"""The check of compress_to_budget: top-k's bytes, nothing lost, a lower loss; and the score."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.ddp.hooks import COUNT, Given, alike, hook_on_groups, steps_in_ddp, watched
from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect
from ranklab.checks.prover import GROUPS, Slip
from ranklab.ddp import TopK, compress_to_budget, top_k_bytes
from ranklab.ddp.quality import MODEL, compare_hooks, train_with_each
from ranklab.engine import device
from ranklab.models.gpt import GPT

FRACTION, BETTER, STEPS = 0.001, 0.03, 50  # BETTER: nats; right answers are 0.06 to 0.15 better
MANY, SPIKES = 70_000, torch.tensor([5, 33_333, 65_000, 69_999])
FEEDBACK = ("The results do not add up to the gradient. Divide by R, once. And what a step "
            "doesn't send, with all rounding errors, is added to the next gradient, per "
            "parameter: DDP makes new buckets in its second step.")
INDICES = ("A number arrives at a place where none is due: decode the indices exactly as you "
           "coded them. (16 bits end at 32,767 or 65,535: count within rows that are short "
           "enough.)")
SAME = ("Every rank must add up the same numbers in the same order, including its own numbers "
        "exactly as it sent them.")
COUNTED = ('Count values, indices and scales: in an all-gather over the group, '
           'state.get("group"), a rank sends R-1 times the bytes that it contributes.')
ZEROS = "Zeros must stay zeros: 0 / 0 is NaN, and 0 has no sign."
FLOAT16 = "float16 overflows above 65,504; bfloat16 does not."
UNSEEN = ("Don't drop a NaN or leave it in the error, where it is never seen: send it. topk treats "
          "NaN as the largest number.")
IN_SIZE = ("No negative number comes through. Choose by .abs(), since -5 counts as 5, but send "
           "the values with their signs.")
SUM = "That is the sum over ranks: divide by the number of ranks."
MORE = "Send more entries with fewer bytes each, and choose the largest of the whole bucket."


class Job(NamedTuple):
    """A rank's gradients over several steps, and the values that must have come through."""

    gradient: Callable  # of a rank in the first step, from its own random numbers
    steps: int
    most: float | None  # from the mean over ranks, of its length; None: a NaN must be seen
    hint: str = FEEDBACK
    stays: bool = True  # False: zeros follow, and results are added up
    model: Callable = Given


JOBS = {
    "zeros": Job(lambda rank, x: 0 * x, 3, 0.0, ZEROS),
    "a gradient that stays": Job(lambda rank, x: x, 60, 0.6),
    "55 numbers, then zeros": Job(lambda rank, x: x * (torch.arange(COUNT) % 4 == 0), 60, 0.005,
                                  stays=False),
    "one number, over 100,000": Job(
        lambda rank, x: torch.full((1,), 1e5 * (1 + rank)), 8, 0.001,
        f"{FLOAT16} {FEEDBACK}", model=partial(nn.Linear, 1, 1, bias=False)),
    "4 of 70,000 numbers, then zeros": Job(
        lambda rank, x: torch.zeros(MANY).index_fill(0, SPIKES, 1.0 + rank), 60, 0.1, stays=False,
        model=partial(nn.Linear, MANY, 1, bias=False)),
    "a NaN of one rank": Job(
        lambda rank, x: x.index_fill(0, torch.tensor(130), torch.nan if rank in (0, 3) else 1.0),
        1, None, UNSEEN),
}


def check_compress_to_budget(hook):
    hook_on_groups(_trial, hook, 4, GROUPS[0])
    yield "in groups of 3 and of 1 all ranks have the same, for at most top-k's bytes in each step"
    yield "nothing is lost; zeros stay zeros, 100,000 is finite, a NaN is seen; 1 to 70,000 numbers"
    sent, loss = hook_on_groups(_training, hook, 2)[0]
    plain, top_k, library = _other_losses()
    text = (f"held-out loss {loss:.3f}, {sent:,} bytes a step (top-k 0.1% {top_k:.3f}, the "
            f"library's {library:.3f}, uncompressed {plain:.3f})")
    expect(loss < top_k - BETTER, f"the lab's model: {text}", f"It must be {BETTER} below top-k's. "
           f"{MORE}")
    yield text


def _trial(hook, ranks):
    for name, job in JOBS.items():
        model, where = job.model(), f"{name}, {ranks}"
        inputs = [job.gradient(rank, torch.randn(
            COUNT, generator=torch.Generator().manual_seed(rank))) for rank in range(4)]
        own = inputs[dist.get_rank()]
        gradients, steps = zip(*steps_in_ddp({"group": ranks.group}, hook, model, [
            own, *[own * job.stays] * (job.steps - 1)], ranks.group))
        yield partial(_fits, where, model, ranks, steps)
        results = torch.stack(gradients)
        yield alike(f"{where}: what comes through", results.to(device()), ranks, SAME)
        yield partial(_comes_through, where, job, results.double(),
                      [inputs[rank].double() for rank in ranks.members], sum(inputs) / 4)


def _fits(where, model, ranks, steps):
    trained = [p for p in model.parameters() if p.requires_grad]
    most = (ranks.size - 1) * top_k_bytes(trained, FRACTION)
    sent = [sum(op.sent_bytes for call in calls for op in call.ops) for calls in steps]
    for step, nbytes in enumerate(sent):
        expect(nbytes <= most, f"{where}: step {step} sends {nbytes:,} bytes, top-k 0.1% {most:,}",
               COUNTED)
    return max(sent)


def _comes_through(where, job, results, inputs, of_all):
    if job.most is None:
        return expect(not results.isfinite().all(), f"{where} is not seen in the result", job.hint)
    right, got = sum(inputs) / len(inputs), results.sum(0) / (len(results) if job.stays else 1)
    apart = (got - right).norm()
    if apart <= job.most * right.norm():
        return None
    hints = {
        IN_SIZE: (right < 0).any() and not (got < 0).any(),
        SUM: _is_like(got, sum(inputs), right),
        "That is the mean over all 4 ranks: average over the group, state.get('group').":
            _is_like(got, of_all, right),
        INDICES: not job.stays and (got[right == 0].abs() > right.abs().max() / 2).any()}
    raise Mistake(f"{where}: the {('mean' if job.stays else 'sum')} of {len(results)} results is "
                  f"{apart:.3g} away from the mean of the ranks, whose norm is {right.norm():.3g}",
                  next((hint for hint, fits in hints.items() if fits), job.hint))


def _is_like(got, wrong, right):
    return (got - wrong).norm() < 0.4 * wrong.norm() and not torch.equal(wrong, right)


def _training(hook, ranks):
    """Run the training of section 6; record the largest bytes of a step, and the loss."""
    steps = []
    (_, _, loss), = train_with_each({"yours": lambda: ({}, watched(hook, steps))}, STEPS, 0)
    where = f"the lab's model, {ranks}"
    yield partial(_fits, where, GPT(MODEL), ranks, steps)
    yield alike(f"{where}: the loss", torch.tensor([loss], device=device()), ranks, SAME)
    yield lambda: loss


@cache
def _other_losses():
    """Return the losses without compression, with top-k 0.1%, and with the library's answer."""
    hooks = {"float32": None, "top-k": lambda: (TopK(FRACTION), TopK.hook),
             "library": lambda: ({}, compress_to_budget)}
    return [each.loss for each in compare_hooks(hooks, steps=STEPS)]


def top_k_itself(state, bucket: dist.GradBucket):
    return TopK.hook(state.setdefault("top-k", TopK(FRACTION, state.get("group"))), bucket)


ERRORS = "    errors.update(zip(parameters, remainder.split([p.numel() for p in parameters])))\n"
LEFT = "grid.scatter_add(1, places, -values.to(grid.dtype))"
VALUES, K = "grid.gather(1, places).bfloat16()", "top_k_bytes(parameters, 0.001) // 4 // rows"
BUDGET = Exercise(
    compress_to_budget, check_compress_to_budget, mistakes=(
        Slip(FEEDBACK, (ERRORS, ""), (LEFT, "grid.scatter(1, places, 0.0)"), (" / R)", " / R * 3)"),
             (VALUES, VALUES.replace(".b", ".to(torch.float8_e4m3fn).b"),
              LEFT, "grid.scatter(1, places, 0.0)"),
             ("[errors[p] if p in errors else torch.zeros_like(p).flatten() for p in parameters]",
              "[x if len(x := errors.get(bucket.index(), ())) == len(buffer) else 0 * buffer]",
              ERRORS, "    errors[bucket.index()] = remainder\n")),
        Slip(COUNTED, (K, K.replace("4", "2")), ('state.get("group")', "None"),
             (K, f"{K}) if errors else (grid.shape[1]")),
        Slip(ZEROS, (VALUES, "grid.gather(1, places)\n    scale = values.abs().max()\n    values = "
                     "((values / scale * 127).round() * scale / 127).bfloat16()")),
        Slip(SUM, (" / R)", ")")),
        Slip(FLOAT16, (".bfloat16()", ".half()", "view(torch.bfloat16)", "view(torch.float16)")),
        Slip(UNSEEN, ("target = buffer", "target = buffer.nan_to_num(0)")),
        Slip(IN_SIZE, ("grid.abs().topk", "grid.topk")),
        Slip(INDICES, ("2**15)", "2**17)", "indices.long()", "indices.long() % grid.shape[1]")),
        Slip(SAME, ("    remainder", "    total.scatter_add_(1, places, grid.gather(1, places) - "
                    "values.to(grid.dtype))\n    remainder")),
        Slip("DDP wants a future, and gets something else", ("finished(", "(")),
        Slip(MORE, top_k_itself),
    ), hints=(
        "A top-k entry has 8 bytes: 4 for its value and 4 for its index. How few bytes are enough "
        "for each?",
        "A bfloat16 value has 2 bytes. An index needs 2 bytes if it counts within a row of 32,768 "
        "numbers, and 1 byte as the distance from the previous index. Take the largest entries of "
        "the whole bucket, not some of each parameter. What rounding loses also belongs in the "
        "error.",
        "target = buffer + errors; places = target.abs().topk(k).indices, k = "
        "top_k_bytes(bucket.parameters(), 0.001) // 4; values = target[places].bfloat16(); pack "
        "the bytes of values and places.short() into one uint8 tensor; all_gather_single; add up "
        "rank by rank, divide by R. The error is target minus values.float() at these places; "
        "split it by parameter. Cut a bucket of more than 32,768 numbers into rows of that length, "
        "with topk in each.",
    ))
