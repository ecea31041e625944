"""One prover for exercises: a learner's function beside the right one, and beside known mistakes.

    def see(fn, case, ranks):                  # runs on every rank; yields what is seen, in order
        x = case.x(ranks.index)
        yield {"the result": fn(x, **ranks.keywords), "x afterwards": x}

    def by_torch(x, group=None):               # the oracle: by torch, or in one process
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    RING = Proof(
        ring_all_reduce,                       # the library's; each mistake is an edit of its text
        Stage("right on 1, 2, 3 ranks", see, CASES, ranks=(2, 3, 1), oracle=by_torch),
        mistakes=(Slip("Do not divide by R.", ("return x", "return x / R")), ...),
        hints=("...", "...", "..."))

A mistake is an edit of the answer, or a function, with one sentence. The sentence is said where the
learner's function shows the very same as the mistake does, on all ranks: so a hint is never a
guess. (Where the same is only a few numbers or words, it says so.) Where no mistake fits, the
verdict holds facts only: what is seen, what is right, and what is special about the case.

    observe.py  what a function shows in a stage: on ranks, in groups, or in this process
    compare.py  what is right, and what differs
    facts.py    how a difference is told
    digest.py   a difference in a few numbers, which hold on every CPU
    refusal.py  arguments that must be refused
    slips.py    the mistakes, as functions
    tables.py   what each mistake shows: built by `ranklab build`, one file an exercise
    proof.py    the check: stages in order, then the mistake that explains the first difference
"""

from ranklab.checks.prover.compare import Agree, AtMost, InAll, Must, Told, Traced
from ranklab.checks.prover.observe import ALL, GROUPS, Ranks, Stage
from ranklab.checks.prover.proof import Proof
from ranklab.checks.prover.refusal import must_refuse
from ranklab.checks.prover.slips import Slip

__all__ = ["ALL", "GROUPS", "Agree", "AtMost", "InAll", "Must", "Proof", "Ranks", "Slip", "Stage",
           "Told", "Traced", "must_refuse"]
