"""storage_plan: how long a checkpoint takes on a shared file system, and what bounds it."""

import math
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class FileSystem:
    """A shared file system. math.inf: no limit, or none that is published."""

    name: str
    write: float  # bytes/s, all nodes together
    read: float
    client: float = math.inf  # bytes/s of one node, each way
    operations: float = math.inf  # files that are created or opened in a second
    source: str = ""


@dataclass(frozen=True)
class Load:
    """What a training job asks of its storage.

    link        bytes/s of a node's card to the storage, each way
    checkpoint  bytes of weights and optimizer, each number once
    interval    seconds of work between two checkpoints
    copies      ranks that hold the same numbers: 1 with FSDP or ZeRO-3, else data-parallel ranks
    sharded     each rank writes 1/ranks of the checkpoint, a file of its own; in a restart each
                rank reads `copies` of these files. Not sharded: one rank writes one file; in a
                restart each node opens it and reads all of it
    background  checkpoints are written while the job works on; else the job waits for them
    data        bytes/s of training data that the working job reads, all nodes together, alike
    """

    nodes: int
    gpus: int  # of a node, one rank each
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
    """How long a save and a restart take, and what a run without failures loses by them."""

    save_seconds: float
    save_bound: str  # "link", "file system" or "metadata"
    restart_seconds: float
    restart_bound: str
    fits: bool  # what is read and written beside the work
    lost: float  # share of the time

    def __str__(self):
        return (f"save {self.save_seconds:,.1f} s ({self.save_bound}), restart "
                f"{self.restart_seconds:,.1f} s ({self.restart_bound}), {self.lost:.1%} lost"
                + ", does not fit" * (not self.fits))


# An example of each kind, as published. Amazon's `operations` are those of metadata, or writes.
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
    """The StoragePlan of a Load on a FileSystem.

    A save, or the read of a restart, takes as long as the slowest of three, which names the bound:
    "link"         all nodes that write or read, at once, each by load.link, at most system.client
    "file system"  the bytes of all nodes, by its write or read
    "metadata"     the files that are created, or opened by all ranks, by its operations
    fits  While it works the job reads an interval's data, through links and file system as above.
          In the background it also writes a save, after the data. Both take an interval at most
    lost  A turn takes an interval, or what is beside the work, if that is longer; then a save,
          unless it is in the background. Lost is the share of the turn that is not the interval
    lab   15
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
