"""The engine's one call: run a function on ranks, and get their return values."""

import contextlib
import os
import signal
import socket
import sys
import threading

from ranklab.engine import in_place, sharing, ship
from ranklab.engine.worker_group import WorkerGroup
from ranklab.engine.forkserver import fork_server, start_fork_server
from ranklab.engine.output import Output
from ranklab.engine.rank import Job
from ranklab.engine.report import RankError
from ranklab.engine.server_lines import ServerStuck
from ranklab.engine.surroundings import folder_of_workers

RANKS_WITHOUT_GPUS = 4
LONGEST = 20 * 24 * 3600  # seconds; the system's calls count milliseconds in 31 bits


def launch(fn, *args, ranks=None, nodes=1, timeout=60, stream=False, stall=5,
           rehearse=None, preload=(), headings=False, watch=None, share_gpu=False):
    """Run `fn(*args)` on fresh ranks; return [value on rank 0, value on rank 1, ...].

    Inside `fn` the default process group is up and torchrun's variables are set; `ranklab.device()`
    is the rank's own GPU, or the CPU (then the rank sees no GPU). `fn` and its classes may be
    defined in a notebook cell.

    ranks: number of ranks; by default one for each GPU, or 4 if there are fewer than two GPUs
    nodes: lay the ranks out as this many nodes (LOCAL_RANK, GROUP_RANK), on this one machine
    timeout: seconds, counted from when all ranks are up; time that a rank spent waiting for a core
        is added (on Linux). When it expires, a HangError says where each rank waits
    stream: show output as it comes instead of at the end
    stall: raise a HangError once all ranks have slept in communication for this many seconds;
        None: never
    rehearse: "gpu": run on the CPU, but raise where a GPU would; or set RANKLAB_REHEARSE=gpu
    preload: heavy modules that `fn` imports, such as "transformers": imported once, in the process
        that forks ranks; they must start no threads, and later edits to them are not seen
    headings: print each rank's output under a heading, instead of the rank before every line
    watch: called every 10 s with a text that says where each rank is
    share_gpu: if there are fewer GPUs than ranks, let ranks share them, with NCCL (2.30.3 or
        newer): NCCL's rules are then real, its speed is not; or set RANKLAB_SHARE_GPU=1

    Under torchrun or srun `fn` runs in place, on the job's ranks: leave `ranks` and `nodes` out or
    give the job's values; output always streams, and `timeout` is the limit of each collective.

    Raises: RankError if a rank raised or died (with its line); HangError if time runs out.
    Lab: 00
    """
    __tracebackhide__ = True  # IPython and pytest leave this frame out of tracebacks
    rehearse = rehearse or os.environ.get("RANKLAB_REHEARSE") or None
    share_gpu = sharing.is_wanted(share_gpu)
    _check(fn, ranks, nodes, timeout, stall, rehearse)
    if in_place.is_started_by_another():
        return in_place.run(fn, args, ranks, nodes, timeout, rehearse, share_gpu)
    if sys.platform == "win32":
        raise RuntimeError("launch needs Linux or macOS: on Windows, run this course inside WSL")
    start_fork_server()  # it imports torch, and meanwhile so does this process
    _import_torch()
    ranks = ranks or default_ranks()
    if ranks % nodes:
        raise ValueError(f"launch: nodes={nodes} must divide ranks={ranks}")
    gpus = 0 if rehearse else visible_gpus()
    if share_gpu := share_gpu and 0 < gpus < ranks:
        sharing.refuse_old_nccl()
    cwd, call = _working_folder(), ship.dumps_call(fn, args)
    server, output = fork_server(), Output(ranks, stream, headings)
    try:
        with ship.shared_file() as store, reserved_port() as port, folder_of_workers() as folder:
            job = Job(ranks, nodes, timeout, port, dict(os.environ), cwd, sys.path, folder,
                      rehearse, share_gpu, on_gpus=gpus >= ranks or share_gpu)
            with WorkerGroup(server, job, call, store, output, stall, preload, watch) as group:
                results = group.results()
                group.release()
    except ServerStuck:
        server.close()
        raise
    except (RankError, KeyboardInterrupt) as error:
        raise error.with_traceback(None)  # the message has the learner's lines; ours don't matter
    return ship.values(results)


def _check(fn, ranks, nodes, timeout, stall, rehearse):
    if not callable(fn):
        raise TypeError(f"launch: its first argument is the function to run, got {fn!r}")
    for name, value in (("ranks", 1 if ranks is None else ranks), ("nodes", nodes)):
        if not (type(value) is int and value > 0):
            raise ValueError(f"launch: {name} must be a whole number above 0, got {value!r}")
    for name, value in (("timeout", timeout), ("stall", 1 if stall is None else stall)):
        if not (isinstance(value, (int, float)) and 0 < value <= LONGEST):
            raise ValueError(f"launch: {name} must be a number of seconds, above 0 and at most "
                             f"{LONGEST:,}, got {value!r}")
    if rehearse not in (None, "gpu"):
        raise ValueError(f'launch: rehearse must be None or "gpu", got {rehearse!r}')
    if "RANKLAB_RANK" in os.environ:
        raise RuntimeError("launch was called inside a launch: a rank can't start ranks. "
                           "Call launch from the notebook or the script.")


def _import_torch():
    """Import torch without interruption: after a Ctrl-C halfway it could not be imported again."""
    if "torch" in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda *about: interrupts.append(about))
    try:
        import torch  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        signal.raise_signal(signal.SIGINT)


def _working_folder():
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise RuntimeError("launch: the working folder was deleted; os.chdir() to one that is "
                           "there") from None


def default_ranks():
    gpus = visible_gpus()
    return gpus if gpus > 1 else RANKS_WITHOUT_GPUS


def visible_gpus():
    import torch

    return torch.cuda.device_count()  # asks the driver's library; opens no GPU


@contextlib.contextmanager
def reserved_port():
    """Reserve a free port, for rank 0's MASTER_PORT; yield its number.

    Inside the block the kernel does not hand the port to any other process. Nothing listens on it:
    the ranks of a launch meet in a file.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's store sets it too
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
