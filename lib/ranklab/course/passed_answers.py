"""A learner's answers from any lab, outside its notebook: from the cells that passed."""

import builtins
import contextlib
import io

from ranklab.course import labs, progress
from ranklab.course.cells import define, find_lab, to_bind
from ranklab.course.check import PASSED, judge
from ranklab.course.outline import is_passed


def passed_answers(names, show=print):
    """Return {name: function} of those exercises whose answers have passed, and pass again now.

    show  called with a line for each name: whose answer it is, and why; None: not called
    Cost  each check once more, some seconds each
    """
    records, answers = progress.load(), {}
    names_of = {stem: [name for name in names if name in labs.names_of(stem)]
                for stem in labs.written()}
    for stem in filter(names_of.get, names_of):
        exercises = {each.name: each for each in labs.checks_of(stem).EXERCISES}
        functions = _defined(stem, exercises, names_of[stem], records)
        for name in names_of[stem]:
            origin = "the library's: yours has not passed"
            if name in functions:
                with contextlib.redirect_stdout(io.StringIO()):
                    verdict = judge(exercises[name], functions[name])
                origin = f"the library's: yours no longer passes ({verdict.state})"
                if verdict.state == PASSED:
                    origin, answers[name] = "yours, checked again", functions[name]
            elif is_passed(name, records):
                origin = "the library's: the record of your answer has no cell that defines it"
            if show:
                show(f"{name:24} lab {stem[:2]}  {origin}")
    return answers


def _defined(stem, exercises, names, records):
    """Return {name: function} of the learner's answers, run with the cells that they need."""
    texts = {name: records[name].get("cell", "") for name in exercises if is_passed(name, records)}
    lab = find_lab(stem)
    if lab is None or not any(texts.get(name) for name in names):
        return {}
    statements = to_bind(set(names), lab.statements(len(lab.cells), texts),
                         lambda name, cell: hasattr(builtins, name))
    space = {"__name__": "__main__"}  # so that ranks get these functions by value
    with contextlib.redirect_stdout(io.StringIO()):
        learners = define(statements, space, exercises)
    return {name: space[name] for name in names if name in learners}
