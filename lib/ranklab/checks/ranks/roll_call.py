"""roll_call: the same list on every rank, in time, by few calls to the store and no collective."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import on_ranks, patience
from ranklab.meter import Traffic

CREW, LIMIT = 5, 7  # ranks of the launch, and its seconds
LONG, SHORT, LOOK = 2.0, 0.3, 0.005  # seconds: all are here; some are not; between two looks
LEAST, OURS, MORE = 2, (4, 9), 8  # calls to the store; the last: allowed beside one for each rank
SOON = 0.3  # seconds in which a rank has the list that stands
LATE = float("inf")


class Case(NamedTuple):
    """Who calls, and when.

    starts   of ranks first, first + 1, ...: when it calls, in parts of `seconds`; None: never, as
             all other ranks; LATE: when another rank has its list
    missing  None: any list, but the same on all ranks
    shift    process p plays rank first + (p + shift) modulo CREW
    """

    name: str
    ranks: int
    starts: tuple
    seconds: float
    missing: tuple
    shift: int = 0
    first: int = 0

    def played_by(self, process):
        """(the rank that this process plays, when it calls)."""
        place = (process + self.shift) % CREW
        return self.first + place, (*self.starts, *[None] * CREW)[place]


CASES = (
    Case("5 ranks are all here, one of them a bit later", 5, (0, 0, 0.1, 0, 0), LONG, ()),
    Case("a single rank", 1, (0,), LONG, (), 2),
    Case("rank 0 of 3 is missing", 3, (None, 0, 0.8), 2 * SHORT, (0,), 3),
    Case("the first and the last of 5 are missing", 5, (None, 0, 0.4, 0, None), SHORT, (0, 4)),
    Case("all of 70 but rank 66 are missing", 70, (None, 0), SHORT,
         (*range(66), 67, 68, 69), first=65),
    Case("rank 4 of 5 never calls, rank 2 when another has its list", 5, (0, 0.6, LATE, 0.6, None),
         2 * SHORT, (2, 4), 4),
    Case("rank 0 of 3 calls when another has its list", 3, (LATE, 0, 0.6), SHORT, (0,)),
)
HELD = Case("rank 0 of 3 is slow when its time is up, and rank 1 calls then", 3, (), 0.2, None)


def _counted(name):
    def method(self, *arguments):
        self.begins()
        return getattr(self.inner, name)(*arguments)

    return method


class CountingStore(dist.Store):
    """A store that counts the calls to it. Its waits end in time: a FileStore's take seconds."""

    timeout = timedelta(seconds=5)  # of a wait that has no limit of its own: longer than any other

    def __init__(self, inner, before=lambda: None):
        super().__init__()
        self.inner, self.before, self.calls = inner, before, 0

    def begins(self):
        self.calls += 1
        self.before()

    set, add, check, compare_set = map(_counted, ("set", "add", "check", "compare_set"))
    append, multi_set, delete_key = map(_counted, ("append", "multi_set", "delete_key"))
    num_keys, list_keys = map(_counted, ("num_keys", "list_keys"))

    def set_timeout(self, timeout):
        self.timeout = timeout

    def wait(self, keys, timeout=None):
        self.begins()
        limit = self.timeout if timeout is None else timeout
        if not _wait_for(lambda: self.inner.check(keys), limit.total_seconds()):
            raise dist.DistStoreError(f"wait timeout after {limit}, keys: {', '.join(keys)}")

    def get(self, key):
        self.wait([key])
        return self.inner.get(key)

    def multi_get(self, keys):
        self.wait(keys)
        return [self.inner.get(key) for key in keys]


def _wait_for(is_so, seconds=10 * LIMIT):
    end = time.monotonic() + seconds
    while not (so := is_so()) and time.monotonic() < end:
        time.sleep(LOOK)
    return so


def _trial(roll_call, cases, seconds):
    """[None or (list, seconds, calls to the store, collectives) of each case], [_play_held's]."""
    plain, seen = dist.distributed_c10d._get_default_store(), []
    for at, case in enumerate(cases):
        seen.append(_play(roll_call, case, dist.PrefixStore(f"case {at}", plain)))
        if at == 0 and seen[0][-1]:
            return seen, []  # a collective: in the next case it could only hang
    numbers = range(dist.get_rank(), HELD.ranks + MORE, CREW)
    with ThreadPoolExecutor() as pool:
        return seen, [*pool.map(lambda number: _play_held(roll_call, seconds, number), numbers)]


def _play_held(roll_call, seconds, number):
    """The lists of ranks 0 and 1. Rank 0 is held before one of its calls to the store, the one of
    this number since its time is up. Rank 1 calls then, and has its list before rank 0 goes on.
    """
    store, held, go_on = dist.HashStore(), threading.Event(), threading.Event()
    end, numbers = time.monotonic() + seconds, itertools.count()

    def before():
        if time.monotonic() >= end and next(numbers) == number:
            held.set()
            go_on.wait(1.5 * seconds)  # it may have been elected: rank 1 waits for its list

    def slow():
        try:
            return roll_call(CountingStore(store, before), 0, HELD.ranks, seconds)
        finally:
            held.set()

    with ThreadPoolExecutor() as pool:
        of_rank_0 = pool.submit(slow)
        held.wait()
        of_rank_1 = roll_call(CountingStore(store), 1, HELD.ranks, seconds)
        go_on.set()
        return of_rank_0.result(), of_rank_1


