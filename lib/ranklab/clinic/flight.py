"""Flight recorder: what torch keeps about each rank's last collectives, and who is waited for.

flight_dumps.json holds a dump of each rank of _hung_grid(), made with torch 2.13 on gloo: the whole
dumps, but for stacks, threads and times.
"""

import json
import pickle
import re
import subprocess
import sys
import threading
import time
from importlib.resources import files

import torch
import torch.distributed as dist

DUMPS = files(__package__) / "flight_dumps.json"
LEFT_OUT = ("thread_id", "thread_name", "time_created_ns", "time_discovered_started_ns",
            "time_discovered_completed_ns", "frames", "timeout_ms")


def read_dumps():
    """Return {rank: its dump}: a hang of four ranks, recorded."""
    return {int(rank): dump for rank, dump in json.loads(DUMPS.read_text()).items()}


def dump_here():
    """Return the flight recorder of this process: a dict with "entries" and others.

    On NCCL the watchdog writes the same as a pickle to a file, when its time is up.
    """
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    dump["entries"] = [{key: value for key, value in entry.items() if key not in LEFT_OUT}
                       for entry in dump["entries"]]
    return dump


def unfinished(dump):
    """Return the entries of a dump that have not been completed: what the rank waits in."""
    return [entry for entry in dump["entries"] if not entry["retired"]]


def not_waiting(dumps):
    """Return the ranks that wait in no collective: the others wait for them, directly or not."""
    return [rank for rank, dump in dumps.items() if not unfinished(dump)]


def write_as_nccl(dumps, groups, folder):
    """Write the dumps as files for torchfrtrace, with what gloo leaves out.

    groups: {a group's name: its ranks}. Gloo writes neither these nor which calls have started; a
    call that is not completed counts as started. torchfrtrace looks at calls of NCCL only.
    """
    for rank, dump in dumps.items():
        entries = [{**dict.fromkeys(LEFT_OUT, 0), **entry, "frames": [],
                    "process_group": tuple(entry["process_group"]),
                    "profiling_name": entry["profiling_name"].replace("gloo", "nccl"),
                    "state": "completed" if entry["retired"] else "started"}
                   for entry in dump["entries"]]
        config = {name: {"name": name, "desc": "", "ranks": str([*ranks])}
                  for name, ranks in groups.items() if rank in ranks}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps({**dump, "entries": entries, "pg_config": config}))


def torchs_verdict(folder):
    """Run torchfrtrace on a folder; return [(group, number of the call, missing ranks)], sorted."""
    result = subprocess.run([sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace",
                             str(folder)], text=True, capture_output=True)
    text = result.stdout + result.stderr
    return sorted((group, int(number), missing) for number, group, missing in re.findall(
        r"sequence number: (\d+).*?group info: (\S+).*?missing ranks: (\{.*?\})", text, re.DOTALL))


def _hung_grid(folder, steps=3):
    """Hang in the last step on 2 x 2 ranks; return this rank's dump, taken while it hung.

    In a step the ranks of a row add up an activation twice, the ranks of a column a gradient, and
    all ranks a loss. In the last step one rank does not come to its second sum until all dumps are
    there; then it goes on, and so do the others.
    """
    rank, dump = dist.get_rank(), []
    rows, columns = ([dist.new_group(ranks) for ranks in pairs] for pairs in (
        ((0, 1), (2, 3)), ((0, 2), (1, 3))))
    row, column = rows[rank // 2], columns[rank % 2]

    def take():
        while not (folder / "dump").exists():
            time.sleep(0.02)
        dump.append(dump_here())
        (folder / f"{rank}").touch()

    def come_late():
        time.sleep(1)  # the others are waiting by now
        (folder / "dump").touch()
        while not all((folder / f"{each}").exists() for each in range(4)):
            time.sleep(0.02)

    taker = threading.Thread(target=take)
    taker.start()
    for step in range(1, steps + 1):
        dist.all_reduce(torch.ones(8, 16), group=row)
        if rank == 2 and step == steps:
            come_late()
        dist.all_reduce(torch.ones(8, 16), group=row)
        dist.all_reduce(torch.ones(500), group=column)
        dist.all_reduce(torch.ones(1))
    taker.join()
    return dump[0]
