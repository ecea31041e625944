"""Lab 00: what goes wrong when ranks ask which of them are missing."""

import json
import time
from datetime import timedelta

import torch.distributed as dist
from mutants import mutant

from ranklab.ranks import roll_call

WAIT = 'store.wait(["missing"], timedelta(seconds=seconds))'
RETURN = 'return json.loads(store.compare_set("missing", "", json.dumps(missing)))'
LOOK = '[r for r in range(ranks) if not store.check([f"here/{r}"])]'
ASK = ('end = time.monotonic() + seconds\n'
       '            while not store.check(["missing"]) and time.monotonic() < end:\n'
       '                time.sleep(0.01)\n'
       '            if not store.check(["missing"]):\n'
       '                raise RuntimeError')

WRONG = [
    mutant(roll_call, '["missing"], timedelta', '[f"here/{r}" for r in range(ranks)], timedelta',
           says="wait for that list", called="own_clock"),
    mutant(roll_call, 'store.set(f"here/{rank}", "")', 'store.add(f"here/{rank}", 1)', RETURN,
           'if not store.check(["missing"]):\n        store.set("missing", json.dumps(missing))\n'
           '    return json.loads(store.get("missing"))',
           says="there must be one list|it has not called",
           called="a_set_is_no_compare_set"),
    mutant(roll_call, RETURN, RETURN[len("return json.loads("):-1] + "\n    return missing",
           says="there must be one list"),
    mutant(roll_call, WAIT, ASK, says="Don't ask again and again", time=time),
    mutant(roll_call, 'f"here/{rank}"', 'f"here/{dist.get_rank()}"', says="dist knows other",
           dist=dist),
    mutant(roll_call, WAIT, "raise RuntimeError", says="may still come"),
    mutant(roll_call, RETURN, 'store.set("missing", json.dumps(missing))\n    return missing',
           says="there must be one list", called="the_last_list_stands"),
    mutant(roll_call, RETURN, 'if not store.check(["missing"]):\n'
           '        store.set("missing", json.dumps(missing))\n'
           '    return json.loads(store.get("missing"))',
           says="there must be one list|it has not called",
           called="looks_and_then_writes"),
    mutant(roll_call, LOOK, 'list(range(int(store.get("calls")), ranks))',
           says="a key of its own"),
    mutant(roll_call, "for r in", "for r in sorted(map(str, ", "range(ranks)", "range(ranks)))",
           says="whole numbers"),
    mutant(roll_call, "< ranks", "<= ranks", says="so return at once"),
    mutant(roll_call, WAIT, "time.sleep(seconds)\n            raise RuntimeError",
           says="so return at once", called="always_waits", time=time),
    mutant(roll_call, ", timedelta(seconds=seconds)", "", says="with(out)? a limit",
           called="no_limit"),
    mutant(roll_call, 'if store.add("calls", 1) < ranks', "for r in list(range(ranks))",
           '["missing"], timedelta', '[f"here/{r}"], timedelta', f"missing = {LOOK}",
           "missing.append(r)", says="one rank after the other|each in turn"),
    mutant(roll_call, "missing = []\n", "missing = []\n    if rank:\n"
           '        store.set(f"here/{rank}", "")\n        store.wait(["missing"])\n'
           '        return json.loads(store.get("missing"))\n', '["missing"], timedelta',
           '[f"here/{r}" for r in range(ranks)], timedelta', 'store.add("calls", 1) < ranks',
           "True", says="each of the others must be able", called="rank_0_decides"),
]


def roll_call__a_collective(store, rank, ranks, seconds):
    """makes a collective"""
    here = [None] * dist.get_world_size()
    dist.all_gather_object(here, rank)
    return sorted(set(range(ranks)) - set(here))


def roll_call__by_bits(store, rank, ranks, seconds):
    """Overflow|TypeError|incompatible"""
    if store.add("here", 1 << rank) < (1 << ranks) - 1:
        try:
            store.wait(["missing"], timedelta(seconds=seconds))
        except RuntimeError:
            pass
    here = store.add("here", 0)
    missing = [r for r in range(ranks) if not here >> r & 1]
    return json.loads(store.compare_set("missing", "", json.dumps(missing)))
