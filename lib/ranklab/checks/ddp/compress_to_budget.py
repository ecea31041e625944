"""The check of compress_to_budget: top-k's bytes, nothing lost, and a lower loss; and the score."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.ddp.given import Given, gradients_of, in_ddp, mean_of
from ranklab.checks.ddp.refusals import check_signature, run_in_ddp
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import GROUPS, group_of_mine, members_of, rank_name
from ranklab.ddp import TopK, compress_to_budget, top_k_bytes
from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT

FRACTION, BETTER, STEPS = 0.001, 0.03, 50  # BETTER: nats; right answers are 0.06 to 0.15 better
STEADY, NEAR = 60, 0.6  # steps of one gradient, and how near the mean of the results must be
ARRIVED = {"55 numbers": 0.005, "70,000 numbers": 0.1}  # how near the sum, if zeros follow
MANY, SPIKES = 70_000, [5, 33_333, 65_000, 69_999]
LARGE = 100_000.0  # float16 ends at 65,504
FEEDBACK = ("What is not sent in a step, also by rounding, must be added to the next gradient. "
            "Keep it by parameter, because DDP makes new buckets in its second step.")
BYTES = "gloo sends no 16-bit integers: .view(torch.uint8) before, .view(torch.int16) after."
PLACES = ("If places have 16 bits: int16 ends at 32,767, uint16 at 65,535. Count places in rows "
          "that are short enough.")
FEWER = ("8 (R-1) bytes for each entry of top-k: count values, places and scales. An all-gather "
         "sends (R-1) times what a rank has, an all-reduce 2 (R-1)/R of it.")


def check_compress_to_budget(hook):
    check_signature(hook)
    with hinted({r"RuntimeError: The size of tensor a \(\d+\) must match .*": FEEDBACK,
                 ".*Invalid scalar type": BYTES,
                 "(Index|Runtime)Error: .* out of bounds .*": PLACES}):
        seen = run_in_ddp(_four, hook, ranks=4)
    for members in GROUPS[::-1]:
        for name in seen[0]:
            nbytes = {"one number": 8, "70,000 numbers": 8 * MANY // 1000}.get(
                name, top_k_bytes(Given().weights, FRACTION))
            _agree([seen[rank][name] for rank in members], members, name, nbytes)
    yield "in groups of 3 and of 1 all ranks have the same, for at most top-k's bytes in each step"
    for rank, of_rank in enumerate(seen):
        _zeros(of_rank["zeros"][0], rank)
        _steady(of_rank["steady"][0], rank)
    yield (f"of a gradient that stays, the mean of {STEADY} results is at most {NEAR:.0%} away "
           "from the ranks' mean; zeros stay zeros")
    for rank, of_rank in enumerate(seen):
        for name in ARRIVED:
            _arrives(name, of_rank[name][0], rank)
        _one_number(of_rank["one number"][0], rank)
        _not_a_number(of_rank["NaN"][0], rank)
    yield ("nothing is lost, 100,000 is finite, a NaN is seen; buckets of one number and of 70,000 "
           "are right")
    (row, results, sent), (_, others, _) = run_in_ddp(_trained, hook, ranks=2)
    nbytes = top_k_bytes(GPT(_project().MODEL).parameters(), FRACTION)
    _agree([(results, sent), (others, sent)], range(2), "the lab's model", nbytes)
    yield _score(row, max(sent))


def _score(row, sent):
    """What is printed of the training."""
    plain, top_k, library = (other.loss for other in _others())
    told = (f"held-out loss {row.loss:.3f}, {sent:,} bytes a step (top-k 0.1% {top_k:.3f}, the "
            f"library's {library:.3f}, uncompressed {plain:.3f})")
    if not row.loss < top_k - BETTER:
        raise Mistake(f"the lab's model: {told}", f"The loss must be {BETTER} below top-k's. Its "
                      "entry has 8 bytes. How many does a value need, and how many a place? Send "
                      "more entries, and take the largest of the whole bucket, not some of each "
                      "part.")
    return told


def _project():
    from ranklab.projects.ddp import compression  # here: it imports what no other check needs

    return compression


@functools.cache
def _others():
    """The Rows of no compression, of top-k 0.1% and of the library's answer."""
    made = {"float32": None, "top-k": functools.partial(_top_k, FRACTION),
            "library": lambda: ({}, compress_to_budget)}  # fmt: skip
    return launch(_project().train_with_each, made, STEPS, 0, ranks=2)[0]


def _top_k(fraction):
    return TopK(fraction), TopK.hook


def _trained(hook):
    """Runs on two ranks: (Row, results, bytes) of the project's training, steps one by one."""
    results, sent = [], []
    made = {"yours": lambda: ({}, _watched(hook, results, sent))}
    row, = _project().train_with_each(made, STEPS, 0)
    return row, torch.stack(results), sent


def _four(hook):
    """Runs on four ranks, in two groups: {name: (results, bytes of each step)}."""
    group, rank = group_of_mine(), dist.get_rank()
    mine = gradients_of(rank, 0, "normal")
    broken = mine.clone()
    broken[130] = torch.nan if rank in (0, 3) else 1.0
    one = torch.full((1,), LARGE * (1 + rank))
    jobs = {"steady": (Given(), [mine] * STEADY), "zeros": (Given(), [0 * mine] * 3),
            "one number": (nn.Linear(1, 1, bias=False), [one] * 8), "NaN": (Given(), [broken]),
            "55 numbers": (Given(), [_few(mine)] + [0 * mine] * (STEADY - 1)),
            "70,000 numbers": (nn.Linear(MANY, 1, bias=False),
                               [_spikes([rank])] + [torch.zeros(MANY)] * (STEADY - 1))}
    return {name: _steps(hook, group, *job) for name, job in jobs.items()}


