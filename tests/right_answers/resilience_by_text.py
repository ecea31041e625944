"""Lab 14: right answers that were written from the lab's text alone."""

import contextlib
import io
import math
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from ranklab.resilience import Decision


def atomic_save__fixed_name(state, path):
    """One fixed hidden name beside the file, opened anew by each save, synced and renamed."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.saving")
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def atomic_save__unnamed(state, path):
    """A file without a name (O_TMPFILE): the system drops it if we die; linked, then renamed."""
    path = Path(path).absolute()
    beside = path.with_name(f".{path.name}.linked")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with open(os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            beside.unlink(missing_ok=True)  # of a save that was killed right here
            # dst_dir_fd: without it Python calls link(), which does not follow /proc's link
            os.link(f"/proc/self/fd/{file.fileno()}", beside, dst_dir_fd=folder)
        try:
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


def atomic_save__descriptor(state, path):
    """The folder is opened once; all names are relative to its descriptor (dir_fd)."""
    folder, name = os.path.split(os.fspath(path))
    beside = f".{name}.saving"
    folder = os.open(folder or os.curdir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(os.open(beside, flags, 0o666, dir_fd=folder), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=folder)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


def atomic_save__random_name(state, path):
    """Pickled in memory; os.write to a random name beside the file; old random names are swept."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    folder, name = os.path.split(os.fspath(path))
    folder = folder or os.curdir
    ours = re.compile(re.escape(f".{name}.") + r"[a-z0-9_]{8}\.part")
    for entry in os.listdir(folder):
        if ours.fullmatch(entry):
            os.unlink(os.path.join(folder, entry))
    number, temporary = tempfile.mkstemp(".part", f".{name}.", folder)
    try:
        try:
            left = buffer.getbuffer()
            while left:
                left = left[os.write(number, left):]
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(number, 0o666 & ~mask)
            os.fsync(number)
        finally:
            os.close(number)
        os.rename(temporary, os.path.join(folder, name))
    except BaseException:
        os.unlink(temporary)
        raise
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def recovery_policy__rules(state):
    """Thresholds: wait for short absences, save on warnings, grow if it pays; Poisson spares."""
    job, now = state.job, state.now
    mean = (3 * job.mean_seconds + now) / (3 + len(state.failures))
    recent = [t for t in state.failures if t > now - 4 * job.mean_seconds]
    if len(recent) > 8:  # a burst, or more failures than promised
        mean = min(mean, (now - recent[-8]) / 8 + 60)
    C, x = job.checkpoint_seconds, math.sqrt(job.checkpoint_seconds / (2 * mean))
    interval = math.sqrt(2 * C * mean) * (1 + x / 3 + x * x / 9) - C if C < 2 * mean else mean
    away = job.broken * job.repair_seconds + (1 - job.broken) * job.reboot_seconds

    def share(spares, down):
        weight, total = math.exp(-down), 0.0
        for k in range(int(down + 12 * math.sqrt(down) + 20)):
            room = min(job.nodes, job.nodes + spares - k) // job.replica * job.replica
            total += weight * max(room, 0)
            weight *= down / (k + 1)
        return total / (job.nodes + spares)

    spares = 0
    if state.event == "start":
        spares = max(range(job.most_spares + 1), key=lambda s: sum(
            chance * share(s, rate * away / job.mean_seconds)
            for rate, chance in ((1, 0.7), (4, 0.2), (9, 0.1))))
        if job.nodes >= 100:  # there a spare costs little
            spares = min(spares + 2, job.most_spares)

    def whole(up):
        return min(up, job.nodes) // job.replica * job.replica

    nodes = whole(state.up)
    save = False
    if state.running:
        if state.event == "warning":
            return Decision(state.running, interval, spares, state.unsaved > 3 * C)
        grown = job.restart_seconds + job.reshard_seconds + C
        if nodes <= state.running or (nodes - state.running) * mean < 2 * nodes * grown:
            nodes = state.running
        else:
            save = state.unsaved > C
        return Decision(nodes, interval, spares, save)
    if nodes < job.nodes:
        for i, seconds in enumerate(sorted(state.back)):
            more = whole(state.up + i + 1)
            if more > nodes and (more - nodes) * mean > more * seconds and (
                    seconds < job.restart_seconds + job.reshard_seconds):
                return Decision(0, interval, spares, False)
            if not nodes:
                return Decision(0, interval, spares, False)
    return Decision(nodes, interval, spares, save)


