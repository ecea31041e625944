"""compress_fp16_hook, registered in torch's DDP."""

import inspect

import torch
import torch.distributed as dist

from ranklab.checks.ddp.hooks import BACK, COUNT, FUNCTION, LIST, Given, steps_in_ddp
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.ddp import compress_fp16_hook, finished

LARGE = 36_864.0  # 9 * 2**12: float16 holds it, and a half, third and quarter, but not the double
OVERFLOWS = (f"the gradient of step 4, {LARGE:,.0f} on each rank,",
             f"the gradient of step 5, {LARGE:,.0f} R on the first rank,")
GRADIENTS = tuple(f"the gradient of step {step}" for step in (1, 2, 3)) + OVERFLOWS
COST = ("the list of what is called for a bucket", "bytes sent",
        "whether the hook waits for the all-reduce before it returns")


def _gradient(index, R, rank, step):
    """Return whole numbers whose means float16 holds; in the last steps, only one number."""
    if step >= 3:
        of_rank = {3: LARGE, 4: 0.0 if index else LARGE * R}
        return torch.full((COUNT,), of_rank[step])
    draw = torch.Generator().manual_seed(100 * step + rank)
    if rank == 0:  # odd numbers of 11 bits, times 4: bfloat16 has 8 bits
        return 4.0 * (1025 + 2 * torch.randint(256, (COUNT,), generator=draw))
    return 96.0 * torch.randint(-7, 8, (COUNT,), generator=draw)


def _see(fn, case, ranks):
    _, *names = inspect.signature(fn).parameters
    if names != ["bucket"]:  # DDP would raise a KeyError
        yield {"the name of its second parameter": ", ".join(names)}
        return
    inputs = [_gradient(ranks.index, ranks.size, dist.get_rank(), step)
              for step in range(len(GRADIENTS))]
    means, of_steps = zip(*steps_in_ddp(ranks.group, fn, Given(), inputs, ranks.group))
    calls = [call for each in of_steps for call in each]
    sent = [[{x.data_ptr() for x in call.sent} for call in each] for each in of_steps]
    nbytes = sum(op.payload_bytes for call in calls for op in call.ops)
    shared = any(sum(map(len, each)) > len(set().union(*each)) for each in sent)
    yield {"the name of its second parameter": "bucket",
           "whether two buckets travel in the same memory": Must(shared, False)}
    if shared:  # then chance decides which numbers arrive
        return
    yield {
        **dict(zip(GRADIENTS, means)),
        **dict(zip(COST, (
            Must(sorted({", ".join(op.name for op in call.ops) for call in calls}),
                 ["all_reduce"]),
            AtMost(100 * nbytes / sum(call.nbytes for call in calls), 50,
                   "sends {:.1f} bytes for each 100 bytes of gradients; {:.0f} are enough"),
            # One rank alone has nobody to wait for.
            Must(ranks.size > 1 and any(call.waited for call in calls), False)))),
    }


def by_gathering(group, bucket: dist.GradBucket):
    buffer = bucket.buffer()
    of_ranks = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, buffer, group=group)
    return finished(buffer.copy_(torch.stack(of_ranks).double().mean(0)))


def one_by_one(group, bucket: dist.GradBucket):
    halves = [g.div(dist.get_world_size(group)).half() for g in bucket.gradients()]
    futures = [dist.all_reduce(each, group=group, async_op=True).get_future() for each in halves]

    def back(_):
        return bucket.buffer().copy_(torch.cat([each.flatten() for each in halves]))

    return torch.futures.collect_all(futures).then(back)


def only_the_last_bucket(group, bucket: dist.GradBucket):
    buffer = bucket.buffer()
    if bucket.is_last():
        dist.all_reduce(buffer.div_(dist.get_world_size(group)), group=group)
    return finished(buffer)


