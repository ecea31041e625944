"""Alert rules of Prometheus about a training run: it works too little; one rank is slow.

What exporter.py exports, each rank for itself; {run, rank} and the scrape's own {job, instance}:
    train_tokens_total     counter: tokens that this rank has trained on since its process began
    train_flops_per_token  gauge: of the model, forward and backward, the same on all ranks
    train_peak_flops       gauge: FLOP/s that this rank's GPU could do
    train_step_seconds     gauge: of the last step, until the rank reached the collective
"""


def mfu_alert_rule(least, minutes):
    """An alert rule of Prometheus, as a dict with the keys of a rules file: it fires, once a run,
    where the MFU of a run has been below `least` for `minutes` minutes.

    MFU      FLOPs of the model in a second / those that its GPUs could do, of the whole run, in
             the mean over some minutes: a step may take a minute, and counters jump
    fires    within 2 x minutes, also where the counters stand still, where scrapes fail now and
             then, and where the run was restarted an hour ago
    silent   a run that began less than `minutes` ago: it compiles. A pause of a third of `minutes`.
             A restart that takes as long, maybe on other nodes: counters begin again at 0, labels
             `instance` are others. Where another run is the slow one. Where the run has ended
    labels   of the alert: run, and a severity; no rank, no instance
    for, annotations  one of these names the run and the value: {{ $labels.run }}, {{ $value }}
    metrics  train_tokens_total (a counter), train_flops_per_token, train_peak_flops (of one GPU):
             each rank exports all three, with labels run, rank, instance. Scraped each 15 s
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
    """An alert rule of Prometheus, as a dict: it fires for each rank that has been slow for
    `minutes` minutes, by more than `factor` times the median rank of its run.

    fires    within 2 x minutes, also for two slow ranks of eight, where a scrape fails each other
             minute, and while another rank is gone
    silent   all ranks slow at once. One slow step: a checkpoint, the first one; it stays in the
             gauge for up to 30 s. A rank that was slow for a third of `minutes`. A run whose steps
             take longer than those of another run. One rank that is fast. One that is gone
    labels   of the alert: run and rank, and a severity
    annotations  one of them names the run, the rank and the value
    metrics  train_step_seconds (a gauge): of a rank's last step, until it reached the collective,
             with labels run, rank, instance. Scraped each 15 s
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
