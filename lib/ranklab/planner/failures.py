"""The share of time in which a run makes progress, by published failure rates: Llama 3's (16,384
GPUs, 54 days), and those of Meta's research clusters, which are higher.
"""

from ranklab.formulas.resilience import GPU_HOURS, RESEARCH_HOURS, goodput, optimal_interval
from ranklab.planner.published import table

DAYS, GPUS = 54, 16384  # arXiv 2407.21783, 3.3.4
OFTEN = GPU_HOURS / 1024 / RESEARCH_HOURS[1024]  # times Llama 3's rate, on research clusters
RESTART = 600.0  # seconds until a job works again; MegaScale finds most in 10 min (2402.15627, 6.3)
STORAGE = 2e9  # bytes/s with which a node writes its part of a checkpoint, assumed


def hours_between_failures(gpus):
    """Return the mean hours until a job on `gpus` GPUs is interrupted.

    Llama 3: 50,700 hours for one GPU.
    """
    row = next(row for row in table("failures") if row["component"] == "TOTAL unexpected")
    return DAYS * 24 * GPUS / float(row["count"]) / gpus


def good_share(gpus, checkpoint_seconds, restart_seconds=RESTART, interval=None, often=1):
    """Return the share of the time in which a job makes progress: lab 14's goodput.

    interval  seconds of work between checkpoints; None: Daly's optimum
    often     the failure rate, as a multiple of Llama 3's
    """
    mean = 3600 * hours_between_failures(gpus) / often
    interval = interval or optimal_interval(checkpoint_seconds, mean)
    return goodput(interval, checkpoint_seconds, mean, restart_seconds)


def checkpoint_seconds(model, nodes):
    """Return the seconds to write weights and optimizer states, 14 bytes per parameter, from all
    nodes at once.
    """
    return 14 * model.parameters / (nodes * STORAGE)


def good_share_of(model, machine, gpus, often=1):
    """Return good_share for training this model on `gpus` of these GPUs."""
    return good_share(gpus, checkpoint_seconds(model, max(1, gpus / machine.node)), often=often)
