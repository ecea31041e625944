"""Print ratios of running times: `make bench`. Nothing is asserted: clocks differ by machine.

Each comparison interleaves its candidates, so that a busy moment hits all of them, and compares
medians. The parent of everything is this one process.
"""
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from ranklab import device, launch
from ranklab.basics.machine import cores

RANKS, ROUNDS = 4, 3
SMALLEST_JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def sum_of_ones():
    """Return the sum of a one from each rank: the smallest job there is."""
    x = torch.ones(1, device=device())
    dist.all_reduce(x)
    return x.item()


# --- four ways to get four ranks --------------------------------------------------------------

def by_launch():
    launch(sum_of_ones, ranks=RANKS)


def by_torchrun():
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SMALLEST_JOB)
        script.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={RANKS}", script.name]
        subprocess.run(command, check=True, capture_output=True,
                       env={"OMP_NUM_THREADS": "1", **os.environ})


def by_spawn():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_spawned, (f"file://{folder}/meet",), nprocs=RANKS)


def _spawned(rank, meeting_place):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def by_ipyparallel():
    import ipyparallel

    with tempfile.TemporaryDirectory() as folder:
        with ipyparallel.Cluster(n=RANKS, log_level=50) as engines:
            jobs = [engines[rank].apply_async(_spawned_on_engine, rank, RANKS, folder)
                    for rank in range(RANKS)]
            for job in jobs:
                job.get(timeout=120)


def _spawned_on_engine(rank, size, folder):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=size)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def bench_launch():
    """Time a launch from the call to the result of a first collective on fresh ranks."""
    ways = {"launch": by_launch, "torchrun": by_torchrun, "spawn": by_spawn}
    try:
        import ipyparallel  # noqa: F401  (looks whether it is there)
        ways["ipyparallel"] = by_ipyparallel
    except ImportError:
        print("ipyparallel is left out: python -m pip install -c constraints.txt -e '.[bench]'")
    by_launch()                                    # launch is meant warm: its server runs
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    print(f"{RANKS} fresh ranks and one all-reduce, median of {ROUNDS}")
    table({name: statistics.median(times) for name, times in seconds.items()}, "launch")


def table(seconds, reference):
    """Print each candidate's seconds, and how many times the reference's they are."""
    for name, value in seconds.items():
        print(f"    {name:12} {value:8.3f} s   {value / seconds[reference]:6.1f} x {reference}")


def main():
    print(f"{cores()} cores, {torch.cuda.device_count()} GPUs, torch {torch.__version__}, "
          f"load {os.getloadavg()[0]:.1f}")
    bench_launch()
    sys.stdout.flush()
    # Our ring all-reduce against the backend's.
    subprocess.run([sys.executable, Path(__file__).with_name("bench_ring.py")], check=True)
    # OverlappedDataParallel against torch's DDP, a CNN and a GPT.
    subprocess.run([sys.executable, Path(__file__).with_name("bench_data_parallel.py")], check=True)
    # ZeRO against FSDP2 and DeepSpeed; tensor parallelism against DTensor.
    subprocess.run([sys.executable, Path(__file__).with_name("bench_steps.py")], check=True)
    # A pipeline against torch.distributed.pipelining.
    subprocess.run([sys.executable, Path(__file__).with_name("bench_pipeline.py")], check=True)
    # 3D parallelism against DTensor, FSDP2 and torch.distributed.pipelining together.
    subprocess.run([sys.executable, Path(__file__).with_name("bench_hybrid.py")], check=True)
    # A test on ranks, and a notebook's cell on ranks, by us and by others.
    subprocess.run([sys.executable, Path(__file__).with_name("bench_own_project.py")], check=True)


if __name__ == "__main__":
    main()
