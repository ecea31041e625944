"""Alert rules of Prometheus about a training run: it works too little; one rank is slow.

What exporter.py exports, each rank for itself; {run, rank} and the scrape's own {job, instance}:
    train_tokens_total     counter: tokens that this rank has trained on since its process began
    train_flops_per_token  gauge: of the model, forward and backward, the same on all ranks
    train_peak_flops       gauge: FLOP/s that this rank's GPU could do
    train_step_seconds     gauge: of the last step, until the rank reached the collective
"""


def mfu_alert_rule(least, minutes):
    """A Prometheus rule, a dict with the keys of a rules file: it alerts, once a run, where the
    run's MFU has been below `least` for `minutes` minutes.

    MFU      FLOPs of the model in a second / FLOP/s of all its GPUs, over some minutes: a step may
             take more than a minute, and counters jump
    fires    within 2 x minutes, and until it is well again, `minutes` more at most; also where
             ranks hang, where scrapes fail now and then, where another run is fine
    silent   while a run begins: it compiles for 4 minutes. A pause, or a restart, of a third of
             `minutes`: counters begin again at 0, maybe on other instances. A run that has ended
    labels   of the alert: run, but not rank; a severity
    annotations  one of them has the run and the value in it: {{ $labels.run }}, {{ $value }}
    metrics  train_tokens_total, a counter; train_flops_per_token; train_peak_flops, of one GPU.
             Each rank exports all three: labels run, rank, instance, job. Scraped each 15 s
    minutes  10 or more
    lab      15
    """
    tokens = "sum by (run) (rate(train_tokens_total[5m]))"
    flops = "max by (run) (train_flops_per_token)"
    return {
        "alert": "LowMFU",
        "expr": f"{tokens} * {flops} / sum by (run) (train_peak_flops) < {least}",
        "for": f"{minutes}m",
        "labels": {"severity": "warning"},
        "annotations": {"summary": "run {{ $labels.run }}: MFU {{ $value | humanizePercentage }}"},
    }


def straggler_rule(factor, minutes):
    """A Prometheus rule, as a dict: it alerts for each rank that has been slower than `factor`
    times the median rank of its run for `minutes` minutes.

    fires    within 2 x minutes, and until it is well again, `minutes` more at most; also for two
             ranks of eight, where each eighth scrape fails, while another rank is gone
    silent   for what is slow once, even if it stays in the gauge for two scrapes: the first step, a
             checkpoint. A rank that was slow for a third of `minutes`. All slow at once. Some that
             are fast. A run whose steps are longer than another run's. A rank that is gone
    labels   of the alert: run and rank; a severity
    annotations  one of them has the run, the rank and the value in it
    metrics  train_step_seconds, a gauge: of a rank's last step, until it reached the collective;
             labels run, rank, instance, job. Scraped each 15 s
    minutes  5 or more
    lab      15
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
    """A Prometheus rule, as a dict: it alerts for each host of which no rank has answered a scrape
    for `minutes` minutes. A rank that ends well says so to Prometheus: see Exporter.close.
    """
    return {
        "alert": "SilentHost",
        "expr": 'max by (host) (up{job="train"}) == 0',
        "for": f"{minutes}m",
        "labels": {"severity": "critical"},
        "annotations": {"summary": "{{ $labels.host }}: none of its ranks answers"},
    }
