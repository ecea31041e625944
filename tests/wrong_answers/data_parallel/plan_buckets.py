"""Lab 03: what goes wrong when buckets are planned."""

from mutants import mutant

from ranklab.data_parallel import plan_buckets
from ranklab.data_parallel.plan import capped_buckets, exposed_seconds

WALK = "        buckets.insert(0, list(range(starts[stop], stop)))\n"
WRONG = [
    mutant(plan_buckets, "max(ends[i], last)", "last", says="as if the link were always free"),
    mutant(plan_buckets, "+ alpha +", "+", says="alpha is paid for each bucket"),
    mutant(plan_buckets, "max(ends[i], last)", "max(ends[i], ready[i])", says="its LAST gradient"),
    mutant(plan_buckets, "    ends, starts", "    ready = [round(1e6 * when) for when in ready]\n"
           "    alpha, beta = round(1e6 * alpha), 1e6 * beta\n    ends, starts",
           says="12 gradients, .* buckets, alpha", called="in_whole_microseconds"),
    mutant(plan_buckets, WALK, WALK.replace("insert(0, ", "append("), says="once, in order"),
    mutant(plan_buckets, "    return", "    ready.clear()\n    return",
           says="arguments have changed"),
    mutant(plan_buckets, "for i in range(j))", "for i in range(max(0, j - 5), j))",
           says="are possible", called="at_most_five_in_a_bucket"),
    mutant(plan_buckets, "in range(j))", "in range(j - 1, j))", says="put some together"),
    mutant(plan_buckets, "in range(j))", "in range(1))", says="What could travel before"),
    mutant(plan_buckets, "list(range(starts[stop], stop))", "(starts[stop], stop)",
           says="Return a list of lists"),
    mutant(plan_buckets, "[0.0], [0]", "[0 * ready[0]], [0]", says="IndexError"),
    mutant(plan_buckets, "    buckets, stop", "    import time; begin = time.process_time()\n"
           "    while len(ready) > 15 and time.process_time() < begin + 2.5: pass\n"
           "    buckets, stop", says="n gradients have 2.{1,3}n-1. plans"),
]


def plan_buckets__caps_of_25_MB(ready, nbytes, alpha, beta):
    """starts when backward is over"""
    return capped_buckets(nbytes)


def plan_buckets__the_best_cap(ready, nbytes, alpha, beta):
    """What must be known of all those before it"""
    if not ready:
        return []
    caps = [capped_buckets(nbytes, max(1, sum(nbytes) * k // 50)) for k in range(1, 51)]
    return min(caps, key=lambda plan: exposed_seconds(plan, ready, nbytes, alpha, beta))


def plan_buckets__whatever_is_ready_when_the_link_is_free(ready, nbytes, alpha, beta):
    """What must be known of all those before it"""
    buckets, start, free = [], 0, 0.0
    while start < len(ready):
        now = max(free, ready[start])
        stop = max(i for i, when in enumerate(ready, 1) if when <= now)
        buckets.append(list(range(start, stop)))
        free = now + alpha + sum(nbytes[start:stop]) * beta
        start = stop
    return buckets
