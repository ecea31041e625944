"""Ranks that wait, for tests/test_engine_stalls.py; ranks import this without pytest."""

import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LONG = 1.5  # seconds, of which a right program waits
RIGHT = "right"


class Either(torch.nn.Module):
    """Uses one of its parameters, or both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)


# wrong: ranks that wait for ever

def one_step_more():
    model = DistributedDataParallel(Either())
    for _ in range(2 + dist.get_rank()):
        model(torch.ones(1, 2), True).sum().backward()


def one_step_more_with_buffers():
    model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
    for _ in range(2 + dist.get_rank()):
        model(torch.ones(2, 2)).sum().backward()


def a_parameter_that_one_rank_uses():
    model = DistributedDataParallel(Either())
    model(torch.ones(1, 2), dist.get_rank() == 0).sum().backward()


def unequal_micro_batches():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    stage = PipelineStage(torch.nn.Linear(2, 2), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2 + rank, loss_fn=lambda y, target: y.sum())
    schedule.step(*[torch.ones(6, 2)] * (rank == 0), target=torch.ones(6, 2))


def one_more_all_reduce(batches=range(3)):
    for i, _ in enumerate(batches):
        if i < 2 or dist.get_rank():
            dist.all_reduce(torch.ones(1))


def a_live_worker():
    batches = torch.utils.data.DataLoader(range(3), num_workers=1, persistent_workers=True)
    one_more_all_reduce(batches)


def a_bar():
    from tqdm import tqdm

    one_more_all_reduce(tqdm(range(3)))


def an_idle_pool():
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    one_more_all_reduce()


def an_asynchronous_tensor():
    from torch.distributed import _functional_collectives as functional

    if dist.get_rank():
        functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).sum()


WRONG = (one_step_more, one_step_more_with_buffers, a_parameter_that_one_rank_uses,
         unequal_micro_batches, a_live_worker, a_bar, an_idle_pool, an_asynchronous_tensor)


# right: ranks that wait long

def send_late(how):
    """Rank 1 answers late, and rank 0 waits."""
    x = torch.zeros(1)
    if dist.get_rank():
        how()
        dist.send(x + 1, 0)
    else:
        dist.recv(x, 1)
    return RIGHT


def by_a_thread():
    thread = threading.Thread(target=time.sleep, args=(LONG,))
    thread.start()
    thread.join()


def by_a_pool():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, LONG).result()


def by_a_busy_loop():
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        pass


def by_an_event():
    event = threading.Event()
    threading.Timer(LONG, event.set).start()
    event.wait()


def by_a_shell():
    os.system(f"sleep {LONG}")


def by_a_child():
    subprocess.Popen(["sleep", f"{LONG}"])
    os.wait()


def by_a_reader():
    child = subprocess.Popen(["sleep", f"{LONG}"], stdout=subprocess.PIPE)
    reader = threading.Thread(target=child.stdout.read)
    reader.start()
    reader.join()


def by_a_hook():
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: time.sleep(LONG))
    y.backward()


LATE = (by_a_thread, by_a_pool, by_a_busy_loop, by_an_event, by_a_shell, by_a_child, by_a_reader,
        by_a_hook)


def a_line_with_a_wait():
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.isend(x, 1).wait(); time.sleep(LONG)  # noqa: E702
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        dist.recv(x, 0)
    return RIGHT


def a_slow_disk():
    """The rank that coordinates writes inside torch.distributed, below its all_gather_object."""
    import tempfile

    import torch.distributed.checkpoint as checkpoint

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        os.fsync = lambda fd: time.sleep(LONG)
        checkpoint.save({"x": torch.ones(1)}, checkpoint_id=folders[0])
        dist.barrier()
    return RIGHT


def gives_up(call):
    """Rank 0 ends with an error of `call`, which has a limit; rank 1 waits for rank 0."""
    group = dist.new_group([0, 1])
    outcome = RIGHT
    if dist.get_rank() == 0:
        try:
            outcome = call(group)
        except RuntimeError:
            pass
    dist.barrier()
    return outcome


def a_group_with_a_limit():
    def call(group):
        # As new_group(timeout=), for which a busy machine might make the group itself too late.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LONG), group)
        dist.all_reduce(torch.ones(1), group=group)

    return gives_up(call)


def a_barrier_with_a_limit():
    return gives_up(lambda group: dist.barrier(group, timeout=timedelta(seconds=LONG)))


def a_monitored_barrier():
    return gives_up(lambda group: dist.monitored_barrier(group, timedelta(seconds=LONG)))


def a_wait_with_a_limit():
    return gives_up(lambda group: dist.irecv(torch.ones(1), 1, group).wait(
        timedelta(seconds=LONG)))


def a_thread_of_a_rank_that_has_returned():
    x = torch.zeros(1)
    if dist.get_rank():
        threading.Timer(LONG, dist.send, (x + 1, 0)).start()
    else:
        dist.recv(x, 1)
    return RIGHT


OTHERS = (a_line_with_a_wait, a_slow_disk, a_group_with_a_limit, a_barrier_with_a_limit,
          a_monitored_barrier, a_wait_with_a_limit, a_thread_of_a_rank_that_has_returned)


def a_group_with_other_processes(path):
    """One that others might belong to: it was not made from the launch's."""
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

    rank = dist.get_rank()
    group, _ = _new_process_group_helper(2, rank, [], Backend("gloo"), dist.FileStore(path, 2),
                                         "others", timeout=timedelta(seconds=1000))
    group.recv([torch.ones(1)], 1 - rank, 0).wait()
