"""optimal_interval and goodput: compared with exact results and with a simulation."""

import functools
import math
from typing import NamedTuple

from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage
from ranklab.formulas.resilience import GPU_HOURS, OPT_HOURS, goodput, optimal_interval
from ranklab.resilience.gaps import random_gaps, simulate
from ranklab.resilience.traces import HOUR

LLAMA, OPT = GPU_HOURS / 16384 * HOUR, OPT_HOURS / 124 * HOUR  # seconds between failures
APART = 2  # percent, from the very best interval
RESTART = 600  # seconds


# --- optimal_interval -----------------------------------------------------------------------------

class Job(NamedTuple):
    """Seconds per checkpoint, and between failures."""

    C: float
    M: float

    def __str__(self):
        return f"checkpoints of {self.C:g} s, a failure every {self.M:,.4g} s"


def best_interval(C, M):
    """Find the very best interval: where the derivative of the time for a round of work is 0."""
    if min(C, M) <= 0:
        raise ValueError(f"C={C}, M={M}")
    low, high = 0.0, 1.0
    for _ in range(80):
        t = (low + high) / 2
        low, high = (t, high) if math.log1p(-t) + t + C / M > 0 else (low, t)
    return low * M


def _see_interval(fn, job):
    interval = fn(*job)
    if min(job) <= 0:
        yield {"the outcome": interval}
        return
    is_number = isinstance(interval, int | float)
    yield {"what it returns": Must("a number" if is_number else interval, "a number"),
           **(_apart(interval, best_interval(*job)) if is_number else {})}


def _apart(interval, best):
    says = f"the interval is {interval:.6g} s; the best is {best:.6g} s, {{1:g}}% more or less"
    return {"the interval": AtMost(100 * abs(interval / best - 1), APART, says)}


def _see_simulated(fn, job):
    gaps = _gaps(job.M, 20_000)
    lost = 100 - 100 * simulate(fn(*job), job.C, gaps, RESTART)
    yield {"time that is lost": AtMost(lost, 1.01 * _least_lost(job), "simulated, {:.2f}% of the "
                                       "time is lost; with another interval it is {:.2f}%")}


@functools.cache
def _gaps(M, count):
    return random_gaps(M, count)


@functools.cache
def _least_lost(job):
    """Return the time lost, in percent, with the best of 42 intervals."""
    best, gaps = best_interval(*job), _gaps(job.M, 20_000)
    return min(100 - 100 * simulate(best * k / 20, job.C, gaps, RESTART) for k in range(8, 50))


def half_the_mean(checkpoint_seconds, mean_seconds):
    return mean_seconds / 2


JOBS = tuple(map(Job, (60, 300, 30, 300, 50, 90, 100, 300, 1000, 0.01),
                 (LLAMA, OPT, 900, 900, 100, 100, 100, 100, 50, 1)))
