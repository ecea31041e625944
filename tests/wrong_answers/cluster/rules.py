"""Lab 15: rules that fire too often, too late, or for nobody; alarms that cry wolf."""

from mutants import mutant

from ranklab.cluster.alarm import rule_alarm, sick_rank_alarm
from ranklab.cluster.recordings import SECONDS, SICK, record
from ranklab.cluster.rules import mfu_alert_rule, straggler_rule

FLOPS = "sum by (run) (rate(train_tokens_total[5m]) * train_flops_per_token)"
PEAK = "sum by (run) (train_peak_flops)"
MEDIAN = "on (run) group_left quantile by (run) (0.5, {mean})"
MEAN = "avg_over_time(train_step_seconds[1m])"
MFU_EXPR = 'f"{flops} / sum by (run) (train_peak_flops) < {least}"'
STEP_EXPR = f'f"{{mean}} / {MEDIAN} > {{factor}}"'

WRONG = [mutant(mfu_alert_rule, *edits, says=says, called=called) for *edits, says, called in (
    (FLOPS, "rate(sum by (run) (train_tokens_total)[5m:15s]) * max by (run) "
     "(train_flops_per_token)", "sum of rates", "rate_of_sum"),
    (FLOPS, "sum by (run) (rate(train_tokens_total[5m])) * max by (run) (train_flops_per_token)",
     "missing above and below the line", "missing_below"),
    ("rate(train", "irate(train", "Counters jump", "irate"),
    (PEAK, "max by (run) (train_peak_flops)", "peaks of all GPUs", "one_gpu"),
    ('f"{minutes}m"', '"0s"', "false alarm.*waits", "at_once"),
    (MFU_EXPR, 'f"sum(rate(train_tokens_total[5m]) * train_flops_per_token) / '
               'sum(train_peak_flops) < {least}"', "those that `expr` leaves", "all_runs"),
    (PEAK, "sum by (run) (max_over_time(train_peak_flops[30m]))", "old instances", "old_gpus"),
    ("< {least}", "< bool {least}", "`bool` gives", "bool"),
    ("< {least}", "> {least}", "false alarm.* is 0.4053 then, and the rule asks for > 0.3 ->",
     "turned_round"),
    ('f"{minutes}m"', 'f"{3 * minutes}m"', "not there by minute 40; .* is 0.2027 then, and the "
     "rule asks for < 0.3 ->", "three_times_too_late"),
    (FLOPS, "sum by (run) (rate(train_tokens_total[5m])) * train_flops_per_token",
     "both of its sides have", "many_to_one"),
)] + [mutant(straggler_rule, *edits, says=says, called=called) for *edits, says, called in (
    ("quantile by (run) (0.5, ", "avg by (run) (", "the median", "mean"),
    ("quantile by (run) (0.5, ", "min by (run) (", "Fast ranks make no", "fastest"),
    (MEAN, "train_step_seconds", "newest sample is gone", "one_sample"),
    ('f"{minutes}m"', '"0s"', "false alarm.*waits", "at_once"),
    (MEDIAN, "scalar(quantile(0.5, {mean}))", "many runs", "all_runs"),
    (MEDIAN, "quantile by (run) (0.5, {mean})", "group_left where", "no_match"),
    (STEP_EXPR, 'f"max by (run) ({mean}) / quantile by (run) (0.5, {mean}) > {factor}"',
     "those that `expr` leaves", "no_rank"),
    ("{factor}", "1.2", "Both arguments", "factor"),
)] + [mutant(sick_rank_alarm, *edits, says=says, called=called) for *edits, says, called in (
    ("usual = np.sort(x, axis=1)[:, R // 2, None]", "usual = np.sort(x[:1], axis=1)[:, R // 2, "
     "None]", "all slow: the file system", "own_past"),
    ("before = x[-8:], np.median(x[:-8], axis=0)", "before = x[-8:], 0",
     "imbalance: the last ranks have", "others_only"),
    ("steady = np.sort(now, axis=0)[1]", "steady = np.sort(now, axis=0)[-1]", "decide by several",
     "one_scrape"),
    ("np.minimum((errors > 0)", "np.maximum((errors > 0)", "ECC once.*do not go on",
     "count_of_errors"),
    ("for name in (ECC, SYMBOLS):", "for name in (ECC,):", "bad link.*counter of its own",
     "no_link"),
    ("x = np.where(np.isnan(x), usual, x)", "metrics[name][-40:] = np.where(np.isnan(x), usual, x)",
     "are changed", "in_place"),
)]  # fmt: skip


def sick_rank_alarm__the_rule(metrics):
    """0.88 is asked for"""
    return rule_alarm(metrics)


def sick_rank_alarm__by_heart(metrics):
    """drawn just now.*runs that it can know"""
    known = {run.metrics[SECONDS][0].tobytes(): run for run in BOOK}
    run = known.get(metrics[SECONDS][0].tobytes())
    return run.sick[0] if run and len(metrics[SECONDS]) > run.onset else None


BOOK = [record(kind, seed) for kind in SICK for seed in range(9001, 9004)]
