"""Our ring all-reduce, from send and recv, against the backend's own: a ratio for `make bench`."""

import statistics
import time

import torch
import torch.distributed as dist

from ranklab.collectives import ring_all_reduce
from ranklab.engine import device, launch
from ranklab.projects.clock import finish, wait_for_all


def bench(ranks=(2, 4), nbytes=64 * 2**20, pairs=15):
    """Return {ranks: the backend's time over ours} for one all-reduce, from interleaved runs."""
    return {R: launch(_ring_against_backend, nbytes, pairs, ranks=R, timeout=300)[0] for R in ranks}


def _ring_against_backend(nbytes, pairs):
    x = torch.ones(nbytes // 4, device=device())
    out, theirs, ratios = torch.empty_like(x), torch.empty_like(x), []
    for _ in range(pairs + 2):
        theirs.copy_(x)
        seconds = []
        # Both write into memory that is there already, as a training loop's buckets are.
        for all_reduce in (lambda: dist.all_reduce(theirs), lambda: ring_all_reduce(x, out=out)):
            wait_for_all()
            start = time.perf_counter()
            all_reduce()
            finish()
            wait_for_all()  # the slowest rank's time
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[2:])


if __name__ == "__main__":
    for R, ratio in bench().items():
        print(f"ring all-reduce from send and recv, 64 MB, {R} ranks: {ratio:.2f} of the backend's "
              "bandwidth (aim: 0.5 or more)")
