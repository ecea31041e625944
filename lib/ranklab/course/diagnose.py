"""`ranklab diagnose`: observe a program while it runs, then name its known diseases.

What is observed: ranklab.clinic.hooks. How it is judged: ranklab.clinic.diagnose.
"""

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

from ranklab.clinic.diagnose import diagnose
from ranklab.clinic.hang_detectors import whereabouts
from ranklab.clinic.hooks import observation
from ranklab.clinic.trace import launches, read
from ranklab.clinic.watch import watching
from ranklab.course.program import words_of
from ranklab.engine import torchrun
from ranklab.engine.report import count_ranks

OWN_GROUP = " (--ranks N starts a script that calls init_process_group, by torchrun)"


def main(program, arguments=(), ranks=None, timeout=600, keep=None, before=None,
         beside=None):
    """Run the program and print what is found; return 0 where nothing is found.

    program: a .py file or a module; or a folder that `keep` or a job has filled
    ranks: start this many with torchrun; None: the program launches its own
    keep: a folder for the observations
    before: such a folder, from the run that this one continues
    beside: such a folder, from the same program on fewer ranks
    Returns: 1 where something is found, or the program did not end well
    Raises: ValueError if there is no such program, or nothing was observed
    """
    with contextlib.ExitStack() as stack:
        if Path(program).is_dir():
            folder, problem = program, ""
        else:
            folder = keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="ranklab-"))
            words = words_of(program, "no .py file, and no folder")
            problem = _run(words, arguments, ranks, timeout, folder)
        runs, *references = [[read(path) for path in launches(each)] if each else [()]
                             for each in (folder, before, beside)]
        if not all((runs, *references)):
            raise ValueError(f"{program}: no ranks were observed" + (
                " in the other folder" if runs else
                f": {problem}{'' if ranks else OWN_GROUP}" if problem else
                "" if Path(program).is_dir() else
                ": all its processes ended before init_process_group had returned" if ranks else
                ": no process that it started came through init_process_group; --ranks N starts "
                "it by torchrun"))
        is_sick = [_judge(run, i, len(runs), *(each[-1] for each in references))
                   for i, run in enumerate(runs, 1)]
    if problem:
        print(f"The program did not end well: {problem}")
    if not beside:
        print("(Not judged: how fast cards, links and loaders are; and whether the learning rate "
              "fits the batch, which takes a second run: see --beside.)")
    return int(any(is_sick) or bool(problem))


def _run(words, arguments, ranks, timeout, folder):
    """Run the program under observation; return how it ended, "" where it ended well."""
    try:
        with observation(folder), watching(folder) as watch:
            if ranks:
                print(torchrun("-m", "ranklab.clinic.hooks", *words, *arguments, ranks=ranks,
                               timeout=timeout), end="")
                return ""
            code = subprocess.run([sys.executable, *words, *arguments], timeout=timeout).returncode
            return watch.reason or (f"exit code {code}" if code else "")
    except (RuntimeError, TimeoutError) as error:
        return watch.reason or str(error)
    except KeyboardInterrupt:
        return "you stopped it"
    except subprocess.TimeoutExpired:
        return f"it was not done after {timeout:g} s"


def _judge(ranks, launch, launch_count, before, beside):
    """Print the findings of one launch, and where the ranks that have not returned are.

    Returns: True where something is found
    """
    findings = diagnose(ranks, before, beside)
    failed_early = not any(r.steps for r in ranks) and any(r.fate != "returned" for r in ranks)
    print((f"launch {launch} of {launch_count}: " if launch_count > 1 else "") +
          f"{count_ranks(len(ranks))}, {max(len(r.steps) for r in ranks)} steps of an optimizer, "
          f"{max(len(r.calls) for r in ranks)} collectives and messages: "
          + ("" if findings else "it did not come to a step, so most diseases could not be seen"
             if failed_early else "none of the known diseases is seen"))
    for disease, evidence in findings:
        print(f"  {disease}\n    {evidence}")
    for line in whereabouts(ranks):
        print(f"  {line}")
    for failure in sorted({failure for r in ranks for failure in r.failures}):
        print(f"  less was seen, for the observer itself failed: {failure}")
    return bool(findings)
