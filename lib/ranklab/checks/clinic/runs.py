"""The one way in which the clinic's checks run a fixed program, and compare it.

    for run in runs(program, trainings.long_steps, LAB, (GROUPS, {"most": 1000})):
        run.equal(run.one, slips=(Slip("The sentence.", (old, new)), ...))

What runs   the program as in the lab, and then with hidden settings: these have the same disease in
            a different place, since the cause is to be fixed
Where       on the lab's four ranks; then in groups of one, two or three of them
Against     the library's program on one rank: the same training in one process. Where its data
            depend on the number of ranks, edits make that rank do the work of all
Slips       edits of the library's program as well: a slip's sentence is told if these very ranks
            return the same numbers with its first program
"""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ranklab.checks import prover
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.looks import located
from ranklab.checks.prover.slips import edited
from ranklab.checks.trial import instead, is_near, on_ranks
from ranklab.engine.report import rank_names
from ranklab.meter import Traffic

__all__ = ["ELSEWHERE", "FOUR", "GROUPS", "LAB", "PAIRS", "RETURNED", "SAME", "near", "runs",
           "traffic_and"]

FOUR = ((0, 1, 2, 3),)
GROUPS, PAIRS = prover.GROUPS
LAB = FOUR, {}
NEAR = 2**11  # roundings: in float32, in another order, trainings stay within a tenth of that
SAME = ("Either the cause is still there, or more has changed: leave the data, the sizes, the "
        "optimizer and what is returned as they are.")
RETURNED = "Return what the original program returns: a dict with the same names."
ELSEWHERE = ("The lab's four ranks were right. Here the ranks are different: what holds only for "
             "four ranks, for the lab's settings, or without `group`?")


class Returned(dict):
    """A rank's results; `watched` is what was observed meanwhile."""

    def part(self, *names):
        return {name: self[name] for name in names}

    def __missing__(self, name):
        raise Mistake(f"it returns no {name!r}", RETURNED)


@dataclass(frozen=True)
class Run:
    """The results of a group's ranks in one situation."""

    members: tuple
    told: str  # the settings, or their name
    settings: dict  # those of the first of the ranks
    found: list  # the Returned of each
    one: Returned  # that of the library's program on one rank
    answer: Callable  # that program
    given: object  # settings, or a function that gives them
    launched: Callable  # runs jobs, as _launched does

    @property
    def size(self):
        return len(self.members)

    @property
    def where(self):
        return rank_names(self.members) + self.told

    def at(self, place):
        """Name one of the ranks, and the ranks and settings of its run."""
        group = "4" if self.size == 4 else rank_names(self.members)
        of = f"rank {self.members[place]} of " if self.size > 1 else ""
        return f"{of}{group}{self.told}"

    def alone(self, edits=(), **settings):
        """Run like `one`, with edits and settings that follow from the results found."""
        [[result]] = self.launched([((0,), self.settings | settings, edited(self.answer, edits))])
        return result

    def awaited(self):
        """Check that every rank waited for all messages that it began; raise Mistake if not."""
        for place, result in enumerate(self.found):
            all_awaited(result.watched.missing, self.at(place))

    def equal(self, right, slips=(), hint=SAME, of=lambda result: result, **on_the_way):
        """Check that all ranks returned the right results, up to rounding; raise Mistake if not.

        right: {name: numbers}, or a list with one for each rank; what else is returned is not asked
        slips: Slips; the first that gives these numbers is named
        of: gives {name: numbers} of what a rank returned
        on_the_way: through, roundings: see near()
        """
        rights = right if isinstance(right, list) else [right] * self.size
        results = [*map(of, self.found)]
        for place, (result, due) in enumerate(zip(results, rights)):
            if name := _differs(result, due, on_the_way):
                elsewhere = ELSEWHERE if self.size < 4 else ""
                raise Mistake(f"{self.at(place)}: {name} {_told(result[name], due[name])}",
                              self._named(slips, results, rights, of, on_the_way)
                              or f"{elsewhere} {hint}".strip())

    def _named(self, slips, results, rights, of, on_the_way):
        for slip in slips:
            program, *_ = slip.functions(self.answer)
            [wrong] = self.launched([(self.members, self.given, program)])
            wrong = [*map(of, wrong)]
            if not any(_differs(result, mistake, on_the_way, due)
                       for result, mistake, due in zip(results, wrong, rights)) and any(
                    _differs(mistake, due, on_the_way) for mistake, due in zip(wrong, rights)):
                return slip.says
        return ""


