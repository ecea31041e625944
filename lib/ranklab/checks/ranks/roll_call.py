"""roll_call: the same list on every rank, in time, by few calls to the store and no collective.

Here each rank is a thread, so a rank can be held between two calls while another one calls.
"""

import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.looks import expect, located
from ranklab.checks.prover import Slip
from ranklab.checks.trial import LIMIT, on_ranks
from ranklab.engine.surroundings import patience
from ranklab.meter import Traffic
from ranklab.ranks import roll_call

SECONDS, AGAIN = 0.6, 3  # of a roll call; times as long where a busy machine may have been late
LATE, PAUSE = 2, 3  # times SECONDS: when the others have their list; how long a held rank stops
MORE = 8  # calls to the store that a rank may make, beside one for each rank
CASES = {  # how many ranks; {rank: when it calls, in parts of SECONDS}; before which call 0 is held
    "5 ranks are all here, one of them a bit later": (5, {0: 0, 1: 0, 2: 0.2, 3: 0, 4: 0}, None),
    "the first and the last of 5 are missing": (5, {1: 0, 2: 0.5, 3: 0}, None),
    "a single rank": (1, {0: 0}, None),
    "all of 70 but rank 66 are missing": (70, {66: 0}, None),
    "rank 0 of 5 calls when the others already have their list": (5, {0: LATE, 1: 0.6, 2: 0,
                                                                      3: 0.6}, None),
    **{f"rank 0 of 3 stops after {held} calls to the store, and rank 1 calls then":
       (3, {0: 0, 1: LATE}, held) for held in range(3 + MORE)},
}
HANGS = ("A rank waits without a limit, or for each rank in turn. Any rank can be missing, so any "
         "other must be able to end the wait. Collectives just hang.")
TIME_UP = ("store.wait raises when its time is up, and so does store.get for a key that never "
           "comes. Any rank can be missing, rank 0 too: each waits once, with a limit, catches the "
           "RuntimeError, and looks with store.check.")
OUTSIDE = "A collective waits for all ranks, so one missing rank hangs it. Use only the store."
WAKE = ("The last rank to call knows that all are here, because store.add counts. Let the others "
        "wait for a key that it sets: store.wait([key], timedelta(...)) returns as soon as the key "
        "exists.")
COME = ("A rank that has not called yet may still do so: look only when the time is up, and for "
        "the very key that each rank sets.")
LATER = ("When the first rank's time is up, it writes one list for all: wait for that list. A rank "
         "that calls later gets the same list and must not replace it.")
COLLECTIVE = "it calls a collective"
WHOLE = "Return a list of ints. What the store returns is bytes."
ONE_LIST = ("Ranks look at different moments and can see different things, so there must be one "
            "list: compare_set writes it if there is none yet, and returns the stored one.")
KEYS = ("A rank is missing if it has not called: give each rank its own key, and look for all "
        "`ranks` keys when the time is up. Sort numbers, not strings. Use the arguments rank and "
        "ranks, not dist's numbers.")
AT_ONCE = "All ranks are here, so return at once."
ONE_WAIT = ("Wait once for all ranks together, not for each in turn, and set a limit: "
            "store.wait(keys, timedelta(seconds=seconds)).")
FLOOD = ("Look at each rank's key once at most, and don't poll: with thousands of ranks, that "
         "floods the store.")


def _counted(name):
    def method(self, *arguments):
        if self.calls == self.held:
            time.sleep(self.pause)
        self.calls += 1
        return getattr(self.shared, name)(*arguments)
    return method


class CountedStore(dist.Store):
    """One rank's view of the store that all share; it stops after `held` calls."""

    def __init__(self, shared, held, pause):
        super().__init__()
        self.shared, self.held, self.pause, self.calls = shared, held, pause, 0

    set, get, add, check, wait = map(_counted, ("set", "get", "add", "check", "wait"))
    append, compare_set, delete_key = map(_counted, ("append", "compare_set", "delete_key"))
    multi_set, num_keys, set_timeout = map(_counted, ("multi_set", "num_keys", "set_timeout"))


