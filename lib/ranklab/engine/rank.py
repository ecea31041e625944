"""What happens inside a rank: set up, run the function, report, wait to be released, end.

After the function, the engine issues no collective of its own: a barrier here would match the one
that a learner forgot on some ranks, and hide the bug.
"""

import atexit
import contextlib
import faulthandler
import os
import pickle
import pkgutil
import signal
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

from ranklab.engine import modules, sharing, ship, surroundings
from ranklab.engine.report import Failure, Value
from ranklab.engine.waiting import Waiting

STARVED = 19  # at most this many times `timeout` is added for ranks that wait for a core
GROUP_GRACE = 30  # seconds: the group's own timeout comes after launch's, whose report says more


@dataclass(frozen=True)
class Job:
    """Settings that every rank of a launch receives before the call itself."""

    ranks: int
    nodes: int
    timeout: float
    port: int  # free, for a group that the learner's code makes
    environ: dict  # os.environ at the time of the launch
    cwd: str
    path: list  # sys.path
    folder: str  # for the sockets of ranks' workers
    rehearse: str | None = None  # "gpu"
    share_gpu: bool = False
    on_gpus: bool = False  # whether ranks have a GPU each, or share GPUs

    def environment(self, rank):
        """Return torchrun's variables for `rank`, with the ranks laid out as `nodes` nodes."""
        per_node = self.ranks // self.nodes
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(rank // per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "RANKLAB_RANK": str(rank),  # marks ranks of the engine
        }


def main(rank, channel, stack, job, report, store):
    """Run the function, report, wait to be released, leave the group.

    All arguments but `rank` are file descriptors.
    """
    faulthandler.enable(file=stack)  # a segfault leaves its Python stack
    faulthandler.register(signal.SIGUSR1, file=stack)  # works even while gloo blocks in C++
    modules_before = len(sys.modules)
    channel = socket.socket(fileno=channel)
    waiting = Waiting(channel)
    sys.stdout.reconfigure(line_buffering=True)  # so that a killed rank's prints are not lost
    pid = os.getpid()
    try:
        outcome = Value(_run(rank, job, store, waiting))
    except BaseException as error:
        outcome = Failure.from_error(error)
    if os.getpid() != pid:  # a child that the function forked: only the rank itself may report
        if isinstance(outcome, Failure):
            print(f"in a child process: {outcome.headline()}\n{outcome}", file=sys.stderr)
        return
    with os.fdopen(report, "wb") as file:
        pickle.dump(outcome, file, protocol=5)
        pickle.dump(modules.imported(modules_before), file)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the learner's code, or replaced by None
            stream.flush()
    channel.send(b"r")  # reported
    waiting.until_released()  # until then peers may still talk to this rank
    if device().type == "cuda":  # gloo's groups end with the process: to leave one takes 28 ms
        _leave_group()
    atexit._run_exitfuncs()  # os._exit skips them; DataLoader workers and profilers need them


def _run(rank, job_fd, store_fd, waiting) -> bytes:
    with ship.opened(job_fd) as content:  # one copy in memory for all ranks
        job = pickle.load(content)
        _set_up(rank, job, store_fd)
        fn, args = pickle.load(content)
    os.close(job_fd)
    waiting.begin(job.timeout, ship.path_of(store_fd))
    if hook := os.environ.get("RANKLAB_RANK_HOOK"):  # "module:function", which wraps fn
        fn = pkgutil.resolve_name(hook)(fn)
    waiting.channel.send(b"s")  # this rank and all others have started: the timeout begins
    value = fn(*args)
    _wait_for_device()
    try:
        return ship.dumps(value)
    except Exception as error:
        raise TypeError(f"the returned value, a {type(value).__name__}, can't be sent back: "
                        f"{error}") from None


def _set_up(rank, job, store_fd):
    import numpy

    os.environ.clear()
    os.environ.update(job.environ | job.environment(rank))
    os.chdir(job.cwd)
    sys.path[:] = job.path
    sys.argv[:] = [""]
    surroundings.settle(job.folder)
    numpy.random.seed()  # or all ranks, being forked, would draw the server's numbers
    init_group(rank, job, store_fd)


def init_group(rank, job, store_fd):
    """Make the default process group: NCCL if each rank on this machine has a GPU, else gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(job.environ.get("OMP_NUM_THREADS") or 1))
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)  # all ranks are on this host, whatever its name
    dist.set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG as it is now, not at the import
    limit = timedelta(seconds=(1 + STARVED) * job.timeout + GROUP_GRACE)
    # Not a TCPStore: torch looks up the name of each connection's peer, so a launch would take 5 s
    # more for each request that the network's name server does not answer.
    store = dist.FileStore(ship.path_of(store_fd), job.ranks)
    store.set_timeout(limit)
    # Every rank counts the same GPUs, so all make the same choice. With nodes=2 LOCAL_RANK starts
    # at 0 again on the second "node"; the GPU's number does not.
    placement = backend_and_device(rank, job.ranks, job.rehearse, share_gpu=job.share_gpu)
    hide_gpus_without_nccl(placement["backend"])
    dist.init_process_group(store=store, rank=rank, world_size=job.ranks, timeout=limit,
                            **placement)
    _wait_for_all(store, job.ranks)


def _wait_for_all(store, ranks):
    """Wait until all ranks have connected: one that dies at once must not break the others' set-up.

    This uses the store, not a collective, so that nothing is counted or traced.
    """
    if store.add("ranklab/arrived", 1) == ranks:
        store.set("ranklab/all", "")
    store.wait(["ranklab/all"])


def backend_and_device(index, ranks_on_machine, rehearse=None, sees_own=False, share_gpu=False):
    """Choose NCCL and a GPU if each rank on this machine has its own GPU, otherwise gloo.

    Returns the options for init_process_group.

    rehearse: "gpu": gloo, under a GPU's rules (rehearse.py)
    sees_own: this rank sees different GPUs from the other ranks
    share_gpu: if there are fewer GPUs than ranks, ranks share them, with NCCL (sharing.py)
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() and not rehearse else 0
    gpu = gpu_of(index, ranks_on_machine, gpus, sees_own)
    if gpu is None and gpus and share_gpu:
        gpu = index % gpus
        sharing.prepare(gpu, ranks_on_machine, gpus)
    if gpu is not None:
        torch.cuda.set_device(gpu)
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", gpu)}
    if ranks_on_machine > 1:
        surroundings.share_cores()
    if rehearse:
        from ranklab.engine.rehearse import install

        return install()
    return {"backend": "gloo"}


def hide_gpus_without_nccl(backend):
    """Hide GPUs that ranks would have to share: fully_shard uses any GPU that it sees."""
    if "nccl" not in backend:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def gpu_of(index, ranks_on_machine, gpus, sees_own=False):
    """Return the index of the GPU of rank `index` among the `gpus` that it sees, or None.

    Each process numbers the GPUs that it sees from 0.
    """
    if gpus >= ranks_on_machine:
        return index
    return 0 if sees_own and gpus else None


def device():
    """Return the torch.device of this rank: its GPU under NCCL or in a rehearsal, else the CPU.

    Outside a rank it is the CPU, so that a notebook's kernel never opens CUDA.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    if hasattr(torch, "gpu"):  # a rehearsal
        return torch.device("gpu", torch.gpu.current_device())
    return torch.device("cpu")


def _wait_for_device():
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an error of a kernel belongs to this launch, not to the next


def _leave_group():
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
