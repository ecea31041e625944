"""Lab 14: right answers of another kind."""

import copy
import hashlib
import io
import math
import os
import pickle
import random
import tempfile
import zlib
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist

from ranklab.engine import device
from ranklab.resilience import Health, poisson_tail


def atomic_save__bytes_first_and_dot_tmp(state, path):
    path = os.path.abspath(path)
    buffer = io.BytesIO()
    torch.save(state, buffer)  # what can't be pickled raises before a file is there
    part = path + ".tmp"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = buffer.getbuffer()
            while view:
                view = view[os.write(descriptor, view):]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, path)
    except OSError:
        os.unlink(part)
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def atomic_save__random_names_and_a_broom(state, path):
    folder, name = os.path.split(os.path.abspath(path))
    mark = f".{name}.part-"
    for old in os.listdir(folder):
        if old.startswith(mark):
            os.remove(os.path.join(folder, old))
    descriptor, part = tempfile.mkstemp(prefix=mark, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            pickled = io.BytesIO()
            torch.save(state, pickled)
            file.write(pickled.getvalue())
            file.flush()
            os.fsync(file)
        os.replace(part, path)
    except BaseException:
        os.remove(part)
        raise
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(place)
    os.close(place)


def resume_exact__pickled_bytes(run, saved=None):
    if saved is None:
        return pickle.dumps((
            run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict(),
            run.loader.order, run.loader.position, run.loader.generator.get_state(),
            run.steps_done, random.getstate(), np.random.get_state(), torch.get_rng_state()))
    (model, optimizer, scheduler, run.loader.order, run.loader.position, drawn, run.steps_done,
     pythons, numpys, torchs) = pickle.loads(saved)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.scheduler.load_state_dict(scheduler)
    run.loader.generator.set_state(drawn)
    random.setstate(pythons)
    np.random.set_state(numpys)
    torch.set_rng_state(torchs)


def resume_exact__vars_of_the_loader(run, saved=None):
    if saved is None:
        loader = {k: v for k, v in vars(run.loader).items() if k != "generator"}
        return copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict(),
                              run.scheduler.state_dict(), run.steps_done, loader,
                              run.loader.generator.get_state(), random.getstate(),
                              np.random.get_state(), torch.random.get_rng_state()])
    m, o, s, steps, loader, drawn, p, n, t = copy.deepcopy(saved)
    run.model.load_state_dict(m)
    run.optimizer.load_state_dict(o)
    run.scheduler.load_state_dict(s)
    run.steps_done = steps
    vars(run.loader).update(loader)
    run.loader.generator = torch.Generator()
    run.loader.generator.set_state(drawn)
    random.setstate(p)
    np.random.set_state(n)
    torch.random.set_rng_state(t)