def _trial(roll_call, seconds, cases):
    """[(list, seconds, calls to the store, collectives) of each calling rank], case by case"""
    def call(shared, rank, ranks, start, held):
        store = CountedStore(shared, held if rank == 0 else None, PAUSE * seconds)
        time.sleep(start * seconds)
        began = time.monotonic()
        with Traffic() as traffic:
            missing = roll_call(store, rank, ranks, seconds)
        return missing, time.monotonic() - began, store.calls, sum(traffic.calls.values())

    with ThreadPoolExecutor(100) as pool:
        futures = []
        for ranks, starts, held in map(CASES.get, cases):
            shared = dist.HashStore()
            shared.set_timeout(timedelta(seconds=3 + 3 * seconds))  # of a wait without a limit
            futures.append([pool.submit(call, shared, rank, ranks, start, held)
                            for rank, start in starts.items()])
    return [[called.result() for called in case] for case in futures]


def check_roll_call(roll_call):
    seconds = SECONDS * min(3, patience())
    most = []
    for name, of_ranks in zip(CASES, _tried(roll_call, seconds, [*CASES])):
        try:
            most.append(_judged(name, of_ranks, seconds))
        except Mistake:
            again, = _tried(roll_call, AGAIN * seconds, [name])
            most.append(_judged(name, again, AGAIN * seconds))
    yield "the same sorted list on every rank, also where rank 0, or all but one, is missing"
    yield "at once when all are here; otherwise when the time is up. A late rank gets the same list"
    yield (f"a rank makes {most[0]} calls to the store when 5 of 5 are here, and {most[1]} when 3 "
           "of 5 are (the library makes 4 and 9; 2 is the least: one to be seen, one to see)")


def _tried(roll_call, seconds, cases):
    try:
        with hinted({"hang: .*": HANGS, "DistStoreError: Wait timeout.*": TIME_UP}):
            return on_ranks(_trial, roll_call, seconds, cases, ranks=1,
                            timeout=LIMIT * max(1, seconds / SECONDS))[0]
    except Mistake as mistake:  # all ranks were threads of one
        mistake.what = mistake.what.replace("on 1 rank, rank 0 of 1", "a rank", 1)
        raise


def _judged(name, of_ranks, seconds):
    ranks, starts, held = CASES[name]
    return located(name, _compare, ranks, starts, *zip(*of_ranks), seconds, held)


def _compare(ranks, starts, lists, took, calls, collectives, seconds, held):
    """Compare all ranks; return the largest number of calls to the store on a rank."""
    missing = [rank for rank in range(ranks) if starts.get(rank, LATE) == LATE]
    text = ", ".join(f"rank {rank} has {textwrap.shorten(str(got), 40)}"
                     for rank, got in zip(starts, lists))
    expect(not any(collectives), COLLECTIVE, OUTSIDE)
    expect(all(isinstance(got, list) and {*map(type, got)} <= {int} for got in lists), text,
           WHOLE)
    expect(all(got == lists[0] for got in lists), text, ONE_LIST)
    if held is None:
        expect(lists[0] == missing, f"{text}; missing are {textwrap.shorten(str(missing), 40)}",
               LATER if LATE in starts.values() else COME if not missing else KEYS)
    case = f"with seconds={seconds:.1f}"
    for (rank, start), waited in zip(starts.items(), took if held is None else ()):
        limit = (max(0, 1 - start) if missing else 0) * seconds + seconds / 2
        late = f", which called {start * seconds:.1f} s after the first," if start else ""
        expect(waited <= limit, f"rank {rank}{late} has its list {start * seconds + waited:.1f} s "
               f"after the first call, {case}",
               f"{AT_ONCE} {WAKE}" if not missing else LATER if start else ONE_WAIT)
    expect(not missing or max(took) >= 0.8 * seconds, f"it returned after {max(took):.2f} s {case}",
           COME)
    expect(max(calls) <= ranks + MORE, f"a rank makes {max(calls)} calls to the store, more than "
           f"{ranks + MORE}", f"{FLOOD} {WAKE}")
    return max(calls)


