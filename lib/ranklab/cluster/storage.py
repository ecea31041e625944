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
    writers     "all": each rank writes 1/ranks of the checkpoint into a file of its own; in a
                restart each rank reads `copies` of them, and so has what it holds
                "one": a rank writes all into one file; in a restart each rank opens it, and each
                node reads all of it once
    beside      checkpoints are written while the job works on; else it stands still
    """

    nodes: int
    gpus: int  # of a node, one rank each
    link: float
    checkpoint: float
    interval: float
    copies: int = 1
    writers: str = "all"
    beside: bool = False
    tokens_per_second: float = 0.0  # all ranks together
    bytes_per_token: float = 4.0

    def __post_init__(self):
        if self.nodes * self.gpus % self.copies or self.writers not in ("all", "one"):
            raise ValueError(f"copies={self.copies} must divide {self.nodes * self.gpus} ranks, "
                             f'and writers={self.writers!r} must be "all" or "one"')


@dataclass(frozen=True)
class StoragePlan:
    """Seconds that the job and its storage need for each other; bounds are names of parts."""

    save_seconds: float
    save_bound: str  # "link", "file system" or "metadata"
    restart_seconds: float
    restart_bound: str
    fits: bool  # the data, and what is written beside the work
    lost: float  # share of the time, without failures

    def __str__(self):
        return (f"save {self.save_seconds:,.1f} s ({self.save_bound}), restart "
                f"{self.restart_seconds:,.1f} s ({self.restart_bound}), {self.lost:.1%} lost"
                + ", does not fit" * (not self.fits))


# An example of each kind, as published. Amazon's `operations` are those of metadata, or writes.
TECTONIC = FileSystem("Tectonic, as in Llama 3's training", 2e12, 2e12,
                      source="arXiv 2407.21783, 3.3.1: 2 TB/s sustained; peaks of 7 TB/s")
EFS = FileSystem("NFS: Amazon EFS, elastic", 5 * GIB, 20 * GIB, 1500 * 2**20, 50_000,
                 source="its user guide's performance table: regional, at most")
LUSTRE = FileSystem("Lustre: FSx of 100 TiB, 1,000 MB/s for each", 100e9, 100e9,
                    operations=192_000, source="its API reference: PerUnitStorageThroughput and "
                    "Iops, at most")
S3 = FileSystem("objects: one prefix of Amazon S3", math.inf, math.inf, operations=3_500,
                source="its user guide: 3,500 PUT and 5,500 GET a second and prefix")


def storage_plan(load, system):
    """The StoragePlan of a Load on a FileSystem.

    A save, or the read of a restart, takes as long as the slowest of three, which names its bound:
    "link"         of each node, all at once; at most system.client
    "file system"  bytes of all nodes, by its read or write
    "metadata"     files that are created, or opened by each rank, by its operations
    While the job works it reads its tokens, by all nodes alike. Storage does one thing at a time:
    an interval's tokens and what is written beside the work add up. `fits`: the job need not wait
    for them. `lost`: all seconds without work of a turn from checkpoint to checkpoint, which are
    those of a save (unless written beside) and of waiting where it does not fit, divided by the
    turn's seconds.
    source  Who reads and writes what: see Load
    lab     15
    """
    alone, ranks = load.writers == "one", load.nodes * load.gpus
    link = min(load.link, system.client)
    save = {"link": load.checkpoint / (1 if alone else load.nodes) / link,
            "file system": load.checkpoint / system.write,
            "metadata": (1 if alone else ranks) / system.operations}
    read = load.checkpoint * (load.nodes if alone else load.copies)
    restart = {"link": read / load.nodes / link, "file system": read / system.read,
               "metadata": ranks * (1 if alone else load.copies) / system.operations}
    saving = max(save.values())
    rate = load.tokens_per_second * load.bytes_per_token
    busy = load.interval * max(rate / load.nodes / link, rate / system.read)
    busy += saving * load.beside
    turn = max(load.interval, busy) + saving * (not load.beside)
    return StoragePlan(saving, max(save, key=save.get), max(restart.values()),
                       max(restart, key=restart.get), busy <= load.interval,
                       1 - load.interval / turn)
