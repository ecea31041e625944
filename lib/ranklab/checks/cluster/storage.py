"""The check of storage_plan: each number is compared with the right one, and with usual slips."""

from ranklab.checks.beside import expect
from ranklab.checks.trial import explain
from ranklab.cluster.storage import EFS, LUSTRE, S3, TECTONIC, FileSystem, Load, StoragePlan

SLOW = FileSystem("a slow server", 2e9, 5e9, 1.5e9, operations=200)
BOUNDS = "link", "file system", "metadata"
LLAMA, SMALL = (2048, 8, 25e9, 5.68e12, 1200.0), (4, 8, 12.5e9, 1e11, 300.0)
CASES = {
    "Llama 3": (Load(*LLAMA, data=1.1e7), TECTONIC),
    "Llama 3, one writer": (Load(*LLAMA, sharded=False), TECTONIC),
    "Llama 3, NFS, in the background": (Load(*LLAMA, background=True), EFS),
    "copies": (Load(*LLAMA, copies=16, data=4e9), LUSTRE), "objects": (Load(*LLAMA, 2), S3),
    "few nodes": (Load(*SMALL, 8, data=2e10), LUSTRE),
    "few nodes, one writer": (Load(*SMALL, 8, sharded=False, data=8e9), EFS),
    "more data than links take": (Load(*SMALL, data=6e10), TECTONIC),
    "more data than the server gives": (Load(*SMALL, data=8e9), SLOW),
    "data and saves": (Load(*SMALL, background=True, data=4.4e9), SLOW),
    "data, then saves": (Load(*SMALL, data=4.4e9), SLOW),
    "many files": (Load(256, 8, 1e10, 1e9, 300.0, 64), SLOW),
    "one file": (Load(256, 8, 5e8, 1e7, 300.0, sharded=False), SLOW),
}
HINTS = {"fits": "Data and a background save must fit into an interval.",
         "lost": "The turn without the interval, as a share of the turn, from 0 to 1."}


def expected(load, system):
    """({field: value}, {field: {slip: (its value, hint)}})"""
    n, ranks, size, copies = load.nodes, load.nodes * load.gpus, load.checkpoint, load.copies
    link = min(load.link, system.client)
    writers, files, read, opened = (
        (n, ranks, copies, ranks * copies) if load.sharded else (1, 1, n, n))
    save = size / writers / link, size / system.write, files / system.operations
    restart = read * size / n / link, read * size / system.read, opened / system.operations
    saving, alone = max(save), max(save) * (not load.background)
    beside = max(load.data / n / link, load.data / system.read) * load.interval + saving - alone
    turn = max(load.interval, beside) + alone
    return dict(save_seconds=saving, save_bound=BOUNDS[save.index(saving)],
                restart_seconds=max(restart), restart_bound=BOUNDS[restart.index(max(restart))],
                fits=beside <= load.interval, lost=1 - load.interval / turn), {"save_seconds": {
        "the sum of three": (sum(save), "They happen at the same time: the slowest counts."),
        "without metadata": (max(save[:2]), "Creating files takes time: files / operations."),
        "by load.link": (max(size / writers / load.link, *save[1:]), "At most system.client."),
        "that of one link": (max(size / link, *save[1:]), "Each rank writes by its node's link."),
        "that of all links": (max(size / n / link, *save[1:]), "One rank writes, by one link."),
        "with copies written": (max(copies * save[0], copies * save[1], save[2]), "Each number is "
                                "written once, however many ranks hold it.")}, "restart_seconds": {
        "that of reading each byte once": (max(size / n / link, size / system.read, restart[2]),
                                           "`copies` ranks, or all nodes, read the same bytes."),
        "at the speed of writing": (max(restart[0], read * size / system.write, restart[2]),
                                    "A restart reads: system.read.")}, "lost": {
        "divided by the interval": (turn / load.interval - 1, "Divide by the whole turn."),
        "with a save that nobody waits for": (1 - load.interval / (turn + saving - alone), "In the "
                                              "background it takes no time from the job."),
        "without waiting for data": (1 - load.interval / (load.interval + alone), "If data and "
                                     "saves take longer than the interval, the job waits.")}}


def check_storage_plan(storage_plan):
    for name, (load, system) in CASES.items():
        plan, (wanted, slips) = storage_plan(load, system), expected(load, system)
        expect(isinstance(plan, StoragePlan), f"it returned a {type(plan).__name__}", "")
        for field, value in wanted.items():
            got, where = getattr(plan, field), f"{name} on {system.name}: {field}"
            hint = HINTS.get(field, "Load says what writes and reads; the slowest part counts.")
            if isinstance(value, (str, bool)):
                expect(got == value, f"{where} is {got!r}, not {value!r}", hint)
            else:
                explain(where, got, value, slips[field], hint)
    yield "a save and a restart: links, file system, metadata; one writer or all; copies that read"
    yield "data and checkpoints together: what fits, and the share of the time that is lost"
    for name in ("Llama 3", "Llama 3, one writer"):
        yield f"{name}: {storage_plan(*CASES[name])}"
