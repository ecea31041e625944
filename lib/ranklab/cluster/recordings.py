"""Metrics of many training runs, sick ones and healthy ones: emulated, not recorded.

Nobody publishes the metrics of a large cluster together with its faults. So they are drawn at
random, following published facts:
    kinds        GPUs, memory, network and hosts in this order stopped Llama 3 (arXiv 2407.21783,
                 table 5); slow GPUs, hosts and links, "from sub-minutes to nearly ten hours", are
                 what Greyhound found on 10,000 GPUs (USENIX ATC 2025, arXiv 2410.12588)
    throttling   a GPU near its limit is clocked down. `nvidia-smi -q -d TEMPERATURE` prints the
                 limit of each card, and T.Limit, the degrees left until then. One H800 of
                 700 W prints 87 C as its highest working temperature and 89 C for the slowdown
    names        as in NVIDIA's dcgm-exporter (labs/jobs/monitoring/dcgm-metrics.csv) and
                 node_exporter
All rates, spreads and delays are our own choice, and so is how far the clock falls with heat. A
detector that is good here is not thereby good on a real cluster, although it must distinguish
the same faults.
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

SCRAPE = 15.0  # seconds
SECONDS, DATA = "train_step_seconds", "train_data_seconds"  # the first contains the second
TEMP, CLOCK, POWER = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_POWER_USAGE"
ECC, SYMBOLS = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "node_infiniband_symbol_error_total"  # counters
MFU = "train_mfu"
HOST = 8  # ranks
SICK = {"hot GPU": "it throttles: clock and power fall, its steps get longer",
        "bad link": "symbol errors: MFU falls, and no rank's own time shows it",
        "dying memory": "corrected ECC errors, more and more, until the GPU is lost",
        "slow loader": "all ranks of one host wait for data",
        "slow host CPU": "one rank's steps are longer, and nothing else shows it"}
HEALTHY = {"calm": "noise alone",
           "imbalance": "the last ranks have had longer steps from the start: that is the model",
           "slow start": "one rank is slow for some minutes: a cold cache",
           "neighbours": "for some minutes single steps of one host are long",
           "warm rack": "one host is 10 C warmer for a while, and no slower",
           "ECC once": "some corrected errors at once, and then none",
           "all slow": "the file system is slow for all ranks",
           "restart": "counters begin again at 0, first steps compile"}


class Recording(NamedTuple):
    """A run: the scraped metrics, and the fault.

    metrics: {name: (scrapes, ranks)}, and MFU of (scrapes,); NaN where a scrape failed
    kind: one of SICK or HEALTHY
    sick: the ranks, one of which an alarm must name; () if healthy
    onset: the scrape at which the fault begins
    """

    metrics: dict
    kind: str
    sick: tuple
    onset: int


def record(kind, seed):
    """Draw a Recording of 22 minutes on 16 to 32 ranks; a seed always gives the same one."""
    draw = np.random.default_rng([seed, *map(ord, kind)])
    scrapes, ranks = 90, int(draw.choice([16, 24, 32]))
    onset, rank = int(draw.integers(30, 40)), int(draw.integers(ranks))
    shape, step = (scrapes, ranks), draw.uniform(2, 12)

    def noise(size, *noise_shape):
        return size * draw.standard_normal(noise_shape or shape)

    run = SimpleNamespace(
        factor=1 + noise(0.01, 1, ranks) + noise(0.02), data=0.01 * np.abs(1 + noise(0.3)),
        temp=62 + noise(4, 1, ranks) + noise(0.7) + 2 * np.sin(np.arange(scrapes) / 25)[:, None],
        clock=1700 + noise(12, 1, ranks) + noise(12), again=np.zeros(scrapes),  # messages, in steps
        errors={ECC: draw.poisson(0.002, shape), SYMBOLS: draw.poisson(0.02, shape)})
    change(run, kind, draw, onset, rank)
    pauses(draw, run.factor)
    seconds = step * (run.factor * run.clock[:1].mean() / run.clock + run.data)
    counters = {name: np.cumsum(errors, axis=0).astype(float)
                for name, errors in run.errors.items()}
    if kind == "restart":
        for counter in counters.values():
            counter[onset:] -= counter[onset - 1]
        seconds[onset:onset + 2] *= 5
    power = (680 + noise(8, 1, ranks) + noise(6)) * (run.clock / 1700) ** 2
    metrics = {SECONDS: seconds, DATA: step * run.data, TEMP: run.temp.round(),
               CLOCK: run.clock.round(-1), POWER: power, **counters}
    for values in metrics.values():
        values[draw.random(shape) < 0.005] = np.nan
    metrics[MFU] = 0.45 * step / (np.nanmax(seconds, axis=1) + step * (0.1 + run.again))
    end = onset + 45 if kind == "dying memory" else scrapes  # then the GPU is lost, and the run
    first = rank // HOST * HOST
    sick = () if kind in HEALTHY else (rank,)
    sick = tuple(range(first, first + HOST)) if kind == "slow loader" else sick
    return Recording({name: values[:end] for name, values in metrics.items()}, kind, sick, onset)


def change(run, kind, draw, onset, rank):
    """Apply the fault of this kind to a run, in place: from `onset` on, on `rank` or its host."""
    scrapes, ranks = run.factor.shape
    host = slice(rank // HOST * HOST, rank // HOST * HOST + HOST)
    since = np.arange(scrapes)[:, None] - onset
    late = since >= 0
    if kind == "hot GPU":
        run.temp[:, [rank]] += late * (draw.uniform(83, 90) + 2 - run.temp[onset, rank]) * (
            1 - np.exp(-np.maximum(since, 0) / 8))
        run.clock[:, rank] *= 1 - np.clip(0.015 * (run.temp[:, rank] - 81), 0, 0.3)
    elif kind == "bad link":
        bursts = late[:, 0] * (draw.random(scrapes) < 0.5)
        run.errors[SYMBOLS][:, rank] += draw.poisson(draw.uniform(3, 30), scrapes) * bursts
        run.again = draw.uniform(0.2, 1.0) * bursts
    elif kind == "dying memory":
        rate = late * 0.5 * np.exp(np.minimum(since, 60) / 9)
        run.errors[ECC][:, rank] += draw.poisson(rate[:, 0])
    elif kind == "slow loader":
        jitter = np.abs(1 + 0.3 * draw.standard_normal((scrapes, HOST)))
        run.data[:, host] += late * draw.uniform(0.12, 0.4) * jitter
    elif kind == "slow host CPU":
        run.factor[:, [rank]] += late * draw.uniform(0.08, 0.3)
    elif kind == "imbalance":
        run.factor[:, -ranks // 4:] += draw.uniform(0.1, 0.35)
    elif kind == "slow start":
        run.factor[:int(draw.integers(8, 16)), rank] += draw.uniform(0.2, 0.8)
    elif kind == "neighbours":
        busy = late & (since < draw.integers(10, 16)) & (draw.random((scrapes, HOST)) < 0.25)
        run.factor[:, host] += busy * draw.uniform(0.15, 0.5, (scrapes, HOST))
    elif kind == "warm rack":
        run.temp[:, host] += late * 10 * np.exp(-((since - 25) / 15.0) ** 2)
    elif kind == "ECC once":
        run.errors[ECC][onset, rank] += int(draw.integers(4, 12))
    elif kind == "all slow":
        jitter = np.abs(1 + 0.2 * draw.standard_normal((scrapes, ranks)))
        run.data += late * draw.uniform(0.2, 0.6) * jitter


def pauses(draw, factor):
    """Add pauses to the step times, in place.

    In some scrapes all ranks save or evaluate; in some, a single rank collects garbage.
    factor: (scrapes, ranks)
    """
    scrapes, ranks = factor.shape
    for at in range(int(draw.integers(5, 20)), scrapes, int(draw.integers(15, 30))):
        factor[at] += draw.uniform(0.3, 2.0) * draw.uniform(0.8, 1.2, ranks)
    factor += (draw.random(factor.shape) < 0.004) * draw.uniform(0.3, 2.0, factor.shape)


def recordings(seeds):
    """Draw one Recording of each kind for each of these seeds."""
    return [record(kind, seed) for seed in seeds for kind in (*SICK, *HEALTHY)]