REAL = Job(60, LLAMA), Job(300, OPT)
BELOW = Job(0, 100), Job(-1, 100), Job(10, 0), Job(10, -1), Job(-1, -10)
DALY = "young * (1 + x / 3 + x**2 / 9) - checkpoint_seconds"
YOUNG = "math.sqrt(2 * checkpoint_seconds * mean_seconds)"
LONG = "    if checkpoint_seconds >= 2 * mean_seconds:\n        return mean_seconds\n"
X = "math.sqrt(checkpoint_seconds / (2 * mean_seconds))"
FLOOR = "min(checkpoint_seconds, mean_seconds) <= 0"
ABOVE = "Raise a ValueError before computing if either argument is not above 0."
INTERVAL = Proof(
    optimal_interval,
    Stage(f"within {APART}% of the best, for short checkpoints and for very long ones",
          _see_interval, JOBS, oracle=best_interval),
    Stage("at Llama 3's rate, checkpoints of 60 s, and at OPT-175B's, of 300 s: simulated, at most "
          "1% more time is lost than with the best of 42 intervals", _see_simulated, REAL,
          oracle=best_interval),
    Stage("seconds that are not above 0 are a ValueError", _see_interval, BELOW,
          oracle=best_interval),
    mistakes=(
        Slip("This is Young's formula, only the first term: its interval is too long, and more so "
             "the longer a checkpoint takes.",
             (DALY, "young")),
        Slip("This is Young's formula minus a checkpoint. Daly's has two more terms.",
             (DALY, "young - checkpoint_seconds")),
        Slip("One term is missing: C / 2 M, divided by 9.", (" + x**2 / 9", "")),
        Slip("One term is missing: the root of C / 2 M, divided by 3.", (" + x / 3", "")),
        Slip("This is the time from the start of one checkpoint to the start of the next. Count "
             "only the work: subtract C.", (DALY, DALY.removesuffix(" - checkpoint_seconds"))),
        Slip("This is the time from the start of one checkpoint to the start of the next, plus "
             "another checkpoint. Subtract C instead of adding it.",
             (DALY, DALY.replace("- check", "+ check"))),
        Slip("A failure loses half an interval on average: the 2 belongs under the root, "
             "sqrt(2 C M).", (YOUNG, YOUNG.replace("2 * ", "")),
             (YOUNG, YOUNG.replace("2 * ", ""), DALY, "young"),
             (YOUNG, f"2 * {YOUNG.replace('2 * ', '')}"), (YOUNG, YOUNG.replace("2 * ", "0.5 * "))),
        Slip("x^2 is C / 2 M, so x is its root.", (X, X.removeprefix("math.sqrt")),
             ("x / 3 + x**2 / 9", "x**2 / 3 + x**4 / 9")),
        Slip("x^2 is C / 2 M: half of C / M.", (X, X.replace("(2 * mean_seconds)", "mean_seconds")),
             (X, X.replace("/ (2 * mean_seconds)", "/ mean_seconds / 2 / 2"))),
        Slip("x^2 is C / 2 M, not M / 2 C.",
             (X, "math.sqrt(mean_seconds / (2 * checkpoint_seconds))")),
        Slip("Daly's series holds only up to C = 2 M. If C is 2 M or more, the interval is M.",
             (LONG, "")),
        Slip("Daly's series holds up to C = 2 M: the interval is M only from there on.",
             (LONG, LONG.replace("2 * mean_seconds", "mean_seconds")),
             (LONG, LONG.replace("2 * mean_seconds", "mean_seconds / 2"))),
        Slip("From C = 2 M on, the interval is M, the time between failures.",
             (LONG, LONG.replace("return mean_seconds", "return checkpoint_seconds")),
             (LONG, LONG.replace("return mean_seconds", "return 2 * mean_seconds"))),
        Slip("This is the time between failures. The interval is M only if a checkpoint takes at "
             "least twice as long.", (DALY, "mean_seconds")),
        Slip("A fixed fraction of the time between failures ignores the checkpoint: the interval "
             "grows with the square root of both.", half_the_mean),
        Slip("The interval can be far below 1 second: do not round.", (DALY, f"round({DALY})"),
             (DALY, f"int({DALY})"), (DALY, f"math.ceil({DALY})")),
        Slip("Return seconds, the unit of the arguments.", (DALY, f"({DALY}) / 60"),
             (DALY, f"({DALY}) / 3600")),
        Slip("Return the interval.", (f"return {DALY}", DALY)),
        Slip(ABOVE, (FLOOR, "False"), (FLOOR, FLOOR.replace("<=", "<")),
             (FLOOR, "checkpoint_seconds <= 0"), (FLOOR, "mean_seconds <= 0"),
             (FLOOR, "checkpoint_seconds <= 0 or mean_seconds == 0"),
             (FLOOR, "checkpoint_seconds * mean_seconds <= 0")),
    ), hints=(
        "What do short intervals cost you, and what do long ones cost you?",
        "Young: checkpoints cost C / T, lost work costs T / 2 M, and the sum is smallest at "
        "sqrt(2 C M). Daly adds terms for checkpoints that are not short.",
        "x = sqrt(C / (2 M)); sqrt(2 C M) * (1 + x / 3 + x**2 / 9) - C; and M where C is 2 M or "
        "more",
    ))


# --- goodput --------------------------------------------------------------------------------------

class Timing(NamedTuple):
    """Seconds of work between checkpoints, of a save, between failures, of a restart."""

    T: float
    C: float
    M: float
    R: float

    def __str__(self):
        return (f"{self.T:,g} s of work, {self.C:g} s to save, {self.M:,.5g} s between failures, "
                f"{self.R:,g} s to restart")


def _see_share(fn, timing):
    yield {"goodput": fn(*timing)}


def _see_beside_simulated(fn, timing):
    share = fn(*timing)
    simulated = simulate(timing.T, timing.C, _gaps(timing.M, 100_000), timing.R)
    says = f"goodput is {share:.4f}; simulated it is {simulated:.4f}, {{1:g}}% more or less"
    yield {"goodput": AtMost(100 * abs(share / simulated - 1), 1, says)}


def by_counting_failures(T, C, M, R):
    """Compute the goodput by counting failures.

    A round fails with probability 1 - p, and then costs the time until its failure and a restart;
    a restart is itself a round, without work.
    """
    if min(T, M) <= 0:
        raise ValueError(f"T={T}, M={M}")

    def seconds(length, after_failure):
        p = math.exp(-length / M)  # that it goes well
        if p == 0:
            return math.inf
        failures = (1 - p) / p
        until_failure = M - length * p / (1 - p) if p < 1 else 0.0
        return length + failures * (until_failure + after_failure)

    return T / seconds(T + C, seconds(R, 0.0))