WAIT = 'store.wait(["missing"], timedelta(seconds=seconds))'
RETURN = 'return json.loads(store.compare_set("missing", "", json.dumps(missing)))'
LOOK = '[r for r in range(ranks) if not store.check([f"here/{r}"])]'
HERE, ALL_HERE = 'store.set(f"here/{rank}", "")', 'store.add("calls", 1) < ranks'
EACH = '[f"here/{r}" for r in range(ranks)]'
ROLL_CALL = Exercise(
    roll_call, check_roll_call, mistakes=(
        Slip(HANGS, (f"if {ALL_HERE}", "for r in range(ranks)", '["missing"], timedelta',
                     '[f"here/{r}"], timedelta', f"missing = {LOOK}", "missing.append(r)")),
        Slip(TIME_UP,
             ("missing = []", 'missing = []\n    if rank:\n'  # rank 0 decides
              f'        {HERE}\n        store.wait(["missing"])\n'
              '        return json.loads(store.get("missing"))\n',
              '["missing"], timedelta', f"{EACH}, timedelta", ALL_HERE, "True")),
        Slip(COLLECTIVE, ("missing = []", "missing = [None]\n"
                          "    dist.all_gather_object(missing, rank)"), dist=dist),
        Slip(COME, (WAIT, "raise RuntimeError")),
        Slip(LATER, ('["missing"], timedelta', f"{EACH}, timedelta")),
        Slip(ONE_LIST, (RETURN, f"{RETURN[18:-1]}\n    return missing"),
             (RETURN, 'store.set("missing", json.dumps(missing))\n    return missing'),
             (RETURN, 'if not store.check(["missing"]):\n        store.set("missing", json.dumps('
              'missing))\n    return json.loads(store.get("missing"))')),
        Slip(KEYS, (LOOK, 'list(range(int(store.get("calls")), ranks))'),
             ('f"here/{rank}"', 'f"here/{dist.get_rank()}"'),
             ('f"here/{rank}"', 'f"rank{rank}"'), dist=dist),
        Slip(WHOLE, ("for r in", "for r in sorted(map(str, ", "range(ranks)", "range(ranks)))")),
        Slip(AT_ONCE, ("< ranks", "<= ranks"),
             (WAIT, "time.sleep(seconds)\n            raise RuntimeError"), time=time),
        Slip(FLOOD, (WAIT, "end = time.monotonic() + seconds\n"
                     '            while not store.check(["missing"]):\n'
                     "                if time.monotonic() > end:\n"
                     "                    raise RuntimeError\n"
                     "                time.sleep(0.01)"), time=time),
        Slip(ONE_WAIT, (", timedelta(seconds=seconds)", "")),
        Slip("rank=66, ranks=70", (HERE, 'store.add("bits", 1 << rank)', LOOK,
             '[r for r in range(ranks) if not store.add("bits", 0) >> r & 1]')),
    ), hints=(
        "Two ranks can look at different moments and find different ranks missing, so there must "
        "be only one list. Which rank should write it?",
        "Each rank sets its own key and counts itself with store.add. The last rank to call ends "
        "the wait for all ranks. If time runs out first, the first rank to notice looks for every "
        "rank's key. Either way, that rank writes the list under one key with compare_set.",
        'store.set(f"here/{rank}", ""); if store.add("calls", 1) < ranks, then '
        'store.wait(["missing"], timedelta(seconds=seconds)), which raises RuntimeError when the '
        'time is up: then look with store.check([f"here/{r}"]). At the end each rank returns '
        'json.loads(store.compare_set("missing", "", json.dumps(missing))).'))
