"""storage_plan: compared with plain formulas."""

from typing import NamedTuple

from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.cluster.storage import (
    EFS, LUSTRE, S3, TECTONIC, FileSystem, Load, StoragePlan, storage_plan,
)

# Llama 3 405B: 405.85 billion parameters (planner/published), 2 bytes and 12 of the optimizer
LLAMA = Load(2048, 8, 25e9, 14 * 405.85e9, 1200.0)
BIG, SMALL = (2048, 8, 25e9, 5.68e12, 1200.0), (4, 8, 12.5e9, 1e11, 300.0)
SLOW = FileSystem("a slow server", 2e9, 5e9, 1.5e9, operations=200)


class Case(NamedTuple):
    name: str
    load: Load
    system: FileSystem

    def __str__(self):
        return f"{self.name} on {self.system.name}"


CASES = (
    Case("Llama 3", Load(*BIG, data=1.1e7), TECTONIC),
    Case("Llama 3, one writer", Load(*BIG, sharded=False), TECTONIC),
    Case("Llama 3, NFS, in the background", Load(*BIG, background=True), EFS),
    Case("copies", Load(*BIG, copies=16, data=4e9), LUSTRE),
    Case("objects", Load(*BIG, 2), S3),
    Case("few nodes", Load(*SMALL, 8, data=2e10), LUSTRE),
    Case("few nodes, one writer", Load(*SMALL, 8, sharded=False, data=8e9), EFS),
    Case("as much data as the links can carry", Load(*SMALL, data=5e10), TECTONIC),
    Case("more data than the links can carry", Load(*SMALL, data=6e10), TECTONIC),
    Case("more data than the server can deliver", Load(*SMALL, data=8e9), SLOW),
    Case("data and saves", Load(*SMALL, background=True, data=4.4e9), SLOW),
    Case("data and long saves", Load(4, 8, 12.5e9, 7e11, 300.0, background=True, data=2e9), SLOW),
    Case("data, then saves", Load(*SMALL, data=4.4e9), SLOW),
    Case("many files", Load(256, 8, 1e10, 1e9, 300.0, 64), SLOW),
    Case("one file", Load(256, 8, 5e8, 1e7, 300.0, sharded=False), SLOW),
)
FIELDS = "save_seconds", "save_bound", "restart_seconds", "restart_bound", "lost"


def _see(fn, case):
    plan = fn(case.load, case.system)
    yield {"the type": type(plan).__name__, "fits": bool(getattr(plan, "fits", None)),
           **{field: getattr(plan, field, None) for field in FIELDS}}


def by_formulas(load, system):
    n, ranks, size = load.nodes, load.nodes * load.gpus, load.checkpoint
    link = min(load.link, system.client)
    writers, files, read, opened = (
        (n, ranks, load.copies, ranks * load.copies) if load.sharded else (1, 1, n, n))
    save = size / writers / link, size / system.write, files / system.operations
    restart = read * size / n / link, read * size / system.read, opened / system.operations
    bounds = "link", "file system", "metadata"
    waited = 0 if load.background else max(save)
    beside = max(load.data / n / link, load.data / system.read) * load.interval + (
        max(save) if load.background else 0)
    turn = max(load.interval, beside) + waited
    return StoragePlan(max(save), bounds[save.index(max(save))], max(restart),
                       bounds[restart.index(max(restart))], beside <= load.interval,
                       (turn - load.interval) / turn)


