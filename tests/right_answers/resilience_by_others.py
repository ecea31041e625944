"""Lab 14: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import copy
import hashlib
import math
import pickle
import random
import statistics
from collections import deque
import numpy as np
import torch
import torch.distributed as dist
from ranklab import device
from ranklab.baseline import random_state, set_random_state
from ranklab.ranks import shard_range
from ranklab.resilience import Health


def optimal_interval__daly(checkpoint_seconds, mean_seconds):
    """Daly's formula as the text prints it."""
    C, M = checkpoint_seconds, mean_seconds
    if not (C > 0 and M > 0):
        raise ValueError(f"{C} and {M} must be above 0")
    if C >= 2 * M:
        return M
    x = math.sqrt(C / (2 * M))
    return math.sqrt(2 * C * M) * (1 + x / 3 + x**2 / 9) - C


def optimal_interval__exact_best(checkpoint_seconds, mean_seconds):
    """The minimum itself: bisection of -log(1 - t) - t = C / M, with t = interval / M."""
    if min(checkpoint_seconds, mean_seconds) <= 0:
        raise ValueError("seconds must be above 0")
    ratio, low, high = checkpoint_seconds / mean_seconds, 0.0, 1.0
    for _ in range(200):
        t = (low + high) / 2
        if t < 1 and -math.log1p(-t) - t < ratio:
            low = t
        else:
            high = t
    return mean_seconds * high


