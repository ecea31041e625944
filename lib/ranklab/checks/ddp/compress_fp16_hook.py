"""The check of compress_fp16_hook: registered in torch's DDP."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect
from ranklab.checks.ddp.hooks import BACK, COUNT, Given, hook_on_groups, steps_in_ddp
from ranklab.checks.trial import explain

LARGE = 36_864.0  # 9 * 2**12: float16 holds it, and a half, third and quarter, but not the double
OVERFLOW = "float16 ends at 65,504. Divide by the number of ranks before the all-reduce, not after."
STEPS = {  # what the gradients are: the hint where the mean is nothing known
    "step 1": BACK, "step 2": BACK, "step 3": BACK, f"{LARGE:,.0f} on each rank": OVERFLOW,
    f"{LARGE:,.0f} R on the first rank": "What float16 can't hold is infinite after the cast: "
    "divide before the cast.",
}


def check_compress_fp16_hook(fn):
    hook_on_groups(_trial, fn)
    yield "in torch's DDP every rank ends with the mean, to float16's precision; 1 to 4 ranks"
    yield (f"nothing overflows: {LARGE:,.0f} on each of 4 ranks, or all of it on one of them, is "
           f"{LARGE:,.0f} in the mean")
    yield "one all-reduce of half the bytes for each bucket, and backward does not wait for it"
    yield "inside a group it talks to nobody outside"


def _trial(hook, ranks):
    given = [[_gradient(index, ranks.size, rank, step) for index, rank in enumerate(ranks.members)]
             for step in range(len(STEPS))]
    seen = steps_in_ddp(ranks.group, hook, Given(), [each[ranks.index] for each in given],
                        ranks.group)
    for what, gradients, step in zip(STEPS, given, seen):
        yield partial(_is_mean, f"{ranks}, {what}", *step, gradients, ranks.index, STEPS[what])
    yield partial(_sent_once, f"{ranks}", [call for _, calls in seen for call in calls])


def _gradient(index, R, rank, step):
    """Whole numbers of which float16 holds all means; of the last steps one number alone."""
    if step >= 3:
        of_rank = {3: LARGE, 4: 0.0 if index else LARGE * R}
        return torch.full((COUNT,), of_rank[step])
    draw = torch.Generator().manual_seed(100 * step + rank)
    if rank == 0:  # odd numbers of 11 bits, times 4: bfloat16 has 8 bits
        return 4.0 * (1025 + 2 * torch.randint(256, (COUNT,), generator=draw))
    return 96.0 * torch.randint(-7, 8, (COUNT,), generator=draw)


def _is_mean(where, got, calls, gradients, index, hint):
    expect(all(call.ops for call in calls), f"{where}: of {len(calls)} buckets not all are sent",
           "From its second step on DDP has several buckets, and calls the hook for each.")
    sent = [x.data_ptr() for call in calls for x in call.sent]
    expect(len(sent) == len(set(sent)), f"{where}: two buckets travel in the same memory", "The "
           "next one comes while this one is under way: .to(...) makes a new tensor for each.")
    R, right, mine = len(gradients), sum(gradients) / len(gradients), gradients[index]
    explain(f"{where}: the gradient", got, right, {
        f"{R} times what is right": (
            R * right, "It is the sum. DDP averages by itself only without a hook: divide by "
            "dist.get_world_size(group)."),
        f"1/{R} of what is right": (right / R, "Divided by the ranks twice? Once is the mean."),
        "divided by the number of all ranks": (right * R / dist.get_world_size(), ""),
        "bfloat16's": (sum(each.bfloat16().float() for each in gradients) / R, "Use torch.float16, "
                       "which has three bits more."),
        "this rank's own": (mine, BACK), "this rank's own / R": (mine / R, BACK),
        "the mean + this rank's own / R": (right + mine / R, "copy_ the mean, don't add it."),
    }, hint)


def _sent_once(where, calls):
    for call in calls:
        names = [op.name for op in call.ops]
        expect(names == ["all_reduce"], f"{where}: for 1 bucket it calls {', '.join(names)}", "One "
               "all_reduce for the whole bucket: narrow bucket.buffer(), not each gradient.")
        sent = call.ops[0].payload_bytes
        expect(2 * sent == call.nbytes, f"{where}: a bucket of {call.nbytes} bytes travels as "
               f"{sent}", "Cast before the all-reduce, once, and cast back after it.")
        expect(not call.waited, f"{where}: the hook waits for the all-reduce before it returns",
               "So backward stands still until the network is done. dist.all_reduce(..., "
               "async_op=True).get_future() does not wait; put what comes after the all-reduce "
               "into .then(...).")
