"""Tensor fusion: many small all-reduces become a few large ones.

A message costs its latency however small it is, and a ring pays it 2(R-1) times. So tensors that
are ready at the same time are copied into one buffer, reduced together, and copied back.
"""


def fuse_tensors(tensors, threshold):
    """A list of lists: the positions in `tensors` of those that share one all-reduce.

    In the order given; each list has one dtype on one device, and at most `threshold` bytes unless
    it is a single tensor. A tensor joins the last list of its kind, or begins a new one.

    cost   nothing is sent or copied: this is the plan
    error  a negative threshold
    lab    05
    """
    if threshold < 0:
        raise ValueError(f"threshold={threshold} must not be negative")
    groups, last = [], {}  # last: (dtype, device) -> [positions, bytes] of its newest list
    for i, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        if kind not in last or last[kind][1] + tensor.nbytes > threshold:
            last[kind] = [[], 0]
            groups.append(last[kind][0])
        last[kind][0].append(i)
        last[kind][1] += tensor.nbytes
    return groups