WRITERS, READERS = "(load.nodes, ranks) if load.sharded else (1, 1)", "(load.nodes, load.nodes)"
BY_LINK, BY_SYSTEM = "load.checkpoint / writers / link", "load.checkpoint / system.write"
AGAIN, AT_READ = "read * load.checkpoint / load.nodes / link", "load.checkpoint / system.read"
WHOLE = AGAIN.replace("read", "(read if load.sharded else load.nodes)")
DATA = "max(load.data / load.nodes / link, load.data / system.read)"
LOST, WAITED = "1 - load.interval / turn", "saving * (not load.background)"
STORAGE = Proof(
    storage_plan,
    Stage({"a save and a restart: links, file system, metadata; one writer or all; copies that "
           "read": (),
           "data and checkpoints together: what fits, and the share of the time that is lost":
           ("fits", "lost")}, _see, CASES, oracle=by_formulas),
    mistakes=(
        Slip("All nodes write their parts at once, each over its own link: divide by the number of "
             "writers.",
             (BY_LINK, "load.checkpoint / link")),
        Slip("The ranks of a node share its link: divide by the number of nodes, not ranks.",
             (WRITERS, WRITERS.replace("(load.nodes,", "(ranks,"))),
        Slip("If the checkpoint is not sharded, one rank writes it, over one node's link.",
             (WRITERS, WRITERS.replace("(1, 1)", "(load.nodes, 1)"))),
        Slip("If the checkpoint is not sharded, one rank creates one file.",
             (WRITERS, WRITERS.replace("(1, 1)", "(1, ranks)")),
             (WRITERS, WRITERS.replace("(1, 1)", "(1, load.nodes)"))),
        Slip("Each rank creates its own file: count ranks, not nodes.",
             (WRITERS, WRITERS.replace("ranks", "load.nodes"))),
        Slip("Each number is written once, however many ranks hold it: `copies` is for reading.",
             (BY_LINK, f"load.copies * {BY_LINK}"), (BY_SYSTEM, f"load.copies * {BY_SYSTEM}"),
             (BY_LINK, f"load.copies * {BY_LINK}", BY_SYSTEM, f"load.copies * {BY_SYSTEM}")),
        Slip("A node gets at most system.client bytes/s, however fast its link is.",
             ("min(load.link, system.client)", "load.link")),
        Slip("The slower of the node's link and system.client counts.",
             ("min(load.link, system.client)", "max(load.link, system.client)"),
             ("min(load.link, system.client)", "system.client")),
        Slip("load.link is in bytes/s, not bits/s: don't divide by 8.",
             ("min(load.link, system.client)", "min(load.link / 8, system.client)")),
        Slip("The three parts of a save happen at the same time: the slowest counts, not the sum.",
             ("saving = max(", "saving = sum(")),
        Slip("The three parts of a restart happen at the same time: the slowest counts, not the "
             "sum.", ("max(restart.values())", "sum(restart.values())")),
        Slip("The bound is the part that takes the longest.",
             ("max(save, key", "min(save, key"), ("max(restart, key", "min(restart, key")),
        Slip("Creating files also takes time: files / operations.",
             ("files / system.operations", "0")),
        Slip("Opening files also takes time: files / operations.",
             ("opened / system.operations", "0")),
        Slip("A save writes: use system.write.", (BY_SYSTEM, AT_READ)),
        Slip("A restart reads: use system.read.", (AT_READ, BY_SYSTEM)),
        Slip("Numbers that `copies` ranks hold are read `copies` times.",
             ("(load.copies, ranks * load.copies)", "(1, ranks * load.copies)"),
             ("(load.copies, ranks * load.copies)", "(1, ranks)")),
        Slip("Each rank opens `copies` files.",
             ("(load.copies, ranks * load.copies)", "(load.copies, ranks)")),
        Slip("If the checkpoint is not sharded, each node reads the whole file on a restart.",
             (READERS, "(1, load.nodes)"), (READERS, "(1, 1)"),
             (READERS, "(1, load.nodes)", AGAIN, WHOLE), (READERS, "(1, 1)", AGAIN, WHOLE)),
        Slip("If the checkpoint is not sharded, each node reads the file once: count nodes, not "
             "ranks.",
             (READERS, "(ranks, ranks)")),
        Slip("If the checkpoint is not sharded, each node opens the file.",
             (READERS, "(load.nodes, 1)")),
        Slip("If the checkpoint is not sharded, `copies` doesn't matter: each node reads the whole "
             "file.",
             (READERS, "(load.copies, load.nodes)")),
        Slip("On a restart all nodes read their shares at once, each over its own link.",
             (AGAIN, "read * load.checkpoint / link")),
        Slip("Data come through the nodes' links and through the file system: the slower counts.",
             (DATA, "load.data / load.nodes / link"), (DATA, "load.data / system.read")),
        Slip("Each node reads its share of the data over its own link.",
             (DATA, DATA.replace(" / load.nodes", ""))),
        Slip("The links and the file system carry the data at the same time: the slower counts, "
             "not the sum.",
             (DATA, "(load.data / load.nodes / link + load.data / system.read)")),
        Slip("A background save must also fit into the interval.",
             ("    beside += saving * load.background\n", "")),
        Slip("A background save comes after the data: add their times.",
             ("beside += saving * load.background", "beside = max(beside, saving * "
              "load.background)")),
        Slip("A save that the job waits for is not part of the interval.",
             ("beside <= load", f"beside + {WAITED} <= load")),
        Slip("Work that takes exactly the interval still fits.",
             ("beside <= load", "beside < load")),
        Slip("A background save takes no time from the job.", (WAITED, "saving")),
        Slip("If data and saves take longer than the interval, the job waits: the turn is longer.",
             ("max(load.interval, beside)", "load.interval")),
        Slip("Time is also lost when the job waits for data or for a background save.",
             (LOST, "(turn - max(load.interval, beside)) / turn")),
        Slip("Divide by the whole turn, not by the interval.", (LOST, "turn / load.interval - 1")),
        Slip("Return a share from 0 to 1, not a percentage.", (LOST, f"100 * ({LOST})")),
        Slip("That is the share that is not lost.", (LOST, "load.interval / turn")),
    ), hints=(
        "Through which three places must each byte or file go, and how fast is each?",
        "Make a dict of three times for a save and another for a restart; the largest time counts, "
        "and its part is the bound. A turn is an interval, or the time of data and background "
        "saves if that is longer, plus a save if the job waits for it.",
        "beside = interval * max(data / nodes / link, data / system.read) + saving * background; "
        "turn = max(interval, beside) + saving * (not background); lost = 1 - interval / turn",
    ))
