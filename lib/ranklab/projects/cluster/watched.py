"""A training run that a real Prometheus watches: one rank is slow, and the alert names it."""

import contextlib
import os
import signal
import time

from ranklab.cluster.exporter import DCGM, Exported, Exporter, exporting
from ranklab.cluster.monitor import Monitor
from ranklab.cluster.poller import watcher
from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device, launch
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.trainer.text import TextTrainer, TrainConfig, text_for

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ctx=64)
CONFIG = TrainConfig(steps=100_000, batch=8, log_every=1, eval_batch=8)


class Sleeper(TextTrainer):
    """A trainer whose batches come `sleep` seconds late, as from a slow disk.

    It stops as after a SIGTERM.
    """

    def next_batch(self):
        time.sleep(self.sleep)
        if self.is_over():
            os.kill(os.getpid(), signal.SIGTERM)
        return super().next_batch()


class Watched(Exported, Sleeper):
    pass


def train(rank_sleeps, targets, inbox, limit):
    """Train on each rank until there is an alert, or for `limit` seconds; return the steps."""
    text, shape = text_for(SHAPE, CONFIG)
    trainer = Watched(GPT(shape), text, CONFIG, device(), parallel=DataParallel(), progress=False)
    rank, end = trainer.parallel.rank, time.monotonic() + limit
    trainer.is_over = lambda: inbox.stat().st_size > 0 or time.monotonic() > end
    trainer.sleep = rank_sleeps[rank]
    gpu = Exporter({"run": "gpt", "rank": rank, "gpu": rank}, targets=targets, metrics=DCGM)
    gpu.set(DCGM_FI_DEV_SM_CLOCK=1980, DCGM_FI_DEV_GPU_TEMP=60)  # a stand-in: no GPU is there
    with contextlib.closing(gpu), exporting(trainer, "gpt", targets, "127.0.0.1"):
        trainer.fit()
    return trainer.steps_done


def watched_run(folder, rule, ranks=4, slow=2, sleep=0.1, limit=60):
    """Train while Prometheus and Alertmanager watch, and rank `slow` waits for its data.

    Without them the library's poller watches.
    rule: a straggler_rule
    Returns: {by, alert, seconds until it came, steps, tokens, mfu, step_seconds of each rank}
    Raises: TimeoutError if no alert came in `limit` seconds
    """
    kind = watcher()
    with kind(folder, [rule]) as monitor:
        start = time.time()
        sleeps = [sleep if rank == slow else 0.002 for rank in range(ranks)]
        steps = launch(train, sleeps, monitor.targets, monitor.inbox, limit, ranks=ranks,
                       timeout=limit + 30)
        alert = monitor.wait(rule["alert"], 1)
        seconds = monitor.query("avg by (rank) (avg_over_time(train_step_seconds[1m]))")
        tokens, = monitor.query("sum by (run) (max_over_time(train_tokens_total[1m]))")
        mfu, = monitor.query("sum by (run) (rate(train_tokens_total[1m])) * max by (run) ("
                             "max_over_time(train_flops_per_token[1m])) / sum by (run) ("
                             "max_over_time(train_peak_flops[1m]))")
    source = "Prometheus" if kind is Monitor else "the library's poller"
    return {"by": source, "alert": alert, "seconds": alert["time"] - start,
            "steps": steps[0], "tokens": tokens[1], "mfu": mfu[1],
            "step_seconds": {int(labels["rank"]): x for labels, x in seconds}}


def watched_report(results):
    """Return the server's observations as text."""
    ranks = sorted(results["step_seconds"].items())
    return "\n".join([
        f"{results['alert']['annotations']['summary']} (by {results['by']})",
        f"the alert came {results['seconds']:.0f} s after the start, in step {results['steps']}; "
        f"{results['tokens']:,.0f} tokens, MFU {results['mfu']:.2%}",
        "own time of a step: " + ", ".join(f"rank {rank} {1e3 * x:.0f} ms" for rank, x in ranks)])
