"""The check of storage_plan: each number beside what it must be, and beside usual slips."""

from ranklab.checks.beside import expect
from ranklab.checks.trial import explain
from ranklab.cluster.storage import EFS, LUSTRE, S3, TECTONIC, FileSystem, Load, StoragePlan

SLOW = FileSystem("a slow server", 2e9, 5e9, operations=200)
LLAMA = dict(nodes=2048, gpus=8, link=25e9, checkpoint=5.68e12, interval=1200.0)
SMALL = dict(nodes=4, gpus=8, link=12.5e9, checkpoint=1e11, interval=300.0)
CASES = {
    "Llama 3": (LLAMA | dict(tokens_per_second=2.7e6), TECTONIC),
    "Llama 3, one writer": (LLAMA | dict(writers="one", tokens_per_second=2.7e6), TECTONIC),
    "Llama 3, NFS, beside": (LLAMA | dict(beside=True), EFS),
    "copies": (LLAMA | dict(copies=16, tokens_per_second=1e9), LUSTRE),
    "objects": (LLAMA | dict(copies=2), S3),
    "few nodes": (SMALL | dict(tokens_per_second=1e6), LUSTRE),
    "few nodes, beside": (SMALL | dict(beside=True, tokens_per_second=3e8, bytes_per_token=2), EFS),
    "a limit of each client": (SMALL | dict(writers="one"), EFS),
    "data that do not fit": (SMALL | dict(tokens_per_second=2e9), SLOW),
    "both do not fit": (SMALL | dict(beside=True, tokens_per_second=1.1e9), SLOW),
    "slow links": (SMALL | dict(copies=8, tokens_per_second=1.5e10), TECTONIC),
    "many files": (SMALL | dict(nodes=256, copies=64, checkpoint=1e9), SLOW),
    "one file": (SMALL | dict(nodes=256, writers="one", checkpoint=1e9), SLOW),
    "one node": (SMALL | dict(nodes=1, tokens_per_second=1e7, bytes_per_token=600), TECTONIC),
}
SLIPS = {
    "of one link for all": "All nodes write and read at once, each by its own link.",
    "of all links": 'writers="one": all goes through one node\'s link.',
    "with the link's own rate": "A node gets no more than system.client.",
    "the sum of three": "They go on at the same time: the slowest counts.",
    "without metadata": "Each file is to be created or opened: ranks / operations.",
    "a file of each node": "Each rank has a file of its own: nodes * gpus.",
    "of copies written": "Each number is written once, whoever has it: no copies.",
    "of each number read once": "All copies read what they hold; with one file each node reads all "
                                "of it.",
    "read at the rate of writing": "A restart reads: system.read.",
    "a file of each rank opened": "Each rank opens `copies` files of those that were written.",
    "of the interval alone": "Divide by the turn: work, saving, and waiting.",
    "also beside the work": "Beside the work nobody waits for it.",
    "without waiting for the data": "Where data (and what is written beside) take longer than the "
                                    "interval, the job waits.",
    "all data by each node": "Nodes read their parts of the data: rate / nodes.",
    "of tokens, not bytes": "tokens_per_second * bytes_per_token.",
}


def right(load, system, slip=""):
    """{field: value}; or what this slip gets."""
    one, ranks, n = load.writers == "one", load.nodes * load.gpus, load.nodes
    link = load.link if slip == "with the link's own rate" else min(load.link, system.client)
    slow = max if slip != "the sum of three" else lambda parts, key=None: sum(parts)
    share = {"of one link for all": 1, "of all links": n}.get(slip, 1 if one else n)
    files = 1 if one else n if slip == "a file of each node" else ranks
    times = load.copies if slip == "of copies written" else 1
    save = {"link": times * load.checkpoint / share / link,
            "file system": times * load.checkpoint / system.write,
            "metadata": files / system.operations * (slip != "without metadata")}
    each = 1 if slip == "of each number read once" else n if one else load.copies
    speed = system.write if slip == "read at the rate of writing" else system.read
    opened = files * (1 if one or slip == "a file of each rank opened" else load.copies)
    opened = ranks if one else opened
    restart = {"link": each * load.checkpoint / link / (1 if slip == "of one link for all" else n),
               "file system": each * load.checkpoint / speed,
               "metadata": opened / system.operations * (slip != "without metadata")}
    saving = slow(save.values())
    rate = load.tokens_per_second * (1 if slip == "of tokens, not bytes" else load.bytes_per_token)
    data = load.interval * max(rate / link / (1 if slip == "all data by each node" else n),
                               rate / system.read)
    beside = saving * load.beside
    fits = data + beside <= load.interval
    waits = max(0.0, data + beside - load.interval) * (slip != "without waiting for the data")
    lost = waits + saving * (not load.beside or slip == "also beside the work")
    turn = load.interval if slip == "of the interval alone" else load.interval + lost
    return dict(save_seconds=saving, save_bound=max(save, key=save.get),
                restart_seconds=slow(restart.values()), restart_bound=max(restart, key=restart.get),
                fits=fits, lost=lost / turn)


def check_storage_plan(storage_plan):
    for name, (asked, system) in CASES.items():
        load = Load(**asked)
        plan, wanted = storage_plan(load, system), right(load, system)
        expect(isinstance(plan, StoragePlan), f"{name}: it returned {type(plan).__name__}", "A "
               "StoragePlan.")
        for field, value in wanted.items():
            got = getattr(plan, field)
            where = f"{name} on {system.name}: {field}"
            if isinstance(value, (str, bool)):
                expect(got == value, f"{where} is {got!r}, not {value!r}", "The name of the "
                       "slowest part." if field != "fits" else "The interval's data, and what is "
                       "written beside, take at most the interval.")
                continue
            slips = {slip: (right(load, system, slip)[field], hint) for slip, hint in SLIPS.items()}
            explain(where, got, value, slips, "See Load: who writes and reads what.")
        if name == "a limit of each client":
            yield "by links, file system and metadata: all writers or one, copies that read"
    yield "data and checkpoints together: what fits, and the share of the time that is lost"
    for name in ("Llama 3", "Llama 3, one writer"):
        asked, system = CASES[name]
        yield f"{name}: {storage_plan(Load(**asked), system)}"
