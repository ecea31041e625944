"""Lab 14: shares of useful work that are too high, too low, or of something else."""

import math

from mutants import mutant

from ranklab.resilience import goodput

LAST = "work * math.exp(-restart - round_) / -math.expm1(-round_)"
SECONDS = "interval, interval + checkpoint_seconds, restart_seconds"
REFUSED = "min(interval, mean_seconds) <= 0"

WRONG = [mutant(goodput, *edits, says=says, called=called) for *edits, says, called in (
    (LAST, "work / round_", "that without failures", "no_failures"),
    (LAST, "work * math.exp(-round_) / -math.expm1(-round_)", "that without restarts",
     "no_restarts"),
    (LAST, "work * math.exp(-round_) / -math.expm1(-round_) / (1 + restart)",
     "no failure comes during a restart", "whole_restarts"),
    (SECONDS, "interval, interval, restart_seconds", "that without checkpoints", "no_checkpoints"),
    (SECONDS, "interval + checkpoint_seconds, interval + checkpoint_seconds, restart_seconds",
     "checkpoints counted as work", "checkpoints_are_work"),
    (LAST, f"1 - {LAST}", "the share that is lost", "what_is_lost"),
    (LAST, "work / (math.exp(restart) * math.expm1(round_))", "OverflowError", "overflows"),
    (LAST, "work * math.exp(-round_) / -math.expm1(-round_) / math.exp(restart)", "OverflowError",
     "restart_overflows"),
    (LAST, f"min(1.0, {LAST} * mean_seconds)", "goodput is", "not_by_the_mean"),
    (REFUSED, "False", "no ValueError|ZeroDivisionError", "nothing_refused"),
)]  # fmt: skip


def goodput__first_order(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """a first-order estimate"""
    return interval / (interval + checkpoint_seconds) * (
        1 - (restart_seconds + interval / 2) / mean_seconds)


def goodput__first_order_of_a_round(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """an estimate of first order"""
    a_round = interval + checkpoint_seconds
    return max(0.0, interval / a_round * (1 - (restart_seconds + a_round / 2) / mean_seconds))


def goodput__no_failure_while_it_saves(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """during a checkpoint"""
    return interval / (checkpoint_seconds + mean_seconds * math.exp(
        restart_seconds / mean_seconds) * math.expm1(interval / mean_seconds))