R = "dist.get_world_size(group)"
DIVIDED, CAST = f"buffer.div_({R})", "to(torch.float16)"
THEN = "lambda result: buffer.copy_(result.value()[0])"
RETURN, ASYNC = f"return future.then({THEN})", ", async_op=True).get_future()"
FP16 = Proof(
    compress_fp16_hook,
    Stage({"in torch's DDP every rank ends with the mean, to float16's precision; 1 to 4 ranks": (),
           f"nothing overflows: {LARGE:,.0f} on each of 4 ranks, or all of it on one of them, is "
           f"{LARGE:,.0f} in the mean": OVERFLOWS,
           "one all-reduce of half the bytes for each bucket, and backward does not wait for it":
           COST, "inside a group it talks only to that group's ranks": ()},
          _see, ("five steps in torch's DDP",), (4,), (ALL, *GROUPS), oracle=by_gathering),
    mistakes=(
        Slip("float16 overflows above 65,504: divide by the number of ranks before the all-reduce, "
             "not after.", (DIVIDED, "buffer", THEN, f"{THEN}.div_({R})")),
        Slip("Values that float16 can't hold become infinite in the cast: divide before the cast.",
             (f"{DIVIDED}.{CAST}", f"buffer.{CAST} / {R}"),
             (f"{DIVIDED}.{CAST}", f"buffer.{CAST}.div_({R})")),
        Slip("That is the sum. With a hook, DDP doesn't average by itself: divide by "
             "dist.get_world_size(group).", (DIVIDED, "buffer")),
        Slip("You divided by the number of ranks twice: dividing once gives the mean.",
             (THEN, f"{THEN}.div_({R})")),
        Slip(BACK, (THEN, "lambda result: buffer"), (f".then({THEN})", ""),
             (THEN, "lambda result: None"),
             (DIVIDED, f"(buffer / {R})", THEN, "lambda result: buffer")),
        Slip("Copy the mean into the buffer with copy_; don't add it.",
             ("buffer.copy_", "buffer.add_")),
        Slip("Cast once before the all-reduce, and cast back only after it.",
             (CAST, "half().float()"), (f".{CAST}", "")),
        Slip("Use torch.float16, which has three more bits of precision than bfloat16.",
             (CAST, "bfloat16()")),
        Slip("Backward is blocked until the network is done. dist.all_reduce(..., "
             "async_op=True).get_future() does not wait; put what comes after the all-reduce into "
             ".then(...).",
             ("future = ", "future = torch.futures.Future()\n    ", "return future.then",
              "future.set_result([halves])\n    return future.then", ASYNC, ")"),
             (RETURN, f"future.wait()\n    {RETURN}")),
        Slip("Divide by the number of ranks in the group: dist.get_world_size(group).",
             ("(group)", "()")),
        Slip("Pass `group` to the all-reduce.", ("halves, group=group", "halves")),
        Slip("Pass `group` to the all-reduce and to dist.get_world_size.",
             ("(group)", "()", "halves, group=group", "halves")),
        Slip("Each bucket needs its own memory: DDP calls the hook with the next bucket while this "
             "one is still being sent.",
             (f"{DIVIDED}.{CAST}", f"KEPT.setdefault(buffer.shape, {DIVIDED}"
                              f".{CAST}).copy_(buffer)"), KEPT={}),
        Slip("register_comm_hook(None, hook) means all ranks. None has no size(), but "
             "dist.get_world_size(group) accepts None.", (R, "group.size()")),
        Slip("The second parameter must be called bucket and annotated with dist.GradBucket.",
             ("group, bucket: dist.GradBucket", "group, gradients", "bucket.b", "gradients.b"),
             ("bucket: dist.GradBucket", "bucket: torch.Tensor")),
        Slip("Return a future, so that DDP can continue backward meanwhile: dist.all_reduce(..., "
             "async_op=True).get_future() is one, and so is what its .then(...) returns.",
             (RETURN, "return buffer"),
             (RETURN, "future.wait()\n    return buffer.copy_(halves)")),
        Slip(LIST, ("value()[0]", "value()"), (THEN, "lambda result: result.value()")),
        Slip("With async_op=True, all_reduce returns a Work at once, and a Work has get_future().",
             (", async_op=True", "")),
        Slip(FUNCTION, (THEN, "buffer.copy_(future.value()[0])"), (THEN, "buffer.copy_(halves)")),
        Slip("Use one all_reduce for the whole bucket: cast bucket.buffer(), not each gradient.",
             one_by_one),
        Slip("From its second step on, DDP has several buckets and calls the hook for each.",
             only_the_last_bucket),
    ), hints=(
        "bucket.buffer() is the bucket's flat gradient: cast it, all-reduce it, copy it back.",
        "Divide by the number of ranks before the cast, so that no sum overflows. "
        "dist.all_reduce(..., async_op=True).get_future() gives a future; .then(f) gives another "
        "one, which holds what f returns.",
        "R = dist.get_world_size(group); halves = buffer.div_(R).to(torch.float16); future = "
        "dist.all_reduce(halves, group=group, async_op=True).get_future(); return "
        "future.then(lambda done: buffer.copy_(done.value()[0]))",
    ))