def first_order(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    return interval / (interval + checkpoint_seconds) * (
        1 - (restart_seconds + interval / 2) / mean_seconds)


def first_order_of_a_round(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    a_round = interval + checkpoint_seconds
    return max(0.0, interval / a_round * (1 - (restart_seconds + a_round / 2) / mean_seconds))


def no_failure_while_it_saves(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    return interval / (checkpoint_seconds + mean_seconds * math.exp(
        restart_seconds / mean_seconds) * math.expm1(interval / mean_seconds))


SHARE_5, SHARE_60 = (goodput(best_interval(C, LLAMA), C, LLAMA, RESTART) for C in (5, 60))
TIMINGS = tuple(map(Timing, (1100, 3600, 50, 2000, 100, 10), (60, 300, 20, 0, 10, 5),
                    (LLAMA, 3600, 40, 5000, 400, 1e4), (600, 3600, 30, 100, 0, 3e4)))
HOPELESS = Timing(1e6, 60, 100, 60), Timing(50, 60, 100, 1e6)
SIMULATED = Timing(1100, 60, LLAMA, 600), Timing(3600, 300, 7200, 1200)
NOTHING = Timing(0, 1, 100, 1), Timing(10, 1, 0, 1), Timing(-5, 1, 100, 1)
SHARE = "work * math.exp(-restart - round_) / -math.expm1(-round_)"
ROUND = "work * math.exp(-round_) / -math.expm1(-round_)"
SECONDS = "interval, interval + checkpoint_seconds, restart_seconds"
RANGE = "min(interval, mean_seconds) <= 0"
ESTIMATE = ("Losing half of the work, or of the round, per failure is right only if failures are "
            "rare; e^((T + C)/M) is exact.")
GOODPUT = Proof(
    goodput,
    Stage("exact for random failures, also during a checkpoint or a restart", _see_share, TIMINGS,
          oracle=by_counting_failures),
    Stage("0.0 where nothing ever gets done", _see_share, HOPELESS, oracle=by_counting_failures),
    Stage({"within 1% of 100,000 simulated failures": (),
           f"Llama 3's rate, restarts of 10 min: {SHARE_5:.0%} with checkpoints of 5 s, "
           f"{SHARE_60:.0%} with 60 s; it had more than 90%": ()},
          _see_beside_simulated, SIMULATED, oracle=by_counting_failures),
    Stage("an interval or a mean that is not above 0 is a ValueError", _see_share, NOTHING,
          oracle=by_counting_failures),
    mistakes=(
        Slip("This is the share without failures. Each failure costs a restart and the unsaved "
             "work.", (SHARE, "work / round_")),
        Slip("Each failure also costs a restart: a round takes e^(R/M) times as long.",
             (SHARE, ROUND)),
        Slip("A failure can cut a restart short, and then it begins again: a restart takes M "
             "(e^(R/M) - 1) on average, not R.", (SHARE, f"{ROUND} / (1 + restart)")),
        Slip("A round is work and a checkpoint: e^((T + C)/M).",
             (SECONDS, "interval, interval, restart_seconds")),
        Slip("Only the work is useful, not the checkpoint.",
             (SECONDS, "interval + checkpoint_seconds, interval + checkpoint_seconds, "
              "restart_seconds")),
        Slip("A checkpoint that is cut short saves nothing: both work and checkpoint must finish "
             "before the failure.", no_failure_while_it_saves),
        Slip("A restart is not part of every round. It follows each failure, so a round takes M "
             "e^(R/M) (e^((T + C)/M) - 1).",
             (SHARE, "work / math.expm1(restart + round_) if restart + round_ < 700 else 0.0"),
             (SECONDS, "interval, interval + checkpoint_seconds + restart_seconds, 0.0")),
        Slip("This is the probability that a round of L seconds succeeds. It takes M (e^(L/M) - 1) "
             "on average until one does.", (SHARE, "math.exp(-round_)"),
             (SHARE, "math.exp(-restart - round_)")),
        Slip(ESTIMATE, first_order, first_order_of_a_round),
        Slip("This is the share that is lost. Return the share that is useful.",
             (SHARE, f"1 - {SHARE}")),
        Slip("This is seconds per second of work: invert the fraction.",
             (SHARE, f"1 / max(1e-300, {SHARE})")),
        Slip("Return a fraction, not a percentage.", (SHARE, f"100 * {SHARE}")),
        Slip("M is a factor only once: T / (M e^(R/M) (e^((T + C)/M) - 1)).",
             (SHARE, f"{SHARE} / mean_seconds"), (SHARE, f"{SHARE} * mean_seconds")),
        Slip("A large power of e overflows here, where no round ever succeeds: divide numerator "
             "and denominator by it, and the share is 0.0.",
             (SHARE, "work / (math.exp(restart) * math.expm1(round_))"),
             (SHARE, f"{ROUND} / math.exp(restart)"),
             (SHARE, "work * math.exp(-restart) / math.expm1(round_)")),
        Slip("Raise a ValueError if the interval or the mean is not above 0.",
             (RANGE, "False"), (RANGE, "interval <= 0"), (RANGE, "mean_seconds <= 0"),
             (RANGE, "min(interval, mean_seconds) < 0")),
    ), hints=(
        "How long does it take on average to complete a round of work and checkpoint?",
        "With random failures, L seconds pass without a failure with probability e^(-L/M). It "
        "takes M (e^(L/M) - 1) on average until that happens, if you can start again at once.",
        "Each failure adds a restart, which itself takes M (e^(R/M) - 1), so a round takes M "
        "e^(R/M) (e^((T + C)/M) - 1). Return T divided by that, without computing a large power of "
        "e",
    ))
