"""Buckets: which gradients travel together, and the flat memory that holds them."""

import heapq

from ranklab.basics.flat import pieces


def assign_buckets(parameters, bucket_cap_bytes):
    """Group parameters whose gradients are sent together; list the groups in sending order.

    Go from the last parameter to the first, since backward begins at the end of the model.
    A bucket holds one dtype on one device. The parameter with which it reaches bucket_cap_bytes is
    its last. Buckets that never reach it come last, in the order in which they were opened.
    Returns: a list of lists of parameters.
    Raises: ValueError for a bucket_cap_bytes below 1.
    Lab: 03
    """
    if bucket_cap_bytes < 1:
        raise ValueError(f"bucket_cap_bytes={bucket_cap_bytes} must be at least 1")
    closed, still_open = [], {}
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket = still_open.setdefault(kind, [])
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= bucket_cap_bytes:
            closed.append(still_open.pop(kind))
    return closed + list(still_open.values())


def buckets_of(parameters, bucket_cap_bytes, group_of, new_bucket):
    """Make a new_bucket(parameters, group) for each message, in the order of sending.

    A bucket's parameters have one type and one device, and are averaged over one group,
    group_of(parameter).
    """
    parameters = list(parameters)
    place, groups = {p: i for i, p in enumerate(parameters)}, {}
    for parameter in parameters:
        groups.setdefault(group_of(parameter), []).append(parameter)
    rows = [[new_bucket(bucket, group) for bucket in assign_buckets(members, bucket_cap_bytes)]
            for group, members in groups.items()]
    # A group's buckets keep their order; of two groups' next ones, the one that is complete earlier
    # in backward comes first.
    return list(heapq.merge(*rows, key=lambda bucket: -min(map(place.get, bucket.parameters))))


class Bucket:
    """Hold the gradients of some parameters of one type and group in one flat tensor.

    flat: the message.
    views: views into `flat`, in the shapes of `parameters`.
    missing: the parameters that have no gradient yet in this backward.
    """

    def __init__(self, parameters, group=None, multiple_of=1):
        self.parameters, self.group = parameters, group
        n = sum(p.numel() for p in parameters)
        self.padding = -n % multiple_of  # numbers at the end of `flat`, always 0
        self.flat = parameters[0].new_zeros(n + self.padding)
        self.views = pieces(self.flat[:n], parameters)
        self.missing = set(parameters)

    def gather(self):
        """Move all gradients into `flat` and make them views of it; None becomes zeros there."""
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                view.zero_()  # and it stays None: perhaps no other rank has one either
            elif parameter.grad is not view:  # fresh from autograd, after zero_grad()
                view.copy_(parameter.grad)
                parameter.grad = view

    def fill_none(self, used):
        """Set the missing gradients to the mean over ranks, for parameters that some rank used."""
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None and parameter in used:
                parameter.grad = view

    def drop_gradients(self):
        """Set the gradient of every parameter to None."""
        for parameter in self.parameters:
            parameter.grad = None
