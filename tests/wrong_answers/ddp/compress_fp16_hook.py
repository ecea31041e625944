import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.ddp import compress_fp16_hook as answer

R = "dist.get_world_size(group)"
DIVIDED = f"buffer.div_({R})"
HALVES = f"{DIVIDED}.to(torch.float16)"
BACK = "lambda result: buffer.copy_(result.value()[0])"
KEPT = {}
WRONG = [
    mutant(answer, DIVIDED, "buffer", f"{BACK})", f"{BACK}.div_({R}))",
           says="Divide by the number of ranks before the all-reduce"),
    mutant(answer, HALVES, f"buffer.to(torch.float16) / {R}",
           says="36,864 R on the first rank.*divide before the cast"),
    mutant(answer, "future = ", "future = torch.futures.Future()\n    ", "return future.then",
           "future.set_result([halves])\n    return future.then", ", async_op=True).get_future()",
           ")", says="backward stands still until the network is done"),
    mutant(answer, DIVIDED, "buffer", says="the gradient is 4 times what is right"),
    mutant(answer, f"{BACK})", f"{BACK}.div_({R}))", says="Once is the mean"),
    mutant(answer, BACK, "lambda result: buffer",
           says="is this rank's own / R.*Does the result get back"),
    mutant(answer, "to(torch.float16)", "half().float()", says="Cast before the all-reduce"),
    mutant(answer, "to(torch.float16)", "bfloat16()", says="the gradient is bfloat16's"),
    mutant(answer, "(group)", "()",
           says="in the group of rank 0, .*divided by the number of all ranks"),
    mutant(answer, R, "group.size()", says=r"dist.get_world_size\(group\) takes None"),
    mutant(answer, "group, bucket: dist.GradBucket", "group, gradients", "bucket.b", "gradients.b",
           says="must be called bucket"),
    mutant(answer, f"future.then({BACK})", "buffer", says="DDP wants a future"),
    mutant(answer, f".then({BACK})", "", says="holds the all-reduce's list"),
    mutant(answer, BACK, "lambda result: None", says=r"what runs in .then\(...\) returns None"),
    mutant(answer, "value()[0]", "value()", says=r"take value\(\)\[0\]"),
    mutant(answer, ", async_op=True", "", says="With async_op=True"),
    mutant(answer, "buffer.copy_", "buffer.add_", says="don't add it"),
    mutant(answer, BACK, "buffer.copy_(future.value()[0])", says=r"Give .then\(...\) a function"),
    mutant(answer, HALVES, "KEPT.setdefault(buffer.numel(), torch.empty_like(buffer, dtype="
           f"torch.float16)).copy_({DIVIDED})", says="travel in the same memory", KEPT=KEPT),
]


def compress_fp16_hook__one_by_one(group, bucket: dist.GradBucket):
    """for 1 bucket it calls all_reduce, all_reduce, all_reduce, all_reduce, all_reduce"""
    halves = [g.div(dist.get_world_size(group)).half() for g in bucket.gradients()]
    futures = [dist.all_reduce(each, group=group, async_op=True).get_future() for each in halves]

    def back(_):
        return bucket.buffer().copy_(torch.cat([each.flatten() for each in halves]))

    return torch.futures.collect_all(futures).then(back)


def compress_fp16_hook__only_the_last_bucket(group, bucket: dist.GradBucket):
    """calls the hook for each"""
    buffer, future = bucket.buffer(), torch.futures.Future()
    if bucket.is_last():
        dist.all_reduce(buffer.div_(dist.get_world_size(group)), group=group)
    future.set_result(buffer)
    return future