def _play(roll_call, case, store):
    rank, start = case.played_by(dist.get_rank())
    store.add("ready", 1)
    _wait_for(lambda: int(store.add("ready", 0)) == CREW)
    if start is None:
        return None
    if start == LATE:
        _wait_for(lambda: store.check(["one has its list"]))
    else:
        time.sleep(start * case.seconds)
    counting = CountingStore(dist.PrefixStore("theirs", store))
    began = time.monotonic()
    with Traffic() as traffic:
        missing = roll_call(counting, rank, case.ranks, case.seconds)
    store.set("one has its list", "")
    return missing, time.monotonic() - began, counting.calls, sum(traffic.calls.values())


AGREE = ("Ranks look at different moments, so what each one sees may differ. One list must stand: "
         "compare_set writes where nothing stands, and returns what stands then.")
HANGS = ("Some rank waits without a limit, for one rank after the other, or for a rank that is "
         "itself missing. Any rank may be missing, so each of the others must be able to end the "
         "wait. A collective can only hang.")
WAKE = ("The last rank to call knows that all are here: store.add counts. Let the others wait for "
        "a key that it sets: store.wait([key], timedelta(...)) returns as soon as it is there.")


def check_roll_call(roll_call):
    slower = min(3, patience())
    cases = [case._replace(seconds=case.seconds * slower) for case in CASES]
    with hinted({"hang: .*": HANGS, "DistStoreError: wait timeout .*": HANGS}):
        both = on_ranks(_trial, roll_call, cases, HELD.seconds * slower, ranks=CREW, timeout=LIMIT)
    seen, held = zip(*both)
    most = []
    for at, case in enumerate(cases[:len(seen[0])]):
        of = {case.played_by(process): each[at] for process, each in enumerate(seen) if each[at]}
        _compare_lists(case, {rank: each[0] for (rank, _), each in sorted(of.items())})
        _compare_times(case, [(start, each[1]) for (_, start), each in of.items()], SOON * slower)
        most.append(_compare_calls(case, of))
    for lists in itertools.chain(*held):
        _compare_lists(HELD, dict(enumerate(lists)))
    yield "the same sorted list on every rank, also where rank 0, or all but one, is missing"
    yield "a rank that calls too late gets the list that stands, and is on it"
    yield "at once when all are here; else when the time is up; no collective"
    yield (f"calls to the store of a rank: {most[0]} when 5 of 5 are here, {most[3]} when 3 of 5 "
           f"are (the library {OURS[0]} and {OURS[1]}; {LEAST} at least, to be seen and to see)")


def _compare_lists(case, lists):
    for rank, got in lists.items():
        if not isinstance(got, list) or any(type(each) is not int for each in got):
            raise Mistake(f"{case.name}: {got!r} is returned on rank {rank}",
                          "Return a list of whole numbers. What a store gives back is bytes.")
        if sorted(got) == sorted(case.missing or ()) and got != sorted(got):
            raise Mistake(f"{case.name}: {got} is not sorted", "Sort numbers, not their texts.")
    different = {str(got) for got in lists.values()}
    shown = ", ".join(f"rank {rank} has {_short(got)}" for rank, got in lists.items())
    if len(different) > 1:
        raise Mistake(f"{case.name}: {shown}", AGREE)
    if case.missing is not None and different != {str(list(case.missing))}:
        raise Mistake(f"{case.name}: {shown}; right is {_short(case.missing)}", _why_wrong(case))


def _short(ranks):
    ranks = list(ranks)
    return str(ranks) if len(ranks) < 9 else f"{str(ranks[:4])[:-1]}, ... {len(ranks)} in all]"


def _why_wrong(case):
    if LATE in case.starts:
        return ("The list stands when the first rank's time is up. The late rank gets it as it "
                "is, and must not replace it.")
    if not case.missing:
        return "A rank that has not called yet may still come: wait until the time is up."
    return ("A rank is missing when it has not called: give each rank a key of its own, and look "
            "for the keys of all `ranks` when the time is up. Use the arguments rank and ranks; "
            "dist knows other numbers.")


def _compare_times(case, spent, soon):
    seconds, longest = case.seconds, max(took for _, took in spent)
    slow = f"{case.name}: it took {longest:.1f} s with seconds={seconds:.1f}"
    if not case.missing and longest > seconds / 2:
        raise Mistake(slow, f"All are here, so return at once. {WAKE}")
    if longest > 2.5 * seconds + 0.3:
        raise Mistake(slow, "Wait once, for all ranks together and not for each in turn, and with "
                      "a limit: store.wait(keys, timedelta(seconds=seconds)).")
    for start, took in spent:
        if start and took > max(0, 1 - start) * seconds + soon:
            raise Mistake(f"{case.name}: the late rank waited {took:.1f} s", "When the first "
                          "rank's time is up, one list stands for all: wait for the list itself.")
    first = max(took for start, took in spent if start == 0)
    if case.missing and first < 0.8 * seconds:
        raise Mistake(f"{case.name}: it returned after {first:.2f} s with seconds={seconds:.1f}",
                      "A rank that is missing now may still come: wait until the time is up.")


def _compare_calls(case, of):
    if any(collectives for *_, collectives in of.values()):
        raise Mistake(f"{case.name}: it makes a collective", HANGS)
    most = max(calls for _, _, calls, _ in of.values())
    if most > case.ranks + MORE:
        raise Mistake(f"{case.name}: a rank makes {most} calls to the store, more than "
                      f"{case.ranks + MORE}", "Don't ask again and again: with thousands of ranks "
                      f"that floods the store. {WAKE}")
    return most
