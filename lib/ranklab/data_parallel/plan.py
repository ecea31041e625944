"""When each bucket is sent, and which buckets leave the least time exposed; a model, without ranks.

An all-reduce of n bytes takes alpha + n * beta seconds, and all all-reduces share one link.
"""

from types import SimpleNamespace

from ranklab.data_parallel.buckets import assign_buckets


def plan_buckets(ready, nbytes, alpha, beta):
    """Find the buckets for which the last all-reduce ends earliest.

    Gradient i has nbytes[i] bytes and is ready at ready[i] seconds, not before gradient i-1. A
    bucket of consecutive gradients is sent once its last is ready and the previous bucket has
    arrived; then the link is busy for alpha + bytes * beta seconds. At time 0 the link is free.
    Returns: lists of indices of gradients.
    Cost: it tries n^2 / 2 buckets for n gradients.
    Lab: 03
    """
    # For the best plan of the first j gradients, keep its end, and where its last bucket starts.
    # Later gradients need no more than that, and an early end never does harm.
    ends, starts = [0.0], [0]
    offsets = [sum(nbytes[:i]) for i in range(len(nbytes) + 1)]  # bytes of the gradients before i
    for j, last in enumerate(ready, 1):
        end, start = min((max(ends[i], last) + alpha + (offsets[j] - offsets[i]) * beta, i)
                         for i in range(j))
        ends.append(end)
        starts.append(start)
    buckets, stop = [], len(ready)
    while stop:
        buckets.insert(0, list(range(starts[stop], stop)))
        stop = starts[stop]
    return buckets


def bucket_times(buckets, ready, nbytes, alpha, beta):
    """List (start, end), in seconds, of the all-reduce of each bucket."""
    times, free = [], 0.0
    for bucket in buckets:
        start = max(free, ready[bucket[-1]])
        free = start + alpha + sum(nbytes[i] for i in bucket) * beta
        times.append((start, free))
    return times


def exposed_seconds(buckets, ready, nbytes, alpha, beta):
    """Return the seconds from the end of backward to the end of the last all-reduce."""
    return bucket_times(buckets, ready, nbytes, alpha, beta)[-1][1] - ready[-1]


def capped_buckets(nbytes, bucket_cap_bytes=25 * 2**20):
    """Return the buckets of assign_buckets for gradients of one type, as lists of indices."""
    gradients = [SimpleNamespace(place=i, nbytes=n, dtype=None, device=None)
                 for i, n in enumerate(nbytes)]
    buckets = assign_buckets(gradients[::-1], bucket_cap_bytes)  # it begins at the end
    return [[gradient.place for gradient in bucket] for bucket in buckets]


def block_timeline(blocks=12, width=768, tokens=8192, flops=125e12):
    """Compute when the gradients of a GPT's blocks are ready, by default GPT-2's on an A100.

    The A100 runs at 40% of its peak. Backward takes 4 FLOPs a weight and token; everything else
    is free. All numbers are float32. The embedding is left out: its gradient is ready last, and
    always exposed.
    Returns: (ready, nbytes), the arguments of plan_buckets.
    """
    layers = [(4 * width**2, width), (4 * width**2, 4 * width, width, width),  # down; up and norm
              (width**2, width), (3 * width**2, 3 * width, width, width)]  # out; qkv and norm
    ready, nbytes, seconds = [], [], 0.0
    for layer in layers * blocks:
        seconds += 4 * layer[0] * tokens / flops
        ready += [seconds] * len(layer)
        nbytes += [4 * n for n in layer]
    return ready, nbytes
