"""Lab 00's checks: shards, neighbours, deadlocks, common decisions."""

from ranklab import ranks
from ranklab.checks.exercise import Prediction
from ranklab.checks.ranks.all_ranks_finite import FINITE
from ranklab.checks.ranks.pass_the_token import TOKEN
from ranklab.checks.ranks.ring_shift import RING_SHIFT
from ranklab.checks.ranks.roll_call import ROLL_CALL
from ranklab.checks.ranks.shard_range import SHARD_RANGE

EXERCISES = SHARD_RANGE, TOKEN, RING_SHIFT, FINITE, ROLL_CALL

PREDICTIONS = (
    Prediction("longest_shard", solution="1_000_003 // 8 + 1", unit="documents",
               hint=("Each rank takes the integer part of n / size. How many documents are left, "
                     "and can one rank take more than one of them?"),
               answer=lambda: len(ranks.shard_range(1_000_003, 0, 8)), tolerance=0,
               mistakes={125_000: "three documents are left over, and rank 0 takes one of them",
                         125_003: "then one rank takes all that is left over; share it out"},
               why="Rank 7 has 125000: one document fewer, and one step fewer in some loops."),
    Prediction("token_round_ms", solution="1024 * 20 / 1000", unit="ms",
               hint=("Count the hops until the token is back where it began, including the last "
                     "one."),
               answer=lambda: 1024 * 20e-6 * 1e3, tolerance=0.03,
               mistakes={20.46: "1023 hops end at the last rank; one more brings the token home",
                         20_480: "microseconds, not milliseconds",
                         0.02: "one hop only; the token visits every rank"},
               why="Eight bytes take 20 ms: at scale, latency matters before bandwidth does."),
    Prediction("guilty_rank", solution="11 // 5", tolerance=0,
               hint=("Which rank has the empty document? Each of the four ranks has five documents "
                     "in a row."),
               answer=lambda: next(r for r in range(4) if 11 in ranks.shard_range(20, r, 4)),
               mistakes={11: "that is the document; which rank has it?",
                         0: "rank 0 waits like the others; which one does not?",
                         1: "rank 1 waits like the others; which one does not?",
                         3: "rank 3 waits like the others; which one does not?"},
               why="It finished: it skipped a call that the others still wait for."),
    Prediction("calls_it_made", solution="5 - 1", unit="calls", answer=lambda: 4, tolerance=0,
               hint=("The others wait in a call that it never makes. How many calls did they make, "
                     "including that one?"),
               mistakes={5: "it has five documents; does each of them lead to a call?",
                         1: "it skipped one call, and made all the rest",
                         0: "it skipped one call, and made all the rest"},
               why=("Its second call met the others' second calls, but passed its third document: "
                    "the sums were silently wrong long before the hang.")),
    Prediction("questions_to_the_store", solution="1023 * 10 / 0.01", unit="questions",
               hint="How often does one rank look in ten seconds? How many ranks look?",
               answer=lambda: 1023 * 10 / 0.01,
               mistakes={1000: "that is one rank; 1023 of them ask",
                         102_300: ("10 ms is a hundredth of a second, so there are 1000 looks in "
                                   "ten seconds"),
                         1024 * 1023 * 1000: "each rank asks only for the one that it has not "
                         "seen"},
               why="And the store is one process. With store.wait each rank asks only once."),
    Prediction("shift_bytes", solution="4 * 4000", unit="bytes", answer=lambda: 16_000,
               tolerance=0,
               hint="Draw the ring. Which ranks send, and how large is x?",
               mistakes={4_000: "that is what one rank sends; four ranks do",
                         12_000: "the ring closes: the last rank also sends",
                         1_000: "1000 numbers of 4 bytes each, and four ranks"},
               why="Each rank sends x once, so all ranks together send R times x."),
    Prediction("hang_dollars", solution="1024 * 2 * 10 / 60", unit="dollars",
               hint=("First, how many dollars does the whole cluster cost per hour? Then, what "
                     "fraction of an hour is lost?"),
               answer=lambda: 1024 * 2 * 600 / 3600,
               mistakes={20_480: "ten minutes, not ten hours", 2048: "that is a whole hour",
                         204.8: "two dollars an hour: multiply by 10/60, not by 10/100"},
               why=("That is the price of one skipped line on one rank, before anyone starts to "
                    "look for it.")),
)