def resume_exact__one_part_after_the_other(run, saved=None):
    """A dictionary of bytes, each made by torch.save; parts are put back in another order."""
    def frozen(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    def thawed(name):
        return torch.load(io.BytesIO(saved[name]), weights_only=False)

    parts = {"schedule": run.scheduler, "adam": run.optimizer, "net": run.model}
    if saved is None:
        kept = {name: frozen(part.state_dict()) for name, part in parts.items()}
        kept["loader"] = frozen([run.loader.position, list(run.loader.order),
                                 run.loader.generator.get_state()])
        kept["steps"], kept["libraries"] = frozen(run.steps_done), frozen(
            [random.getstate(), np.random.get_state(), torch.get_rng_state()])
        return kept
    run.loader.position, run.loader.order, drawn = thawed("loader")
    run.loader.generator.set_state(drawn)
    run.steps_done = thawed("steps")
    for name, part in parts.items():
        part.load_state_dict(thawed(name))
    for put_back, state in zip((random.setstate, np.random.set_state, torch.set_rng_state),
                               thawed("libraries")):
        put_back(state)


def elastic_batch__full_ones_first_and_dealt(batch, ranks, micro_batch):
    if batch < 1 or ranks < 1 or micro_batch < 1:
        raise ValueError("1 or more")
    times = math.ceil(math.ceil(batch / ranks) / micro_batch)
    plan = []
    for rank in range(ranks):
        mine = range(rank, batch, ranks)  # dealt like cards
        parts = [mine[i * micro_batch:(i + 1) * micro_batch] for i in range(times)]
        plan.append([(part, len(part) / batch) for part in parts])
    return plan


def elastic_batch__cut_at_rounded_shares(batch, ranks, micro_batch):
    """Both cuts are at round numbers of equal shares: the longer parts lie anywhere."""
    if not all(n >= 1 for n in (batch, ranks, micro_batch)):
        raise ValueError("numbers below 1")

    def cuts(start, stop, parts):
        ends = [start + (stop - start) * i // parts for i in range(parts + 1)]
        return [range(a, b) for a, b in zip(ends, ends[1:])]

    shares = cuts(0, batch, ranks)
    times = math.ceil(max(map(len, shares)) / micro_batch)
    return tuple(tuple((part, len(part) / batch) for part in cuts(share.start, share.stop, times))
                 for share in shares)


def elastic_batch__one_position_at_a_time(batch, ranks, micro_batch):
    """Hands out positions from the back, and closes a micro-batch when it is full."""
    if min(batch, ranks, micro_batch) <= 0:
        raise ValueError("0 or less")
    most = -(-batch // ranks)
    plan = [[] for _ in range(ranks)]
    for rank in reversed(range(ranks)):
        stop = batch - sum(len(part) for own in plan for part, _ in own)
        start = stop - (batch + ranks - 1 - rank) // ranks
        while len(plan[rank]) < -(-most // micro_batch):
            part = range(max(start, stop - micro_batch), stop)
            stop = part.start
            plan[rank].append((part, len(part) * batch**-1))
    return plan


def find_straggler__by_counting_steps(seconds, threshold=1.2, recent=32):
    if seconds.ndim != 2 or 0 in seconds.shape:
        raise ValueError("(steps, ranks)")
    rows = seconds[-recent:].tolist()
    slow = {}
    for rank in range(len(rows[0])):
        ratios = [row[rank] / sorted(row)[(len(row) - 1) // 2] for row in rows]
        if sum(r > threshold for r in ratios) > len(ratios) / 2:
            slow[rank] = sorted(ratios)[len(ratios) // 2]
    return sorted(slow, key=slow.get, reverse=True)


def find_straggler__by_quantiles(seconds, threshold=1.2, recent=32):
    if seconds.dim() != 2 or not seconds.numel():
        raise ValueError("(steps, ranks)")
    last = seconds.double()[-recent:]
    ratio = last / last.quantile(0.5, dim=1, keepdim=True, interpolation="lower")
    typical = ratio.quantile(0.5, dim=0, interpolation="lower")
    return [r for r in typical.argsort(descending=True).tolist() if typical[r] > threshold]


def find_straggler__sorted_in_numpy(seconds, threshold=1.2, recent=32):
    """Places of sorted arrays for medians; pairs (slowness, rank) for the order."""
    if len(seconds.shape) != 2 or min(seconds.shape) == 0:
        raise ValueError(f"seconds of shape {tuple(seconds.shape)}")
    last = seconds.numpy()[-recent:]
    steps, ranks = last.shape
    times = last / np.sort(last, axis=1)[:, (ranks - 1) // 2, None]
    middle = np.sort(times, axis=0)[(steps - 1) // 2]
    pairs = sorted(((m, rank) for rank, m in enumerate(middle) if m > threshold), reverse=True)
    return [rank for _, rank in pairs]


def health_check__odd_ranks_answer(probe, group=None, slow=3.0):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    ok, product = probe.product()
    ok = probe.memory() and ok
    to, of = 0.0, 0.0
    rounds = [[(a, a + 1) for a in range(first, R - 1, 2)] for first in (0, 1)]
    if R > 2:
        rounds.append([(R - 1, 0)])
    for links in rounds:
        for a, b in links:
            if rank == a:
                to = probe.message(b, group)
            elif rank == b:
                of = probe.message(a, group)
    table = [torch.zeros(4, dtype=torch.float64, device=device()) for _ in range(R)]
    dist.all_gather(table, torch.tensor([float(ok), product, to, of], dtype=torch.float64,
                                        device=device()), group=group)
    table = [row.tolist() for row in table]
    count = 0 if R == 1 else 1 if R == 2 else R
    seconds = [max(table[a][2], table[(a + 1) % R][3]) for a in range(count)]
    bad = [a for a in range(count) if seconds[a] > slow * min(seconds)]
    cards = [r for r in range(R) if R > 2 and r in bad and (r - 1) % R in bad]
    fastest = min(row[1] for row in table)
    return Health(
        wrong=[r for r in range(R) if table[r][0] != 1],
        slow=sorted({*cards, *(r for r in range(R) if table[r][1] > slow * fastest)}),
        links=[(a, (a + 1) % R) for a in bad if a not in cards and (a + 1) % R not in cards])


def health_check__colours(probe, group=None, slow=3.0):
    """Three turns: even links, odd ones, and the last link of an odd ring; a table of doubles that
    each rank fills for itself and all sum up.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    links = [] if R == 1 else [(0, 1)] if R == 2 else [(a, (a + 1) % R) for a in range(R)]
    colour = {link: 2 if R % 2 and link[0] == R - 1 else link[0] % 2 for link in links}
    correct, seconds = probe.product()
    intact = probe.memory()
    own = torch.zeros(4, dtype=torch.float64)
    own[0], own[1] = float(correct and intact), seconds
    for turn in range(3):
        for number, link in enumerate(links):
            if colour[link] == turn and rank in link:
                own[2 + (rank != link[0])] = probe.message(link[rank == link[0]], group)
    table = torch.zeros(R * 4, dtype=torch.float64, device=device())
    dist.all_gather(list(table.split(4)), own.to(device()), group=group)
    table = table.view(R, 4).cpu().numpy()
    taken = {link: max(table[link[0], 2], table[link[1], 3]) for link in links}
    bad = {link for link in links if taken[link] > slow * min(taken.values())}
    cards = {r for r in range(R) if R > 2 and sum(r in link for link in bad) == 2}
    late = {r for r in range(R) if table[r, 1] > slow * table[:, 1].min()}
    return Health([r for r in range(R) if not table[r, 0]], sorted(cards | late),
                  [link for link in links if link in bad and not cards & {*link}])


def silent_corruption__sha_and_into_one_tensor(parameters, group=None):
    R = dist.get_world_size(group)
    mine = torch.zeros(len(parameters), dtype=torch.int64)
    for i, p in enumerate(parameters.values()):
        raw = p.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        mine[i] = int.from_bytes(hashlib.sha256(raw).digest()[:7], "little")
    mine = mine.to(device())
    table = torch.zeros(R * len(parameters), dtype=torch.int64, device=device())
    dist.all_gather_into_tensor(table, mine, group=group)
    found = {}
    for name, row in zip(parameters, table.view(R, -1).T.tolist()):
        counts = Counter(row)
        if len(counts) > 1:
            best = max(counts, key=counts.get)
            found[name] = [i for i in range(R) if row[i] != best] if counts[best] > R / 2 else []
    return found


def silent_corruption__crc_and_adler(parameters, group=None):
    """Two checksums of 4 bytes side by side; one row of all_gather's list for each rank."""
    marks = []
    for p in parameters.values():
        p = p.detach().cpu().clone(memory_format=torch.contiguous_format)
        raw = p.flatten().view(torch.uint8).numpy().tobytes()
        marks.append(zlib.crc32(raw) << 31 | zlib.adler32(raw[::-1]) >> 1)
    rows = list(torch.empty(dist.get_world_size(group), len(marks), dtype=torch.int64,
                            device=device()).unbind())
    dist.all_gather(rows, torch.tensor(marks, device=device()), group=group)
    ranks, corrupt = range(len(rows)), {}
    for name, column in zip(parameters, torch.stack(rows).T.cpu().numpy()):
        alike = (column[:, None] == column).sum(axis=1)
        if alike.min() < len(column):
            usual = alike > len(column) / 2
            corrupt[name] = [r for r in ranks if not usual[r]] if usual.any() else []
    return corrupt


def loss_spike__in_torch(losses, window=64, limit=6.0, patience=3):
    """Tensors, whose medians are the lower ones; counts the bad losses from the end."""
    x = torch.tensor(losses, dtype=torch.float64)
    bad = ~x.isfinite()
    before = x[:-patience][-window:]
    before = before[before.isfinite()]
    if len(x) > 20 and len(before):
        middle = before.median()
        spread = 1.4826 * (before - middle).abs().median()
        bad |= x - middle > torch.maximum(limit * spread, middle.abs() / 100)
    in_a_row = 0
    while in_a_row < len(x) and bad[-1 - in_a_row]:
        in_a_row += 1
    return ("go on", "skip", "roll back")[(in_a_row > 0) + (in_a_row >= patience)]


def loss_spike__by_sorting(losses, window=64, limit=6.0, patience=3):
    """Counts how many of the distances are below a sixth of the rise, instead of a median."""
    usual = sorted(x for x in losses[-window - patience:-patience] if math.isfinite(x))
    middle = usual[len(usual) // 2] if usual else 0.0

    def is_bad(x):
        if not math.isfinite(x) or not usual or len(losses) <= 20:
            return not math.isfinite(x)
        near = sum(abs(y - middle) * 1.4826 * limit < x - middle for y in usual)
        return x > middle and near > len(usual) / 2 and x - middle > abs(middle) * 0.01

    last = [is_bad(x) for x in losses[-patience:]]
    if last[-1]:
        return "roll back" if last == [True] * patience else "skip"
    return "go on"


def loss_spike__by_quartiles(losses, window=64, limit=6.0, patience=3):
    def is_bad(x):
        if not math.isfinite(x):
            return True
        before = [y for y in losses[-window - patience:-patience] if math.isfinite(y)]
        if len(losses) <= 20 or len(before) < 8:
            return False
        low, middle, high = np.quantile(before, (0.25, 0.5, 0.75))
        return bool(x > middle + max(limit * (high - low) / 1.349, 0.01 * abs(middle)))

    if not is_bad(losses[-1]):
        return "go on"
    last = losses[-patience:]
    return "roll back" if len(last) == patience and all(map(is_bad, last)) else "skip"


class PackedStream__walks_along_the_lengths:
    """The state is the tokens that are used up; documents are passed one by one, unread."""

    def __init__(self, documents, window, batch, seed=0, rank=0, ranks=1):
        self.docs, self.T, self.B, self.seed = documents, window, batch, seed
        self.rank, self.ranks, self.used = rank, ranks, 0

    def pieces(self, place):
        """Yield (document, first token, place in the stream) from `place` on, without an end."""
        epoch, skip = divmod(place, sum(self.docs.lengths))
        while True:
            generator = torch.Generator()
            generator.manual_seed(self.seed + epoch)
            for i in torch.randperm(len(self.docs), generator=generator):
                n = self.docs.lengths[i]
                if skip < n:
                    yield int(i), skip, place
                    place += n - skip
                skip = max(0, skip - n)
            epoch += 1

    def next(self):
        rows = torch.full((self.B, self.T), -1)
        flat, mine = rows.view(-1), [k for k in range(self.B) if k % self.ranks == self.rank]
        for i, first, place in self.pieces(self.used):
            begin = place - self.used
            if begin >= len(flat):
                break
            stop = min(begin + self.docs.lengths[i] - first, len(flat))
            if any(begin < (k + 1) * self.T and k * self.T < stop for k in mine):
                flat[begin:stop] = self.docs[i][first:first + stop - begin]
        self.used += len(flat)
        return rows[mine]

    def state_dict(self):
        return {"tokens": self.used}

    def load_state_dict(self, state):
        self.used = state["tokens"]


class PackedStream__every_token_looked_up:
    """Which document and which of its tokens: for all places of a share at once, by NumPy."""

    def __init__(self, documents, window, batch, seed=0, rank=0, ranks=1):
        self.documents, self.window, self.batch, self.seed = documents, window, batch, seed
        self.shares, self.rank = np.array_split(np.arange(batch), ranks), rank
        self.lengths, self.state = np.array(documents.lengths), [0, 0]  # epoch, its token

    def next(self):
        total = self.lengths.sum()
        whole = np.arange(self.batch * self.window) + self.state[1]
        places = whole.reshape(self.batch, -1)[self.shares[self.rank]]
        tokens = np.empty_like(places)
        for later in np.unique(places // total):
            random = torch.Generator().manual_seed(int(self.state[0] + later) + self.seed)
            order = torch.randperm(len(self.lengths), generator=random).numpy()
            ends = self.lengths[order].cumsum()
            here = places // total == later
            at = places[here] - later * total
            of = np.searchsorted(ends, at, side="right")
            values = np.empty_like(at)
            for place in np.unique(of):
                text = self.documents[int(order[place])].numpy()
                begin = ends[place] - len(text)
                values[of == place] = text[at[of == place] - begin]
            tokens[here] = values
        epochs, self.state[1] = divmod(int(whole[-1]) + 1, int(total))
        self.state[0] += epochs
        return torch.from_numpy(tokens)

    def state_dict(self):
        return {"epoch": self.state[0], "token": self.state[1]}

    def load_state_dict(self, state):
        self.state = [state["epoch"], state["token"]]


class PackedStream__two_cursors:
    """A cursor (epoch, document, token) that moves on; a rank reads where its windows are."""

    def __init__(self, documents, window, batch, seed=0, rank=0, ranks=1):
        self.documents, self.window, self.batch, self.seed = documents, window, batch, seed
        self.rank, self.ranks = rank, ranks
        self.load_state_dict({"cursor": [0, 0, 0]})

    def load_state_dict(self, state):
        self.epoch, self.place, self.token = state["cursor"]
        self.reorder()

    def state_dict(self):
        return {"cursor": [self.epoch, self.place, self.token]}

    def reorder(self):
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        self.order = torch.randperm(len(self.documents), generator=random)

    def next(self):
        own = [self.walk(number * self.ranks // self.batch == self.rank)
               for number in range(self.batch)]
        return torch.stack([row for row in own if row is not None])

    def walk(self, is_own):
        """Move the cursor by a window; its tokens where it is this rank's."""
        parts, missing = [], self.window
        while missing:
            number = int(self.order[self.place])
            count = min(missing, self.documents.lengths[number] - self.token)
            if is_own and count:
                parts.append(self.documents[number][self.token:self.token + count])
            missing -= count
            self.token += count
            if self.token == self.documents.lengths[number]:
                self.place, self.token = self.place + 1, 0
            if self.place == len(self.order):
                self.epoch, self.place = self.epoch + 1, 0
                self.reorder()
        return torch.cat(parts) if is_own else None


def lemon_nodes__one_at_a_time(log, false_alarms=0.05):
    """The most significant node is taken out, then all others are judged anew."""
    days, failures = {}, {}
    for nodes, length, failed in log:
        for node in nodes:
            days[node] = days.get(node, 0) + length
            failures[node] = failures.get(node, 0) + (node == failed)
    limit, lemons = false_alarms / len(days), []
    if not 0 < limit < 0.5:
        raise ValueError("false_alarms")
    while True:
        rest = [node for node in days if node not in lemons]
        rate = math.fsum(failures[n] for n in rest) / math.fsum(days[n] for n in rest)
        worst = min(rest, key=lambda n: poisson_tail(failures[n], rate * days[n]))
        if poisson_tail(failures[worst], rate * days[worst]) >= limit:
            return sorted(lemons)
        lemons.append(worst)


def lemon_nodes__by_the_gamma_function(log, false_alarms=0.05):
    """P(at least k) is the regularised incomplete gamma function of k; all nodes in one tensor."""
    names = sorted({node for job in log for node in job.nodes})
    place = {name: i for i, name in enumerate(names)}
    if false_alarms <= 0 or 2 * false_alarms >= len(names):
        raise ValueError("false_alarms")
    days, counts = torch.zeros(2, len(names), dtype=torch.float64)
    for job in log:
        days[[place[node] for node in job.nodes]] += job.days
        if job.failed:
            counts[place[job.failed]] += 1
    named = torch.zeros(len(names), dtype=torch.bool)
    for _ in names:
        mean = counts[~named].sum() / days[~named].sum() * days
        chance = torch.where(counts > 0, torch.special.gammainc(counts.clamp(min=1), mean), 1.0)
        named = chance < false_alarms / len(names)
    return [name for name, is_lemon in zip(names, named.tolist()) if is_lemon]