def runs(program, answer, *situations, one=lambda size, settings: ((), {}), watch=None,
         exact=False, failures=None):
    """Yield a Run for each group of each of the situations.

    Neighbouring situations with the same groups are one launch.
    situations: (groups of four ranks, settings, what to call them or nothing); settings may be a
                function of a group's size and a rank's number in it
    one: (size, settings) -> (edits, settings) by which one rank does the work of `size` ranks;
         None where that follows from what is found
    watch: a context manager around each call, whose value is kept as `watched`: by default
           Traffic, with `missing`: how many handles nobody waited for
    exact: in float64
    failures: {regex of a hang or a crash: hint}
    """
    launched, ones = partial(_launched, watch or _traffic, exact), None
    for groups, alike in itertools.groupby(situations, key=lambda each: each[0]):
        cases = [(members, *about) for _, *about in alike for members in groups]
        call = partial(launched, [(members, options, program) for members, options, *_ in cases])
        with hinted(failures or {}):
            outcomes = call() if groups == FOUR else located(_in_groups(groups), call)
        if ones is None:
            ones = iter(launched(_jobs_of_one(answer, situations, one)) if one else ())
        for (members, options, *name), results in zip(cases, outcomes):
            settings = _settings(options, len(members), 0)
            keywords = ", ".join(f"{key}={value}" for key, value in settings.items())
            label = f", {name[0]}" if name else keywords and f" with {keywords}"
            yield Run(members, label, settings, results, *next(ones, [None]), answer, options,
                      launched)


def _jobs_of_one(answer, situations, one):
    """Return the work of each group in each situation for one rank; four ranks run side by side."""
    jobs = []
    for groups, options, *_ in situations:
        for size in map(len, groups):
            edits, more = one(size, settings := _settings(options, size, 0))
            # a copy, because ranks refuse the library's own program: a learner may not call it
            jobs.append(((len(jobs) % 4,), settings | more, edited(answer, edits)))
    return jobs


def _launched(watch, exact, jobs):
    """[[the Returned of each of the ranks], ...] for jobs: (ranks, settings, program)"""
    with _later_calls(jobs):
        results = on_ranks(_on_rank, watch, exact, jobs, timeout=20, preload=("sklearn.datasets",),
                           ranks=1 + max(rank for members, *_ in jobs for rank in members))
    return [[_returned(*results[rank][number]) for rank in members]
            for number, (members, *_) in enumerate(jobs)]


@contextlib.contextmanager
def _later_calls(jobs):
    """Add to the report of a hang that a rank may be in a different call than the others."""
    try:
        yield
    except Mistake as mistake:
        places = mistake.cause.removeprefix("hang: ").split(", ")
        if mistake.cause.startswith("hang: ") and len({*places}) > 1 and len(jobs) > 1:
            mistake.what += ("\nThe check calls the program several times in a row: a rank that is "
                             "done with one call is already in the next one.")
        raise


def _on_rank(watch, exact, jobs):
    """{number of a job: (what its program returns here, what was watched)}"""
    torch.set_default_dtype(torch.float64 if exact else torch.float32)  # ends with this launch
    rank, ranks, results = dist.get_rank(), dist.get_world_size(), {}
    group_of = {members: {"group": dist.new_group(members)} if len(members) < ranks else {}
                for members in dict.fromkeys(job[0] for job in jobs)}
    for number, (members, options, program) in enumerate(jobs):
        if rank in members:
            settings = _settings(options, len(members), members.index(rank))
            with watch() as watched:
                value = program(**settings, **group_of[members])
            results[number] = value, watched
    return results


def _returned(value, watched):
    if not isinstance(value, dict):
        raise Mistake(f"it returns {str(value)[:60]}", RETURNED)
    value = Returned(value)
    value.watched = watched
    return value


@contextlib.contextmanager
def _traffic():
    """Count what is sent, and as `missing` the handles that nobody waited for."""
    with Traffic() as counted, Waits() as waits:
        yield counted
    counted.missing = waits.missing(counted.calls.total())


@contextlib.contextmanager
def traffic_and(count):
    """Count the traffic, and as `of_optimizers` the sum of count(each of torch's optimizers).

    An optimizer is looked at after each of its steps; its last one counts.
    """
    counts = {}
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: counts.update({optimizer: count(optimizer)}))
    try:
        with _traffic() as counted:
            yield counted
    finally:
        handle.remove()
    counted.of_optimizers = sum(counts.values())


def _settings(options, size, place):
    return options(size, place) if callable(options) else options


def _in_groups(groups):
    return f"in groups of {' and '.join(str(len(members)) for members in groups)} ranks"


# --- numbers --------------------------------------------------------------------------------------

def flat(value):
    """Flatten all numbers of a tensor, or of a list or dict of tensors, into one float64 tensor.

    A dict's values are in the order of its keys.
    """
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        return torch.cat([torch.zeros(0, dtype=torch.float64), *map(flat, value)])
    return torch.as_tensor(value).detach().cpu().double().flatten()


def near(got, right, through=torch.float32, roundings=NEAR):
    """Return whether `got` and `right` have the same size and differ only by rounding.

    See trial.is_near().
    """
    return is_near(flat(got), flat(right), through, roundings)


def _differs(result, right, on_the_way, names=None):
    """Return the first name whose value differs; None if there is none."""
    return next((name for name in names or right
                 if not near(result[name], right[name], **on_the_way)), None)


def _told(got, right):
    got, right = flat(got), flat(right)
    if len(got) != len(right):
        return f"are {len(got)} numbers, and in one process {len(right)}"
    got, right = (each.item() if len(each) == 1 else each for each in (got, right))
    return f"is {instead(got, right)} as in one process"
