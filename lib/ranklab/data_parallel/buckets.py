"""Averaging gradients: one message for each parameter, or for each bucket of parameters."""

import heapq

import torch
import torch.distributed as dist

from ranklab.basics.flat import pieces


def average_gradients(model, group=None):
    """Every gradient is the mean over ranks; a gradient that is None counts as zeros.

    The naive form: it starts when backward is over, and the message of a bias with ten numbers pays
    the same latency as the message of a matrix with a million.
    cost   one all-reduce for each parameter that requires a gradient
    lab    03
    """
    R = dist.get_world_size(group)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # others may have one, and wait for ours
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= R
        dist.all_reduce(parameter.grad, group=group)


def assign_buckets(parameters, bucket_cap_bytes):
    """Lists of parameters whose gradients travel together, in the order in which to send them.

    From the last parameter to the first, since backward begins at the end of the model. A bucket
    holds one type on one device. The parameter that makes it reach bucket_cap_bytes is its last.
    Buckets that never reach bucket_cap_bytes come last, in the order in which they were opened.
    error  bucket_cap_bytes below 1
    lab    03
    """
    if bucket_cap_bytes < 1:
        raise ValueError(f"bucket_cap_bytes={bucket_cap_bytes} must be at least 1")
    closed, still_open = [], {}
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket = still_open.setdefault(kind, [])
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= bucket_cap_bytes:
            closed.append(still_open.pop(kind))
    return closed + list(still_open.values())


def buckets_of(parameters, bucket_cap_bytes, group_of, new_bucket):
    """A new_bucket(parameters, group) for each message, in the order in which to send them.

    A bucket's parameters are of one type, on one device, and averaged over one group,
    group_of(parameter).
    """
    parameters = list(parameters)
    place, of_group = {p: i for i, p in enumerate(parameters)}, {}
    for parameter in parameters:
        of_group.setdefault(group_of(parameter), []).append(parameter)
    rows = [[new_bucket(each, group) for each in assign_buckets(its, bucket_cap_bytes)]
            for group, its in of_group.items()]
    # What is complete earlier in backward comes first, whatever its group.
    return list(heapq.merge(*rows, key=lambda bucket: -min(map(place.get, bucket.parameters))))


class Bucket:
    """One flat piece of memory for the gradients of some parameters of one type and group.

    `flat` is what travels; `views` are parts of it, in the shapes of `parameters`; `missing` are
    the parameters that have no gradient yet in this backward.
    """

    def __init__(self, parameters, group=None, multiple_of=1):
        self.parameters, self.group = parameters, group
        n = sum(each.numel() for each in parameters)
        self.padding = -n % multiple_of  # numbers at the end of `flat`, always 0
        self.flat = parameters[0].new_zeros(n + self.padding)
        self.views = pieces(self.flat[:n], parameters)
        self.missing = set(parameters)

    def gather(self):
        """All gradients lie in `flat`, and are views of it; one that is None counts as zeros."""
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                view.zero_()  # and it stays None: perhaps no other rank has one either
            elif parameter.grad is not view:  # fresh from autograd, after zero_grad()
                view.copy_(parameter.grad)
                parameter.grad = view

    def fill_none(self, used):
        """A parameter without gradient has the mean of all ranks, if any rank used it."""
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None and parameter in used:
                parameter.grad = view

    def drop_gradients(self):
        """No parameter has a gradient."""
        for parameter in self.parameters:
            parameter.grad = None
