"""Lab 15: right answers that were written from the lab's text alone."""

import re

import numpy as np

from ranklab.cluster.acceptance import ROW, Suspects
from ranklab.cluster.recordings import CLOCK, DATA, ECC, SECONDS, SYMBOLS


TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"


POWER = "DCGM_FI_DEV_POWER_USAGE"


def filled(values):
    """Values (scrapes, ranks): where a scrape failed, the sample before it, or the first after."""
    at = np.where(np.isnan(values), 0, np.arange(len(values))[:, None])
    values = np.take_along_axis(values, np.maximum.accumulate(at, axis=0), axis=0)
    first = values[np.minimum(np.isnan(values).sum(0), len(values) - 1), np.arange(values.shape[1])]
    return np.nan_to_num(np.where(np.isnan(values), first, values))


def growth(counter):
    """Errors that came between scrapes, (scrapes - 1, ranks); a new start counts as none."""
    return np.clip(np.diff(filled(counter), axis=0), 0, None)


def sick_rank_alarm__limits(metrics):
    """A limit for each symptom, on medians of the last scrapes against the rank's own past."""
    n, ranks = metrics[SECONDS].shape
    if n < 20:
        return None
    for name, least in ((SYMBOLS, 10), (ECC, 4)):
        came = growth(metrics[name][-8:])[-6:]
        ill = ((came > 0).sum(0) >= 3) & (came.sum(0) >= least)
        if ill.any():
            return int((came.sum(0) * ill).argmax())

    def by_host(name):
        return filled(metrics[name]).reshape(n, -1, 8)

    warm = by_host(TEMPERATURE)
    warm = (warm - np.median(warm, axis=2, keepdims=True)).reshape(n, ranks)
    warmer = np.median(warm[-3:], axis=0) - np.median(warm[3:-8], axis=0)
    if warmer.max() > 5:
        return int(warmer.argmax())
    waits = np.median(by_host(DATA), axis=2)
    waits /= np.stack([np.median(np.delete(waits, host, axis=1), axis=1)
                       for host in range(ranks // 8)], axis=1)
    more = waits[-4:].min(axis=0) / np.median(waits[3:-8], axis=0)
    if more.max() > 3:
        return int(8 * more.argmax())
    slow = by_host(SECONDS)
    slow = (slow / np.median(slow, axis=2, keepdims=True)).reshape(n, ranks)
    slow -= np.median(slow[3:-8], axis=0)
    z = np.sort(slow[-8:] / (1.48 * np.median(np.abs(slow[3:-8]))), axis=0)
    low, middle = z[1], z[4]
    worst = low.argmax()
    if n >= 30 and low[worst] > 1.8 and middle[worst] > 2.5:  # not a slow start
        return int(worst)
    return None


def sick_rank_alarm__sums(metrics):
    """Cumulative sums (CUSUM) of each metric's standardized excess, from the first scrape on."""
    n, ranks = metrics[SECONDS].shape
    if n < 18:
        return None

    def apart(name, groups):
        values = filled(metrics[name]).reshape(n, groups, -1)
        rest = (values - np.median(values, axis=2, keepdims=True)).reshape(n, ranks)
        rest -= np.median(rest[4:18], axis=0)
        return rest / (1.48 * np.median(np.abs(rest[4:18])) + 1e-9)

    def summed(excess, slack, most):
        total = np.cumsum(np.clip(excess[14:], -most, most) - slack, axis=0)
        return total[-1] - np.minimum(total.min(axis=0), 0)

    waits = np.median(filled(metrics[DATA]).reshape(n, -1, 8), axis=2)
    others = np.stack([np.median(np.delete(waits, host, axis=1), axis=1)
                       for host in range(ranks // 8)], axis=1)
    ratio = np.log2(np.maximum(waits, 1e-6) / np.maximum(others, 1e-6))
    ratio -= np.median(ratio[4:18], axis=0)
    sums = [summed(growth(metrics[SYMBOLS]), 0.5, 6) / 13,
            summed(growth(metrics[ECC]), 0.2, 2) / 4.5,
            summed(apart(TEMPERATURE, ranks // 8), 3, 12) / 16,
            summed(apart(SECONDS, 1), 2, 4.5) / 16,
            np.repeat(summed(ratio, 0.6, 3) / 3, 8)]
    highest = np.max(sums, axis=0)
    return int(highest.argmax()) if highest.max() > 1 else None


def sick_rank_alarm__votes(metrics):
    """Each scrape votes for the rank that leads its peers; a rank that keeps leading is sick."""
    n, ranks = metrics[SECONDS].shape
    if n < 30:
        return None

    def beyond(name, sign=1):
        values = sign * filled(metrics[name]).reshape(n, -1, 8)
        values = (values - np.median(values, axis=2, keepdims=True)).reshape(n, ranks)
        middle, high = np.quantile(values[3:-6], (0.5, 0.9), axis=0)
        return (values[-6:] - middle) / (high - middle).mean()

    def votes(excess, limit):
        clear = excess.max(axis=1) > limit
        return np.bincount(excess.argmax(axis=1)[clear], minlength=ranks)

    waits = np.median(filled(metrics[DATA]).reshape(n, -1, 8), axis=2)
    lead = np.stack([waits[:, host] / np.median(np.delete(waits, host, axis=1), axis=1)
                     for host in range(ranks // 8)], axis=1)
    lead /= np.quantile(lead[3:-6], 0.9, axis=0)
    heat = votes(beyond(TEMPERATURE), 5.0)
    cold = votes(beyond(CLOCK, -1), 1.5) + votes(beyond(POWER, -1), 1.5)
    elections = [(votes(beyond(SECONDS), 1.8), 5), (heat, 4), (heat + cold, 8),
                 (votes(np.repeat(lead, 8, axis=1), 2.0), 3)]
    for name, least, seats in ((SYMBOLS, 3, 4), (ECC, 1, 4)):
        came = growth(metrics[name])[-8:]
        elections.append((((came >= least) & (came.sum(0) > 4 * least)).sum(0), seats))
    for ballots, seats in elections:
        if ballots.max() >= seats:
            return int(ballots.argmax())
    return None


def pair_rounds__clock(nodes):
    """Seats on a clock: in round r seat r faces the centre, and the others their mirror image."""
    seats = list(nodes)
    if len(seats) % 2:
        seats.append(None)
    if not seats:
        return []
    centre, circle, rounds = seats[-1], seats[:-1], []
    for r in range(len(circle)):
        pairs = [(circle[r], centre)]
        for step in range(1, len(circle) // 2 + 1):
            pairs.append((circle[(r + step) % len(circle)], circle[(r - step) % len(circle)]))
        pairs = [pair for pair in pairs if None not in pair]
        if pairs:
            rounds.append(pairs)
    return rounds


def suspect_parts__tallies(outputs, block_of, share=0.9):
    """Count slow and all pairs of each node, then of each block."""
    rates = {}
    for pair, text in outputs.items():
        best, rates[pair] = -1, 0.0
        for row in re.finditer(ROW, text):
            if int(row["size"]) > best:
                best, rates[pair] = int(row["size"]), float(row["busbw"])
        if any(row["wrong"] not in ("0", "N/A") for row in re.finditer(ROW, text)):
            rates[pair] = 0.0
    half = len(rates) // 2
    order = sorted(rates.values())
    median = order[half] if len(order) % 2 else (order[half - 1] + order[half]) / 2
    is_slow = {pair: rate < share * median for pair, rate in rates.items()}

    def all_slow(keys_of, pairs):
        tally = {}
        for pair in pairs:
            for key in keys_of(pair):
                tally.setdefault(key, []).append(is_slow[pair])
        return sorted(key for key, each in tally.items() if all(each))

    nodes = all_slow(lambda pair: pair, outputs)
    rest = [(a, b) for a, b in outputs if a not in nodes and b not in nodes]
    crossing = [(a, b) for a, b in rest if block_of[a] != block_of[b]]
    blocks = all_slow(lambda pair: [block_of[node] for node in pair], crossing)
    pairs = sorted(pair for pair in rest if is_slow[pair] and not (
        pair in crossing and any(block_of[node] in blocks for node in pair)))
    return Suspects(nodes, blocks, pairs)
