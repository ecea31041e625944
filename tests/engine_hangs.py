"""Functions that hang, for tests/test_engine_failures.py; ranks import this without pytest."""

import os
import signal
import threading

import torch
import torch.distributed as dist


def skipped_collective():
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3))


def exchange(x):
    peer = 1 - dist.get_rank()
    dist.send(x, peer)
    dist.recv(x, peer)


def both_send_first():
    exchange(torch.ones(4))


def endless_loop():
    while dist.get_rank() == 0:
        pass
    dist.barrier()


def returned_early():
    for step in range(3):
        if dist.get_rank() == 0 and step == 2:
            return
        dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1))


def forgotten_barrier():
    if dist.get_rank() == 0:
        dist.barrier()


def inside_a_model():
    class Gather(torch.nn.Module):
        def forward(self, x):
            return dist.all_gather_object([None, None], x)

    if dist.get_rank() == 0:
        Gather()(torch.ones(1))


def in_a_thread():
    thread = threading.Thread(target=dist.recv, args=(torch.ones(1), 1 - dist.get_rank()))
    thread.start()
    thread.join()


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS = {  # name -> what launch is given
    "skipped collective": ((skipped_collective,), 3),
    "both send first": ((both_send_first,), 2),
    "endless loop": ((endless_loop,), 2),
    "returned early": ((returned_early,), 2),
    "forgotten barrier": ((forgotten_barrier,), 2),
    "inside a model": ((inside_a_model,), 2),
    "in a thread": ((in_a_thread,), 2),
    "stopped": ((stopped,), 1),
    "the collective itself": ((dist.recv, torch.ones(1)), 2),
}
