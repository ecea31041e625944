"""storage_plan: the time of a checkpoint on a shared file system, and what limits it."""

import math
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class FileSystem:
    """A shared file system. math.inf: no limit, or no published one."""

    name: str
    write: float  # bytes/s, all nodes together
    read: float
    client: float = math.inf  # bytes/s of one node, each way
    operations: float = math.inf  # files that are created or opened in a second
    source: str = ""


@dataclass(frozen=True)
class Load:
    """A training job's demands on its storage.

    link        bytes/s of a node's card to the storage, each way
    checkpoint  bytes of weights and optimizer, each number once
    interval    seconds of work between two checkpoints
    copies      number of ranks with the same numbers: 1 with FSDP or ZeRO-3, otherwise the number
                of data-parallel ranks
    sharded     each rank writes 1/ranks of the checkpoint into its own file; in a restart each
                rank reads `copies` of these files. If not sharded, one rank writes one file, and in
                a restart each node opens it and reads all of it
    background  checkpoints are written while the job works; if not, the job waits for them
    data        bytes/s of training data that the working job reads; each node reads an equal share
    """

    nodes: int
    gpus: int  # GPUs of a node, one rank on each
    link: float
    checkpoint: float
    interval: float
    copies: int = 1
    sharded: bool = True
    background: bool = False
    data: float = 0.0

    def __post_init__(self):
        if self.nodes * self.gpus % self.copies:
            raise ValueError(f"copies={self.copies} must divide {self.nodes * self.gpus} ranks")


@dataclass(frozen=True)
class StoragePlan:
    """The times of a save and a restart, and the time that a run without failures loses."""

    save_seconds: float
    save_bound: str  # "link", "file system" or "metadata"
    restart_seconds: float
    restart_bound: str
    fits: bool  # whether data and background saves fit into the interval
    lost: float  # share of the time

    def __str__(self):
        return (f"save {self.save_seconds:,.1f} s ({self.save_bound}), restart "
                f"{self.restart_seconds:,.1f} s ({self.restart_bound}), {self.lost:.1%} lost"
                + ", does not fit" * (not self.fits))


# An example of each kind, as published. Amazon's `operations` are of metadata, or writes.
TECTONIC = FileSystem("Tectonic, as in Llama 3's training", 2e12, 2e12,
                      source="arXiv 2407.21783, 3.3.1: 2 TB/s sustained; peaks of 7 TB/s")
EFS = FileSystem("NFS: Amazon EFS, elastic", 5 * GIB, 60 * GIB, 1500 * 2**20, 500_000,
                 source="its user guide's performance table, 2025: regional, at most")
LUSTRE = FileSystem("Lustre: FSx of 100 TiB, 1,000 MB/s for each", 100e9, 100e9,
                    operations=192_000, source="its API reference: PerUnitStorageThroughput and "
                    "Iops, at most")
S3 = FileSystem("objects: one prefix of Amazon S3", math.inf, math.inf, operations=3_500,
                source="its user guide: 3,500 PUT and 5,500 GET a second and prefix")
SYSTEMS = TECTONIC, EFS, LUSTRE, S3


def storage_plan(load, system):
    """Compute the StoragePlan of a Load on a FileSystem.

    A save, or the read at a restart, takes as long as the slowest of three parts, which is its
    bound:
    "link"         all nodes that write or read do so at once, each at load.link or system.client,
                   whichever is lower
    "file system"  the bytes of all nodes, at its write or read speed
    "metadata"     the files that are created, or that all ranks open, at its operations per second
    fits  During an interval of work the job reads its data, over links and file system as above.
          A background save comes after the data. True if both together fit into an interval
    lost  A turn is an interval (or the time of data and a background save, if that is longer),
          and then a save, if it is not in the background. lost is the fraction of the turn that
          is not the interval
    Lab: 15
    """
    ranks, link = load.nodes * load.gpus, min(load.link, system.client)
    writers, files = (load.nodes, ranks) if load.sharded else (1, 1)
    read, opened = (load.copies, ranks * load.copies) if load.sharded else (load.nodes, load.nodes)
    save = {"link": load.checkpoint / writers / link,
            "file system": load.checkpoint / system.write,
            "metadata": files / system.operations}
    restart = {"link": read * load.checkpoint / load.nodes / link,
               "file system": read * load.checkpoint / system.read,
               "metadata": opened / system.operations}
    saving = max(save.values())
    beside = load.interval * max(load.data / load.nodes / link, load.data / system.read)
    beside += saving * load.background
    turn = max(load.interval, beside) + saving * (not load.background)
    return StoragePlan(saving, max(save, key=save.get), max(restart.values()),
                       max(restart, key=restart.get), beside <= load.interval,
                       1 - load.interval / turn)
