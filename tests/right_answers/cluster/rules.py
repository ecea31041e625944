"""Lab 15: rules of another kind that fire when they should."""


def mfu_alert_rule__mean_of_ranks(least, minutes):
    return {
        "alert": "mfu low",
        "expr": f"""
            avg without (rank, instance) (
              rate(train_tokens_total[{minutes // 2}m]) * train_flops_per_token / train_peak_flops
            ) < {least}""",
        "for": f"{minutes * 60}s",
        "labels": {"severity": "page", "team": "training"},
        "annotations": {"summary": "MFU", "description":
                        '{{ .Labels.run }} is at {{ printf "%.2f" .Value }}'},
    }


def mfu_alert_rule__always_below(least, minutes):
    now = ("sum by (run) (rate(train_tokens_total[4m]) * on (run, rank, instance, job) "
           "train_flops_per_token) / on (run) sum by (run) (train_peak_flops)")
    old = f"max by (run) (train_flops_per_token offset {minutes}m)"
    return {"alert": "LowMFU", "expr": f"max_over_time(({now})[{minutes}m:]) < {least} and {old} "
            "and on (run) train_peak_flops",
            "labels": {"severity": "critical"},
            "annotations": {"text": "{{ $labels.run }}: {{ $value }}"}}


def straggler_rule__median_of_both(factor, minutes):
    usual = "quantile_over_time(0.5, train_step_seconds[3m])"
    return {"alert": "Straggler", "for": f"{minutes / 2 * 60:.0f}s",
            "expr": f"{usual} / ignoring (rank, instance) group_left () "
                    f"quantile without (rank, instance) (0.5, {usual}) > {factor}",
            "labels": {"severity": "ticket"},
            "annotations": {"summary": "{{ $labels.run }}/{{ $labels.rank }}: {{ $value }}"}}


def straggler_rule__mostly(factor, minutes):
    slow = ("train_step_seconds > bool on (run) group_left "
            f"{factor} * quantile by (run) (0.5, train_step_seconds)")
    return {"alert": "Straggler", "for": "2m", "expr":
            f"max by (run, rank) (avg_over_time(({slow})[{minutes}m:15s])) > 0.6",
            "labels": {"severity": "warning"}, "annotations": {
                "summary": "{{ $labels.run }}, rank {{ $labels.rank }} is slow in {{ $value }}"}}


def sick_rank_alarm__streaks(metrics):
    import numpy as np

    def grown(name, least):
        new = np.diff(metrics[name][-12:], axis=0) > 0
        return new.sum(axis=0) * (new.sum(axis=0) >= least)

    n, ranks = metrics["train_step_seconds"].shape
    if n < 22:
        return None
    votes = [grown("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 4), grown("node_infiniband_symbol_error_total",
                                                              4)]
    for name, sign, least in (("train_step_seconds", 1, 1.06), ("DCGM_FI_DEV_SM_CLOCK", -1, 1.03)):
        x = metrics[name] / np.nanmedian(metrics[name], axis=1, keepdims=True)
        x = (x / np.nanmedian(x[:15], axis=0)) ** sign
        votes.append(10 * (np.nan_to_num(x[-9:], nan=2.0) > least).all(axis=0))
    votes = np.sum(votes, axis=0)
    return votes.argmax() if votes.any() else None
