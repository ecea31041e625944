"""Alert rules of Prometheus about a training run: its MFU is low, or one rank is slow.

Each rank exports these (exporter.py), with labels {run, rank} and the scrape's {job, instance}:
    train_tokens_total     counter: tokens that this rank has trained on since its process began
    train_flops_per_token  gauge: of the model, forward and backward, the same on all ranks
    train_peak_flops       gauge: FLOP/s that this rank's GPU could do
    train_step_seconds     gauge: of the last step, until the rank reached the collective
"""


def mfu_alert_rule(least, minutes):
    """Return a Prometheus alerting rule, as a dict with the keys of a rules file.

    It raises one alert for each run whose MFU has been below `least` for `minutes` minutes.

    MFU      the model's FLOPs per second / FLOP/s of all its GPUs, over some minutes, because a
             step may take more than a minute, and counters jump
    fires    within 2 x minutes, and until the run has recovered, or at most `minutes` longer. It
             also fires if ranks hang, if scrapes fail now and then, or if another run is fine
    silent   while a run compiles, for its first 4 minutes; in a pause or a restart that takes
             a third of `minutes`, after which counters begin again at 0, perhaps on different
             instances; and after a run has ended
    labels   the alert has the labels run and severity, but not rank
    annotations  one of them contains the run and the value: {{ $labels.run }}, {{ $value }}
    metrics  train_tokens_total, a counter; train_flops_per_token; train_peak_flops, of one GPU.
             Each rank exports all three, with labels run, rank, instance, job, scraped every 15 s
    minutes  10 or more
    Lab: 15
    """
    # Multiplied before the sum: a rank with a failed scrape is then missing in the denominator too.
    flops = "sum by (run) (rate(train_tokens_total[5m]) * train_flops_per_token)"
    return {
        "alert": "LowMFU",
        "expr": f"{flops} / sum by (run) (train_peak_flops) < {least}",
        "for": f"{minutes}m",
        "labels": {"severity": "warning"},
        "annotations": {"summary": "run {{ $labels.run }}: MFU {{ $value | humanizePercentage }}"},
    }


def straggler_rule(factor, minutes):
    """Return a Prometheus alerting rule, as a dict.

    It raises an alert for each rank whose steps have taken more than `factor` times as long as the
    median rank's steps, in its run, for `minutes` minutes.

    fires    within 2 x minutes, and until the rank has recovered, or at most `minutes` longer. It
             also fires if two ranks of eight are slow, if every eighth scrape fails, or if
             another rank is gone
    silent   if a single step is slow (the first one, a checkpoint), even if the gauge shows it in
             two scrapes; if a rank is slow for only a third of `minutes`; if all are slow at once,
             or some are fast; if a run has longer steps than another run; if a rank is gone
    labels   the alert has the labels run, rank and severity
    annotations  one of them contains the run, the rank and the value
    metrics  train_step_seconds, a gauge: seconds of a rank's last step, until it reached the
             collective; labels run, rank, instance, job; scraped every 15 s
    minutes  5 or more
    Lab: 15
    """
    mean = "avg_over_time(train_step_seconds[1m])"
    return {
        "alert": "StragglerRank",
        "expr": f"{mean} / on (run) group_left quantile by (run) (0.5, {mean}) > {factor}",
        "for": f"{minutes}m",
        "labels": {"severity": "warning"},
        "annotations": {"summary": "run {{ $labels.run }}: rank {{ $labels.rank }} takes "
                                   "{{ $value | humanize }} times as long as the median rank"},
    }


def silent_host_rule(minutes):
    """Return a Prometheus rule, a dict, that alerts for each host on which no rank answers.

    It fires when no rank has answered a scrape for `minutes` minutes. A rank that ends normally
    tells Prometheus: see Exporter.close.
    """
    return {
        "alert": "SilentHost",
        "expr": 'max by (host) (up{job="train"}) == 0',
        "for": f"{minutes}m",
        "labels": {"severity": "critical"},
        "annotations": {"summary": "{{ $labels.host }}: none of its ranks answers"},
    }