def _few(gradient):
    """Every fourth number, and zeros: in 60 steps top-k itself sends them all."""
    return gradient * (torch.arange(len(gradient)) % 4 == 0)


def _spikes(ranks):
    """Many zeros, and a few equal numbers, at the same places on each rank; the ranks' mean."""
    x = torch.zeros(MANY)
    x[SPIKES] = 1 + sum(ranks) / len(ranks)
    return x


def _steps(hook, group, model, inputs):
    """(results of the hook, bytes sent) of each step."""
    results, sent = [], []
    model = in_ddp(model, group)
    model.register_comm_hook({"group": group}, _watched(hook, [], sent))
    for x in inputs:
        model.zero_grad()
        model(x.to(device())).backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()
                                  if p.grad is not None]).cpu())
    return torch.stack(results), sent


def _watched(hook, results, sent):
    """The hook; `sent` gets the bytes of each step, `results` what becomes of each bucket."""
    of_step = []

    @functools.wraps(hook)  # DDP reads the signature
    def watched(state, bucket):
        with Traffic() as traffic:
            future = hook(state, bucket)
            if isinstance(future, torch._C.Future):  # DDP itself refuses all else
                results.append(future.wait().cpu().clone())
        of_step.append(traffic.sent_bytes)
        if bucket.is_last():
            sent.append(sum(of_step))
            of_step.clear()
        return future

    return watched


def _agree(of_ranks, members, name, nbytes):
    """The same results on all members, for at most `nbytes` to each other rank in a step."""
    R, most = len(members), (len(members) - 1) * nbytes
    where = f"{name}, {R} rank{'s' * (R > 1)}"
    for step, sent in enumerate(of_ranks[0][1]):
        if sent > most:
            raise Mistake(f"{where}: step {step} sends {sent:,} bytes, top-k 0.1% {most:,}", FEWER)
    for rank, (results, _) in zip(members, of_ranks):
        differ = ~torch.isclose(results, of_ranks[0][0], 0, 0, equal_nan=True)
        if differ.any():
            raise Mistake(f"{where}: in step {int(differ.any(1).nonzero()[0])} rank {rank} ends "
                          f"with another gradient than rank {members[0]}", "Every rank must add "
                          "up the same numbers in the same order; its own as it sent them, "
                          "rounded.")


def _steady(results, rank):
    members = members_of(rank)
    right, got = mean_of(members, 0, "normal"), results.double().mean(0)
    apart = ((got - right).norm() / right.norm()).item()
    if apart <= NEAR:
        return
    if not (results < 0).any():
        raise Mistake(f"on {rank_name(rank, 4)} no negative gradient ever comes through",
                      "Largest in size: -5 counts as 5. Take topk of .abs().")
    what = (f"of a gradient that stays, the mean of {STEADY} results on {rank_name(rank, 4)} is "
            f"{apart:.0%} of its length away from the mean of ranks {members}")
    R = len(members)
    gathered = mean_of(range(4), 0, "normal")
    for wrong, hint in (
            (R * right, "That is the sum over ranks: divide by their number."),
            (gathered, "That is the mean of all 4 ranks: state.get('group') is the group.")):
        if (got - wrong).norm() < 0.4 * wrong.norm() and not torch.equal(wrong, right):
            raise Mistake(what, hint)
    raise Mistake(what, FEEDBACK)


def _zeros(results, rank):
    if not torch.equal(results, torch.zeros_like(results)):
        raise Mistake(f"on {rank_name(rank, 4)} a gradient of zeros becomes "
                      f"{results.abs().max():.3g}", "Zero over a scale of zero is NaN, and a zero "
                      "has no sign.")


def _one_number(results, rank):
    right = LARGE * (1 + sum(members_of(rank)) / len(members_of(rank)))
    got = results.double().mean().item()
    if not abs(got - right) < 0.001 * right:
        raise Mistake(f"on {rank_name(rank, 4)} a bucket of one number, {right:,.0f}, becomes "
                      f"{got:,.0f} in the mean of {len(results)} steps", "float16 ends at 65,504, "
                      "bfloat16 does not. What is lost, also by rounding, must be sent in the "
                      "next steps.")


def _not_a_number(results, rank):
    if torch.isfinite(results).all():
        raise Mistake(f"on {rank_name(rank, 4)} a NaN of one rank is not seen in the result",
                      "A NaN that hides in the error stays there: send it, so that all ranks stop "
                      "together. topk takes a NaN for the largest; a comparison with it is false.")


def _arrives(name, results, rank):
    """The first gradient is in the sum of the results; after it came zeros."""
    members, total = members_of(rank), results.double().sum(0)
    right = _spikes(members) if len(total) == MANY else _few(mean_of(members, 0, "normal"))
    apart = ((total - right).norm() / right.norm()).item()
    if not apart <= ARRIVED[name]:
        elsewhere = (total[right == 0].abs() > right.abs().max() / 2).any()
        raise Mistake(f"a gradient of {name}, and then zeros: on {rank_name(rank, 4)} the sum of "
                      f"{len(results)} results is {apart:.1%} of its length away from the mean of "
                      f"ranks {members}", PLACES if elsewhere else FEEDBACK)