def goodput__expm1(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """The expected seconds of an interval; infinite where a float ends."""
    if interval <= 0 or mean_seconds <= 0:
        raise ValueError("interval and mean_seconds must be above 0")
    M = mean_seconds
    try:
        seconds = M * math.exp(restart_seconds / M) * math.expm1(
            (interval + checkpoint_seconds) / M)
    except OverflowError:
        return 0.0
    return interval / seconds


def goodput__logarithms(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """Logarithms all the way, so nothing overflows."""
    if not (interval > 0 and mean_seconds > 0):
        raise ValueError(f"interval={interval} and mean={mean_seconds} must be above 0")
    x = (interval + checkpoint_seconds) / mean_seconds
    log_seconds = restart_seconds / mean_seconds + x + math.log(-math.expm1(-x))
    return math.exp(math.log(interval) - math.log(mean_seconds) - log_seconds)


def resume_exact__deep_copies(run, saved=None):
    """A dict of state_dicts, copied on both ways."""
    parts = {name: getattr(run, name) for name in ("model", "optimizer", "scheduler")}
    if saved is None:
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"order": run.loader.order, "position": run.loader.position,
                  "generator": run.loader.generator.get_state(), "steps": run.steps_done,
                  "python": random.getstate(), "numpy": np.random.get_state(),
                  "torch": random_state()}
        return copy.deepcopy(state)
    saved = copy.deepcopy(saved)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    run.loader.order, run.loader.position = saved["order"], saved["position"]
    run.loader.generator.set_state(saved["generator"])
    run.steps_done = saved["steps"]
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    set_random_state(saved["torch"])


def resume_exact__pickled(run, saved=None):
    """The result is bytes: everything is pickled at once."""
    if saved is None:
        loader = run.loader
        return pickle.dumps((
            [run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict()],
            [loader.order, loader.position, loader.generator.get_state()], run.steps_done,
            [random.getstate(), np.random.get_state(), random_state()]))
    states, (order, position, generator), steps_done, (python, numpy, of_torch) = pickle.loads(
        saved)
    for part, state in zip((run.model, run.optimizer, run.scheduler), states):
        part.load_state_dict(state)
    vars(run.loader).update(order=order, position=position)
    run.loader.generator.set_state(generator)
    run.steps_done = steps_done
    random.setstate(python)
    np.random.set_state(numpy)
    set_random_state(of_torch)


def elastic_batch__slices(batch, ranks, micro_batch):
    """Contiguous shares, cut into full micro-batches; the last ones may be empty."""
    if min(batch, ranks, micro_batch) < 1:
        raise ValueError("a number is below 1")
    count = math.ceil(math.ceil(batch / ranks) / micro_batch)
    plan = []
    for rank in range(ranks):
        mine = shard_range(batch, rank, ranks)
        cuts = [mine[i * micro_batch:(i + 1) * micro_batch] for i in range(count)]
        plan.append([(cut, len(cut) / batch) for cut in cuts])
    return plan


def elastic_batch__strided_and_even(batch, ranks, micro_batch):
    """Rank r has every ranks-th position; its micro-batches are as even as possible."""
    if not all(number >= 1 for number in (batch, ranks, micro_batch)):
        raise ValueError(f"{batch}, {ranks}, {micro_batch}: all must be 1 or more")
    shares = [range(rank, batch, ranks) for rank in range(ranks)]
    count = -(-len(shares[0]) // micro_batch)

    def cut(share, i):
        part = shard_range(len(share), i, count)
        return share[part.start:part.stop]

    return [[(cut(share, i), len(cut(share, i)) / batch) for i in range(count)]
            for share in shares]


def find_straggler__lower_median(seconds, threshold=1.2, recent=32):
    """numpy: the lower median by a sort; order by each rank's median ratio."""
    seconds = np.array(seconds, dtype=float)
    if seconds.ndim != 2 or not seconds.size:
        raise ValueError(f"seconds {seconds.shape} must be (steps, ranks)")
    last = seconds[-recent:]
    usual = np.sort(last, axis=1)[:, (last.shape[1] - 1) // 2]
    ratio = last / usual[:, None]
    slow = np.flatnonzero((ratio > threshold).mean(axis=0) > 0.5)
    return sorted(slow.tolist(), key=lambda rank: -np.median(ratio[:, rank]))


def find_straggler__loops(seconds, threshold=1.2, recent=32):
    """statistics.median_low in loops; order by the mean ratio of a rank's slow steps."""
    shape = np.shape(seconds)
    if len(shape) != 2 or 0 in shape:
        raise ValueError("seconds must have two dimensions and not be empty")
    rows = [[float(x) for x in row] for row in seconds][-recent:]
    ratios = {rank: [] for rank in range(shape[1])}
    for row in rows:
        usual = statistics.median_low(row)
        for rank, x in enumerate(row):
            if x > threshold * usual:
                ratios[rank].append(x / usual)
    slow = [rank for rank, above in ratios.items() if 2 * len(above) > len(rows)]
    slow.sort(key=lambda rank: statistics.fmean(ratios[rank]), reverse=True)
    return slow


def health_check__rounds(probe, group=None, slow=3.0):
    """Each link has a round: 0, 1, or 2 for the last link of an odd ring."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    links = R if R > 2 else R - 1
    right, seconds = probe.product()
    mine = [float(probe.memory() and right), seconds, 0.0, 0.0]
    for turn in range(3):
        for link in range(links):
            its_turn = 2 if link == links - 1 and links > 1 and links % 2 else link % 2
            if its_turn == turn and rank in (link, (link + 1) % R):
                side = 0 if rank == link else 1
                partner = (link + 1) % R if rank == link else link
                mine[2 + side] = probe.message(partner, group)
    mine = torch.tensor(mine, dtype=torch.float64, device=device())
    all_ = [torch.empty_like(mine) for _ in range(R)]
    dist.all_gather(all_, mine, group=group)
    table = [each.tolist() for each in all_]
    fastest = min(row[1] for row in table)
    times = [max(table[i][2], table[(i + 1) % R][3]) for i in range(links)]
    slow_links = [i for i in range(links) if times[i] > slow * min(times)]
    slow_ranks = [r for r in range(R) if table[r][1] > slow * fastest
                  or R > 2 and {r, (r - 1) % R} <= set(slow_links)]
    left = [(i, (i + 1) % R) for i in slow_links
            if not {i, (i + 1) % R} & set(slow_ranks)]
    return Health([r for r in range(R) if not table[r][0]], slow_ranks, left)


def health_check__both_ways(probe, group=None, slow=3.0):
    """Each rank sorts its own two links by parity; one gathered array in numpy."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    after, before = (rank + 1) % R, (rank - 1) % R
    product_right, product_seconds = probe.product()
    memory_right = probe.memory()
    own = {} if R == 1 else {rank: after, before: before}
    if R == 2:
        own = {0: 1 - rank}
    seconds = {}
    for link in sorted(own, key=lambda link: (link % 2, link)):
        seconds[link] = probe.message(own[link], group)
    numbers = torch.tensor([product_right and memory_right, product_seconds,
                            seconds.get(rank, 0.0), seconds.get(before, 0.0)],
                           dtype=torch.float64, device=device())
    gathered = torch.empty(4 * R, dtype=torch.float64, device=device())
    dist.all_gather_into_tensor(gathered, numbers, group=group)
    right, product, forward, backward = gathered.view(R, 4).cpu().numpy().T
    link = np.maximum(forward, np.roll(backward, -1))[:{1: 0, 2: 1}.get(R, R)]
    is_slow = link > slow * link.min() if len(link) else np.zeros(0, bool)
    rank_slow = product > slow * product.min()
    if R > 2:
        rank_slow |= is_slow & np.roll(is_slow, 1)
    links = [(i, (i + 1) % R) for i in np.flatnonzero(is_slow).tolist()
             if not (rank_slow[i] or rank_slow[(i + 1) % R])]
    return Health(np.flatnonzero(right == 0).tolist(), np.flatnonzero(rank_slow).tolist(), links)


def _bytes_of(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def silent_corruption__blake2b(parameters, group=None):
    """8 bytes of BLAKE2 for each parameter."""
    R = dist.get_world_size(group)
    digests = [int.from_bytes(hashlib.blake2b(_bytes_of(p).numpy().tobytes(), digest_size=8)
                              .digest(), "little", signed=True) for p in parameters.values()]
    mine = torch.tensor(digests, dtype=torch.int64, device=device())
    all_ = [torch.empty_like(mine) for _ in range(R)]
    dist.all_gather(all_, mine, group=group)
    found = {}
    for name, *each in zip(parameters, *(one.tolist() for one in all_)):
        if len(set(each)) > 1:
            common = statistics.mode(each)
            has_majority = each.count(common) > R / 2
            found[name] = [r for r in range(R) if has_majority and each[r] != common]
    return found


def silent_corruption__odd_multipliers(parameters, group=None):
    """A sum of bytes times random odd numbers, modulo 2^64, all in torch."""
    R, sums = dist.get_world_size(group), []
    for p in parameters.values():
        data = _bytes_of(p).long()
        generator = torch.Generator().manual_seed(1)
        odd = torch.randint(-2**62, 2**62, data.shape, generator=generator) * 2 + 1
        sums.append((data * odd).sum())
    mine = torch.stack(sums).to(device()) if sums else torch.zeros(0, dtype=torch.int64)
    if not sums:
        return {}
    table = torch.empty(R * len(sums), dtype=torch.int64, device=device())
    dist.all_gather_into_tensor(table, mine, group=group)
    table = table.view(R, -1)
    votes = (table[:, None] == table[None]).sum(1)  # of each rank, for each parameter
    found = {}
    for i, name in enumerate(parameters):
        if (votes[:, i] < R).any():
            minority = (votes[:, i] * 2 <= R).nonzero().flatten().tolist()
            found[name] = minority if len(minority) < R else []
    return found


def loss_spike__median_deviation(losses, window=64, limit=6.0, patience=3):
    """Median and 1.4826 times the median deviation of the losses before a row of spikes."""
    row = 0
    for i, loss in enumerate(losses):
        usual = [x for x in losses[max(0, i - row - window):i - row] if math.isfinite(x)]
        is_good = math.isfinite(loss)
        if is_good and i >= 20 and usual:
            middle = statistics.median(usual)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in usual)
            is_good = loss <= middle + max(limit * spread, 0.01 * abs(middle))
        row = 0 if is_good else row + 1
    return "go on" if row == 0 else "skip" if row < patience else "roll back"


def loss_spike__quartiles_of_good_ones(losses, window=64, limit=6.0, patience=3):
    """Keeps the last good losses; their quartiles lie 1.349 deviations apart in a normal."""
    good, bad_in_a_row = deque(maxlen=window), 0
    for i, loss in enumerate(losses):
        far = False
        if i >= 20 and len(good) > 1:  # np.percentile takes five times as long
            low, middle, high = statistics.quantiles(good, n=4, method="inclusive")
            far = loss - middle > max(limit * (high - low) / 1.349, abs(middle) / 100)
        if far or not np.isfinite(loss):
            bad_in_a_row += 1
        else:
            bad_in_a_row = 0
            good.append(loss)
    if bad_in_a_row == 0:
        return "go on"
    return "roll back" if bad_in_a_row >= patience else "skip"
