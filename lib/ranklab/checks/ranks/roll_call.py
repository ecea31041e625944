"""roll_call: the same list on every rank, in time, by few calls to the store and no collective.

Here each rank is a thread. So a rank can be held between two calls, while another one calls.
"""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from ranklab.checks.beside import expect, located
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import on_ranks, patience
from ranklab.meter import Traffic

LONG, SHORT, SOON = 2.0, 0.3, 0.3  # seconds: all are here; some are not; to take a list
LIMIT, STORE_LIMIT = 7, timedelta(seconds=5)  # of the launch; of a wait without one of its own
LEAST, OURS, MORE = 2, (4, 9), 8  # calls to the store; the last: allowed beside one for each rank
LATE = float("inf")
ENDLESS = "hang: .*", "DistStoreError: Wait timeout.*", "TimeoutError: it still asks.*"


class Case(NamedTuple):
    """starts: {rank: when it calls, in parts of `seconds`; LATE: when another has its list}.

    held  rank 0 stops before this one of its calls to the store since its time is up, until the
          late rank has its list
    """

    name: str
    ranks: int
    starts: dict
    seconds: float
    held: int | None = None

    @property
    def missing(self):
        return [r for r in range(self.ranks) if self.starts.get(r, LATE) == LATE]


CASES = (
    Case("5 ranks are all here, one of them a bit later", 5, {0: 0, 1: 0, 2: 0.1, 3: 0, 4: 0},
         LONG),
    Case("the first and the last of 5 are missing", 5, {1: 0, 2: 0.4, 3: 0}, 2 * SHORT),
    Case("a single rank", 1, {0: 0}, LONG),
    Case("rank 0 of 3 is missing", 3, {1: 0, 2: 0.8}, 2 * SHORT),
    Case("all of 70 but rank 66 are missing", 70, {66: 0}, SHORT),
    Case("rank 4 of 5 never calls, rank 2 when another has its list", 5,
         {0: 0, 1: 0.6, 2: LATE, 3: 0.6}, 2 * SHORT),
    Case("rank 0 of 3 calls when another has its list", 3, {0: LATE, 1: 0, 2: 0.6}, SHORT),
    *(Case("rank 0 of 3 is slow when its time is up, and rank 1 calls then", 3, {0: 0, 1: LATE},
           SHORT, held) for held in range(3 + MORE)),
)
AGREE = ("Ranks look at different moments, so what each one sees may differ. One list must stand: "
         "compare_set writes where nothing stands, and returns what stands then.")
HANGS = ("Some rank waits without a limit, for one rank after the other, or for a rank that is "
         "itself missing. Any rank may be missing, so each of the others must be able to end the "
         "wait. A collective can only hang.")
WAKE = ("The last rank to call knows that all are here: store.add counts. Let the others wait for "
        "a key that it sets: store.wait([key], timedelta(...)) returns as soon as it is there.")
ALL_HERE = f"All are here, so return at once. {WAKE}"
COME = "A rank that has not called yet may still come: wait until the time is up."
LATER = ("When the first rank's time is up, one list stands for all: wait for the list itself. A "
         "rank that calls later gets it as it is, and must not replace it.")
MISSING = ("A rank is missing when it has not called: give each rank a key of its own, and look "
           "for the keys of all `ranks` when the time is up. Use the arguments rank and ranks; "
           "dist knows other numbers.")
TOO_LONG = ("Wait once, for all ranks together and not for each in turn, and with a limit: "
            "store.wait(keys, timedelta(seconds=seconds)).")


def _counted(name):
    def method(self, *arguments):
        self.calls += 1
        self.before()
        return getattr(self.shared, name)(*arguments)
    return method


class CountedStore(dist.Store):
    """What one rank sees of the store that all share; before() comes before each of its calls."""

    def __init__(self, shared, before):
        super().__init__()
        self.shared, self.before, self.calls, self.limit = shared, before, 0, STORE_LIMIT

    def set_timeout(self, limit):
        self.limit = limit

    def wait(self, keys, limit=None):
        self.wait_until(keys, limit or self.limit)

    def get(self, key):
        self.wait([key])
        return self.shared.get(key)

    set, add, check, wait_until = map(_counted, ("set", "add", "check", "wait"))
    append, compare_set, delete_key = map(_counted, ("append", "compare_set", "delete_key"))
    multi_set, num_keys, list_keys = map(_counted, ("multi_set", "num_keys", "list_keys"))


