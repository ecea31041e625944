"""Three ranks train with their state cut in three; one is killed for real, and a spare goes on from
the copy that its neighbour has in memory. For test_resilience_times.py: python <this> <folder>.
"""

import multiprocessing
import os
import signal
import sys

import torch
import torch.distributed as dist

from ranklab.resilience import Neighbour

STEPS = 12


def update(w, m, full):
    """A step of momentum; `full` is what all ranks have."""
    w.sub_(0.1 * m.mul_(0.9).add_(torch.sin(w) + full.mean()))


def train(rank, generation, folder):
    """All steps; rank 1 of the first generation is killed after the 7th, its last copy was the 6th.
    """
    w, m, full = torch.arange(4.0) + 4 * rank, torch.zeros(4), torch.empty(12)
    neighbour, step = Neighbour(), 0
    while step < STEPS:
        dist.init_process_group("gloo", f"file://{folder}/{generation}", world_size=3, rank=rank)
        try:
            step = neighbour.recover([w, m]) if generation else 0
            while step < STEPS:
                dist.all_gather_into_tensor(full, w)
                update(w, m, full)
                step += 1
                if step % 3 == 0:
                    neighbour.keep(step, [w, m])
                if (rank, generation, step) == (1, 0, 7):
                    os.kill(os.getpid(), signal.SIGKILL)
        except RuntimeError:  # gloo: the connection is closed
            generation += 1
        dist.destroy_process_group()
    torch.save((w, m), f"{folder}/rank{rank}")


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # nothing of torch runs yet
    ranks = [fork.Process(target=train, args=(*each, sys.argv[1]), daemon=True)
             for each in ((0, 0), (1, 0), (2, 0), (1, 1))]  # the last one waits for its turn
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    ends = [process.exitcode for process in ranks]
    sys.exit(0 if ends == [0, -signal.SIGKILL, 0, 0] else f"exit codes {ends}")
