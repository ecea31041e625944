"""What trainings have survived, as text."""

import textwrap

import numpy as np
import torch

from ranklab.projects.resilience.survive import differing


def report(trials, find_straggler=None, goodput=None):
    """Return one trial in full as text, or several in a line.

    find_straggler, goodput  exercises of lab 14
    """
    if len(trials) == 1:
        return "\n".join(story(trials[0], find_straggler) + shares(trials[0], goodput))
    runs = [each.found for each in trials]
    return (f"{sum(each.is_good() for each in trials)} of {len(trials)} runs ended as if "
            f"undisturbed, after {sum(map(count_faults, runs))} faults; torn checkpoints: "
            f"{sum(found.torn for found in runs)} of {sum(found.checked for found in runs)}")


def announced(trials):
    """Yield each trial, after a line about it on the screen."""
    for trial in trials:
        found = trial.found
        print(f"seed {trial.seed:4}: {count_faults(found)} faults, {len(found.lives)} launches, "
              f"{computed(found)} steps for {trial.config.steps}, {found.seconds:.1f} s, loss "
              f"{found.loss:.6f}" + (not trial.is_good()) * " DIFFERS", flush=True)
        yield trial


def count_faults(found):
    return sum(len(life.faults) for life in found.lives)


def computed(found):
    return sum(life.last - life.first for life in found.lives)


def story(trial, find_straggler):
    """Return lines: each launch, and what is equal in the end."""
    found, lines = trial.found, []
    # Some pipeline stages have more to do, so each rank is compared with itself, undisturbed.
    usual = {life.layout: np.median(life.work[:, 1:], axis=1, keepdims=True)
             for life in trial.replay.lives if life.last > life.first}
    for life in found.lives:
        lines.append(f"steps {life.first:3} to {life.last:3}  {life.layout}")
        lines += [f"    {fault.kind}: rank {fault.rank % life.layout.ranks}"
                  for fault in life.faults]
        work = torch.tensor((life.work[:, 1:] / usual[life.layout]).T)  # (steps, ranks)
        if find_straggler and len(work) and (slow := find_straggler(work)):
            lines.append(f"    slow, by its seconds of work: rank {slow[0]}")
        if life.ended:
            lines += textwrap.wrap(f"    {life.noticed:.1f} s later: {life.ended}", 100,
                                   subsequent_indent=8 * " ")
    differ = differing(found.state, trial.replay.state)
    refused = sum((life.saves[0] < 0).sum() for life in found.lives)
    return [*lines, f"held out: {found.loss:.6f} nats; undisturbed {trial.usual.loss:.6f}",
            "in an undisturbed run with the same layouts at the same steps, weights and "
            "optimizer\n" + (f"differ in {len(differ)} tensors" if differ else
                             f"are equal bit for bit, in {len(found.state)} tensors"),
            f"checkpoints read: {found.checked}; damaged: {found.damaged}; torn: {found.torn}; "
            f"refused by a full disk: {refused}"]


def shares(trial, goodput):
    """Return lines: which share of steps and time counts; measured, and by formula."""
    found, every, steps = trial.found, trial.config.checkpoint_every, trial.config.steps
    failures, done = len(found.lives) - 1, computed(found)
    lost = failures * (every - 1) / 2 + found.damaged * every
    running = sum(np.ptp(life.times.max(axis=0)) for life in found.lives)  # with saves
    saves = np.concatenate([life.saves[0, :-1][life.saves[0, :-1] > 0] for life in found.lives])
    step = (running - saves.sum()) / done  # seconds
    # Here no failure comes during a restart, so the formula covers the time between restarts.
    share = goodput and failures and len(saves) and running / found.seconds * goodput(
        every * step, saves.mean(), running / failures, 0)
    return [f"steps that count: {steps} of {done}, {steps / done:.0%}; a failure loses "
            f"{(every - 1) / 2} on average: {steps / (steps + lost):.0%}",
            f"time that counts: {steps * step / found.seconds:.0%} of {found.seconds:.1f} s"
            + (f"; by formula {share:.0%}" if share else "")]
