"""What a training has survived, as text."""

import statistics


def report(trials, config, find_straggler=None, goodput=None):
    """One trial in full; of several a line each.

    find_straggler, goodput  exercises of lab 14: the slow ranks, and the formula
    """
    if len(trials) == 1:
        return one(trials[0], config, find_straggler, goodput)
    lines = [f"seed {each.seed:4}: {summary(each, config)}" for each in trials]
    good, torn = sum(each.is_good() for each in trials), sum(each.found.torn for each in trials)
    read = sum(len(each.found.checked) for each in trials)
    faults = sum(len(life.faults) for each in trials for life in each.found.lives)
    return "\n".join([*lines, f"{good} of {len(trials)} runs ended as undisturbed ones, after "
                      f"{faults} faults; torn checkpoints: {torn} of {read}"])


def summary(trial, config):
    found = trial.found
    verdict = "as undisturbed" if trial.is_good() else "DIFFERS"
    return (f"{sum(len(life.faults) for life in found.lives)} faults, {len(found.lives)} launches, "
            f"{computed(found)} steps for {config.steps}, {found.seconds:.1f} s, loss "
            f"{found.loss:.4f} {verdict}")


def computed(found):
    return sum(life.last - life.first for life in found.lives)


def one(trial, config, find_straggler, goodput):
    found, lines = trial.found, [f"The monkey's seed is {trial.seed}."]
    for life in found.lives:
        lines.append(f"steps {life.first:3} to {life.last:3}  {life.layout}")
        lines += [f"    {fault.kind}: rank {fault.rank % life.layout.ranks}"
                  for fault in life.faults]
        if life.ended:
            lines.append(f"    {life.noticed:.1f} s later: {life.ended}")
        if find_straggler and len(life.work) and (slow := find_straggler(life.work)):
            lines.append(f"    slow, by its seconds of work: rank {slow[0]}")
    gap = abs(found.loss - trial.usual)
    same = "equal bit for bit" if trial.differs == 0 else f"differ by {trial.differs:.0e}"
    refused = sum(seconds < 0 for life in found.lives for seconds in life.saves)
    lines += ["", f"held out: {found.loss:.6f} nats; undisturbed, in the first layout: "
              f"{trial.usual:.6f} ({gap:.0e} apart)",
              f"weights and optimizer, beside a run that changes layout at the same steps: {same}",
              f"checkpoints read: {len(found.checked)}; damaged: {found.damaged}; torn: "
              f"{found.torn}; saves that a full disk refused: {refused}"]
    return "\n".join([*lines, *shares(found, config, goodput)])


def shares(found, config, goodput):
    """Lines: which share of the steps counts, and which of the time; counted, and by formula."""
    failures, every, done = len(found.lives) - 1, config.checkpoint_every, computed(found)
    expected = failures * (every - 1) / 2 + found.damaged * every
    lines = [f"steps that count: {config.steps} of {done}, {config.steps / done:.0%}; a failure "
             f"loses {(every - 1) / 2} on average: {config.steps / (config.steps + expected):.0%}"]
    step = statistics.median(each for life in found.lives for each in life.step_seconds)
    lines += [f"time that counts: {config.steps * step / found.seconds:.0%} of {found.seconds:.1f} "
              "s"]
    saves = [each for life in found.lives for each in life.saves if each > 0]
    if goodput and failures and saves:
        running = sum(each for life in found.lives for each in life.step_seconds)
        said = goodput(every * step, statistics.mean(saves), found.seconds / failures,
                       (found.seconds - running) / failures)
        lines[-1] += f"; by formula {said:.0%}"
    return lines
