"""What training runs have survived, as text."""

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
            f"{sum(run.torn for run in runs)} of {sum(run.checked for run in runs)}")


def announced(trials):
    """Yield each trial, after printing a line about it."""
    for trial in trials:
        run = trial.found
        print(f"seed {trial.seed:4}: {count_faults(run)} faults, {len(run.lives)} launches, "
              f"{computed(run)} steps for {trial.config.steps}, {run.seconds:.1f} s, loss "
              f"{run.loss:.6f}" + (not trial.is_good()) * " DIFFERS", flush=True)
        yield trial


def count_faults(run):
    return sum(len(life.faults) for life in run.lives)


def computed(run):
    return sum(life.last - life.first for life in run.lives)


def story(trial, find_straggler):
    """Return lines about each launch, and about what is equal at the end."""
    run, lines = trial.found, []
    # Some pipeline stages have more to do, so each rank is compared with its undisturbed self.
    usual = {life.layout: np.median(life.work[:, 1:], axis=1, keepdims=True)
             for life in trial.replay.lives if life.last > life.first}
    for life in run.lives:
        lines.append(f"steps {life.first:3} to {life.last:3}  {life.layout}")
        lines += [f"    {fault.kind}: rank {fault.rank % life.layout.ranks}"
                  for fault in life.faults]
        work = torch.tensor((life.work[:, 1:] / usual[life.layout]).T)  # (steps, ranks)
        if find_straggler and len(work) and (slow := find_straggler(work)):
            lines.append(f"    slow, by its seconds of work: rank {slow[0]}")
        if life.ended:
            lines += textwrap.wrap(f"    {life.noticed:.1f} s later: {life.ended}", 100,
                                   subsequent_indent=8 * " ")
    differ = differing(run.state, trial.replay.state)
    refused = sum((life.saves[0] < 0).sum() for life in run.lives)
    return [*lines, f"held out: {run.loss:.6f} nats; undisturbed {trial.usual.loss:.6f}",
            "in an undisturbed run with the same layouts at the same steps, weights and "
            "optimizer\n" + (f"differ in {len(differ)} tensors" if differ else
                             f"are equal bit for bit, in {len(run.state)} tensors"),
            f"checkpoints read: {run.checked}; damaged: {run.damaged}; torn: {run.torn}; "
            f"refused by a full disk: {refused}"]


def shares(trial, goodput):
    """Return lines with the shares of useful steps and time, measured and by formula."""
    run, every, steps = trial.found, trial.config.checkpoint_every, trial.config.steps
    failures, count = len(run.lives) - 1, computed(run)
    waste = failures * (every - 1) / 2 + run.damaged * every
    running = sum(np.ptp(life.times.max(axis=0)) for life in run.lives)  # with saves
    saves = np.concatenate([life.saves[0, :-1][life.saves[0, :-1] > 0] for life in run.lives])
    step = (running - saves.sum()) / count  # seconds
    # Here no failure comes during a restart, so the formula covers the time between restarts.
    share = goodput and failures and len(saves) and running / run.seconds * goodput(
        every * step, saves.mean(), running / failures, 0)
    return [f"steps that count: {steps} of {count}, {steps / count:.0%}; a failure loses "
            f"{(every - 1) / 2} on average: {steps / (steps + waste):.0%}",
            f"time that counts: {steps * step / run.seconds:.0%} of {run.seconds:.1f} s"
            + (f"; by formula {share:.0%}" if share else "")]
