"""Lab 15: rules that fire too often, too late, or for nobody."""

from mutants import mutant

from ranklab.cluster.rules import mfu_alert_rule, straggler_rule

TOKENS = "sum by (run) (rate(train_tokens_total[5m]))"
PEAK = "sum by (run) (train_peak_flops)"
MEDIAN = "on (run) group_left quantile by (run) (0.5, {mean})"
MEAN = "avg_over_time(train_step_seconds[1m])"
MFU_EXPR = 'f"{tokens} * {flops} / sum by (run) (train_peak_flops) < {least}"'
STEP_EXPR = f'f"{{mean}} / {MEDIAN} > {{factor}}"'

WRONG = [mutant(mfu_alert_rule, *edits, says=says, called=called) for *edits, says, called in (
    (TOKENS, "rate(sum by (run) (train_tokens_total)[5m:15s])", "sum of rates", "rate_of_sum"),
    (TOKENS, "sum by (run) (irate(train_tokens_total[5m]))", "Counters jump", "irate"),
    (PEAK, "max by (run) (train_peak_flops)", "peaks of all GPUs", "one_gpu"),
    ('f"{minutes}m"', '"0s"', "false alarm.*waits", "at_once"),
    (MFU_EXPR, 'f"sum(rate(train_tokens_total[5m])) * max(train_flops_per_token) / '
               'sum(train_peak_flops) < {least}"', "labels of an alert", "all_runs"),
    (PEAK, "sum by (run) (max_over_time(train_peak_flops[30m]))", "old instances", "old_gpus"),
    ("< {least}", "< bool {least}", "`bool` gives", "bool"),
    ("{minutes}m", "10m", "`minutes`", "minutes"),
    ("max by (run) (train_flops", "(train_flops", "Both sides", "many_to_one"),
    ("5m]", "10s]", "two samples", "short_range"),
)] + [
    mutant(straggler_rule, *edits, says=says, called=called) for *edits, says, called in (
        ("quantile by (run) (0.5, ", "avg by (run) (", "the median", "mean"),
        ("quantile by (run) (0.5, ", "min by (run) (", "not by the fastest", "fastest"),
        (MEAN, "train_step_seconds", "newest sample is gone", "one_sample"),
        ('f"{minutes}m"', '"0s"', "false alarm.*waits", "at_once"),
        (MEDIAN, "scalar(quantile(0.5, {mean}))", "many runs", "all_runs"),
        (MEDIAN, "quantile by (run) (0.5, {mean})", "group_left where", "no_match"),
        (STEP_EXPR, 'f"{mean} / avg_over_time(train_step_seconds[30m]) > {factor}"',
         "All together|median", "own_past"),
        (STEP_EXPR, 'f"max by (run) ({mean}) / quantile by (run) (0.5, {mean}) > {factor}"',
         "labels of an alert", "no_rank"),
        ("{factor}", "1.2", "`factor`", "factor"),
        ("{minutes}m", "5m", "minutes=18.*for: 5m", "minutes"),
    )]  # fmt: skip