def recovery_policy__values(state):
    """Each action's useful work minus the price of its time; the largest difference wins."""
    job, now, times = state.job, state.now, state.failures
    hazard = (2 + len(times)) / (2 * job.mean_seconds + now)
    for k in (4, 12):
        if len(times) > k:
            hazard = max(hazard, k / (now - times[-k - 1] + job.mean_seconds / 20))
    M, C = 1 / hazard, job.checkpoint_seconds
    interval = min((tau for tau in np.geomspace(C / 4, 8 * M + C, 80)), key=lambda tau: (
        math.expm1(min((tau + C) / M, 50)) / tau))
    price = 0.8 * job.nodes  # useful node-seconds that a second brings on average
    up = state.up

    def whole(nodes):
        return min(nodes, job.nodes) // job.replica * job.replica

    def setup(nodes, last):
        return job.restart_seconds + job.reshard_seconds * (nodes != last)

    def begin(nodes, last, wait):
        if not nodes:
            return -math.inf
        before = setup(nodes, last)
        return nodes * M * math.exp(-before / M) - price * (wait + before)

    spares = 0
    if state.event == "start":
        away = job.broken * job.repair_seconds + (1 - job.broken) * job.reboot_seconds
        rng = np.random.default_rng(0)
        rates = rng.choice([1, 1, 1, 1, 1, 1, 1, 4, 4, 9], 4000) * away / job.mean_seconds
        down = rng.poisson(rates) + (job.nodes >= 100) * rng.choice([0, 0, 0, 2], 4000)
        most = np.arange(job.most_spares + 1)[:, None]
        room = np.clip(job.nodes + most - down, 0, job.nodes) // job.replica * job.replica
        spares = int((room.mean(1) / (job.nodes + most[:, 0])).argmax())
    back = sorted(state.back)
    later = [(wait, whole(up + i + 1)) for i, wait in enumerate(back)]
    if state.running:
        if state.event == "warning":
            return Decision(state.running, interval, spares, 0.45 * state.unsaved > C)
        grown = whole(up)
        save = state.unsaved > C
        lost = price * C if save else price * state.unsaved
        if grown > state.running and begin(grown, state.running, 0) - lost > state.running * M:
            return Decision(grown, interval, spares, save)
        return Decision(state.running, interval, spares, False)
    best, choice = -math.inf, 0
    nodes = whole(up)
    waits = [(begin(m, state.last, w), 0) for w, m in later if m > nodes]
    starts = [(begin(nodes, state.last, 0), nodes)]
    if nodes:
        before = setup(nodes, state.last)
        for w, m in later:
            if m > nodes and w > before:
                alive = math.exp(-w / M)
                value = nodes * M * (math.exp(-before / M) - alive) - price * w * 0
                value += alive * (begin(m, nodes, 0) - price * C) - price * before
                starts.append((value, nodes))
    best, choice = max(starts + waits)
    return Decision(choice, float(interval), spares, False)


def recovery_policy__replay(state):
    """The interval is the one that suits the gaps seen so far; spares are a newsvendor's stock."""
    job, C = state.job, state.job.checkpoint_seconds
    gaps = np.diff([0.0, *state.failures[-60:]]) if len(state.failures) < 60 else np.diff(
        state.failures[-60:])
    promised = -job.mean_seconds * np.log1p(-(np.arange(5) + 0.5) / 5)
    gaps = np.append(gaps, promised)[:, None]
    turns = np.geomspace(0.2, 8, 60) * math.sqrt(2 * C * gaps.mean()) + C
    lost = (gaps // turns * C + gaps % turns).sum(0)
    interval = float(turns[lost.argmin()] - C)
    spares = 0
    if state.event == "start":
        away = job.broken * job.repair_seconds + (1 - job.broken) * job.reboot_seconds
        down = away / job.mean_seconds + 0.7 * min(1, job.nodes / 256)
        below = chance = math.exp(-down)
        while below < 1 - 1 / job.replica and spares < job.most_spares:
            spares += 1
            chance *= down / spares
            below += chance

    def whole(nodes):
        return min(nodes, job.nodes) // job.replica * job.replica

    nodes, mean = whole(state.up), float(gaps.mean())
    if not state.running:
        for more, seconds in enumerate(sorted(state.back), 1):
            if whole(state.up + more) > nodes and seconds < job.reshard_seconds:
                return Decision(0, interval, spares, False)
        return Decision(nodes, interval, spares, False)
    if state.event == "warning":
        return Decision(state.running, interval, spares, state.unsaved > 2.5 * C)
    price = C + job.restart_seconds + job.reshard_seconds
    if (nodes - state.running) * mean > nodes * price:
        return Decision(nodes, interval, spares, state.unsaved > C)
    return Decision(state.running, interval, spares, False)


def lemon_nodes__least_count(log, false_alarms=0.05):
    """For each node the least number of failures that is too many, by adding up probabilities."""
    days, failures = defaultdict(float), defaultdict(int)
    for job in log:
        for node in job.nodes:
            days[node] += job.days
        if job.failed is not None:
            failures[job.failed] += 1
    if false_alarms <= 0 or false_alarms >= len(days) / 2:
        raise ValueError(f"{false_alarms} false alarms")

    def too_many(mean):
        count, left, term = 0, 1.0, math.exp(-mean)
        while left >= false_alarms / len(days):
            left -= term
            count += 1
            term *= mean / count
        return count

    lemons = set()
    while True:
        others = [node for node in days if node not in lemons]
        rate = sum(failures[node] for node in others) / sum(days[node] for node in others)
        again = {node for node in days if failures[node] >= too_many(rate * days[node])}
        if again == lemons:
            return sorted(lemons)
        lemons = again