def _trial(roll_call, cases):
    """[{rank: (its list, seconds, calls to the store, collectives)} of each case]"""
    with ThreadPoolExecutor(len(cases)) as pool:
        return [*pool.map(lambda case: _play(roll_call, case), cases)]


def _play(roll_call, case):
    shared, go, late_is_done = dist.HashStore(), threading.Event(), threading.Event()

    def on_rank(rank):
        start, numbers = case.starts[rank], itertools.count()
        if start == LATE:
            go.wait()
        else:
            time.sleep(start * case.seconds)
        began = time.monotonic()

        def before():
            late = time.monotonic() - began - case.seconds
            if late > STORE_LIMIT.total_seconds():
                raise TimeoutError(f"it still asks, {late:.0f} s after its time was up")
            if rank == 0 and late >= 0 and next(numbers) == case.held:
                go.set()
                late_is_done.wait(1.5 * case.seconds)  # rank 1 may wait for the list of rank 0

        store = CountedStore(shared, before)
        try:
            with Traffic() as traffic:
                missing = roll_call(store, rank, case.ranks, case.seconds)
            return missing, time.monotonic() - began, store.calls, sum(traffic.calls.values())
        finally:
            (late_is_done if start == LATE else go).set()

    with ThreadPoolExecutor(len(case.starts)) as pool:
        return dict(zip(case.starts, pool.map(on_rank, case.starts)))


def check_roll_call(roll_call):
    slower = min(3, patience())
    cases = [case._replace(seconds=case.seconds * slower) for case in CASES]
    try:
        with hinted(dict.fromkeys(ENDLESS, HANGS)):
            seen, = on_ranks(_trial, roll_call, cases, ranks=1, timeout=LIMIT)
    except Mistake as mistake:  # all ranks were threads of one
        mistake.what = mistake.what.replace("on 1 rank, rank 0 of 1", "a rank", 1)
        raise
    most = [located(case.name, _compare, case, of_ranks, SOON * slower)
            for case, of_ranks in zip(cases, seen)]
    yield "the same sorted list on every rank, also where rank 0, or all but one, is missing"
    yield "a rank that calls too late gets the list that stands, and is on it"
    yield "at once when all are here; else when the time is up; no collective"
    yield (f"calls to the store of a rank: {most[0]} when 5 of 5 are here, {most[1]} when 3 of 5 "
           f"are (the library {OURS[0]} and {OURS[1]}; {LEAST} at least, to be seen and to see)")


def _compare(case, of_ranks, soon):
    """Returns how many calls to the store a rank made at most."""
    lists, took, calls, collectives = zip(*of_ranks.values())
    expect(not any(collectives), "it makes a collective", HANGS)
    _compare_lists(case, dict(zip(of_ranks, lists)))
    if case.held is None:
        _compare_times(case, took, soon)
    expect(max(calls) <= case.ranks + MORE, f"a rank makes {max(calls)} calls to the store, more "
           f"than {case.ranks + MORE}", "Don't ask again and again: with thousands of ranks that "
           f"floods the store. {WAKE}")
    return max(calls)


def _compare_lists(case, lists):
    for rank, got in lists.items():
        expect(isinstance(got, list) and all(type(each) is int for each in got), f"{got!r} is "
               f"returned on rank {rank}", "Return a list of whole numbers. What a store gives "
               "back is bytes.")
        expect(got == sorted(got), f"{got} is not sorted", "Sort numbers, not their texts.")
    shown = ", ".join(f"rank {rank} has {_short(got)}" for rank, got in lists.items())
    expect(all(got == lists[min(lists)] for got in lists.values()), shown, AGREE)
    hint = LATER if LATE in case.starts.values() else MISSING if case.missing else COME
    expect(case.held is not None or got == case.missing,
           f"{shown}; right is {_short(case.missing)}", hint)


def _short(ranks):
    return str(ranks) if len(ranks) < 9 else f"{str(ranks[:4])[:-1]}, ... {len(ranks)} in all]"


def _compare_times(case, took, soon):
    said = f"s with seconds={case.seconds:.1f}"
    for (rank, start), seconds in zip(case.starts.items(), took):
        limit = max(0, 1 - start) * case.seconds + soon if case.missing else case.seconds / 2
        hint = ALL_HERE if not case.missing else LATER if start else TOO_LONG
        expect(seconds <= limit, f"rank {rank} waited {seconds:.1f} {said}", hint)
    first = max(seconds for start, seconds in zip(case.starts.values(), took) if not start)
    expect(not case.missing or first >= 0.8 * case.seconds, f"it returned after {first:.2f} {said}",
           COME)
