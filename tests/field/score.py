"""How `ranklab diagnose` does on the programs of sick/ and healthy/: a line for each, and totals.

    python tests/field/score.py [--only NAME ..]

They run one at a time. With --only the report of each is printed, too.
"""

import argparse
import ast
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "lib"))

from ranklab.clinic.diagnose import MODULES  # noqa: E402

NAMES = {name for module in MODULES for name in module.DETECTORS}
LIMIT = 120  # seconds for a program; diagnose ends it a little earlier, and says what it saw
EARLIER = 20
RIGHT, QUIET, SILENT, WRONG = "named rightly", "rightly silent", "silent", "wrong name"
ALARM, UNSEEN, FAILED = "false alarm", "not observed", "failed"
OUTCOMES = {"sick": (RIGHT, QUIET, SILENT, WRONG, UNSEEN),
            "healthy": (QUIET, ALARM, UNSEEN, FAILED)}


class Program(NamedTuple):
    """A file, and what its docstring says of it."""

    path: Path
    what: str  # is wrong, or unusual
    expects: tuple  # names; "new: ..." for what has none yet; () where silence is right
    ranks: str  # a number; "its own" where the program starts them

    @property
    def kind(self):
        return self.path.parent.name


def programs(only=()):
    """All of them, or those named, as they stand in the folders."""
    everything = [read(path) for kind in OUTCOMES for path in sorted((HERE / kind).glob("*.py"))]
    missing = set(only) - {program.path.stem for program in everything}
    if missing:
        raise ValueError(f"no program is called {', '.join(sorted(missing))}")
    return [program for program in everything if not only or program.path.stem in only]


def read(path):
    """The Program in this file; ValueError where its docstring does not say what it should."""
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    said = re.fullmatch(r"expects: (.+)\nranks: (\d+|its own)", "\n".join(lines[1:]))
    if not said:
        raise ValueError(f"{path}: its docstring lacks a line, expects: or ranks:")
    silence = {"healthy": "nothing", "sick": "nothing known"}[path.parent.name]
    expects = () if said[1] == silence else tuple(said[1].split(" | "))
    unknown = [each for each in expects if each not in NAMES and not each.startswith("new: ")]
    if unknown or expects and path.parent.name == "healthy":
        raise ValueError(f"{path}: it can't expect {' | '.join(unknown or expects)}")
    return Program(path, lines[0], expects, said[2])


def diagnosed(program):
    """What `ranklab diagnose` prints of it; after LIMIT it is ended, and all that it started."""
    ranks = () if program.ranks == "its own" else ("--ranks", program.ranks)
    lib = str(HERE.parents[1] / "lib")
    path = os.pathsep.join(filter(None, (lib, os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="field-") as folder, subprocess.Popen(
            [sys.executable, "-m", "ranklab.cli", "diagnose", *ranks, "--timeout",
             str(LIMIT - EARLIER), str(program.path)], text=True, cwd=folder,
            env=environ | {"TMPDIR": folder}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT) as process:
        try:
            return process.communicate(timeout=LIMIT)[0]
        except subprocess.TimeoutExpired:
            return f"not done after {LIMIT} s"
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()


def judged(program, report):
    """(outcome, the names that were found) by what `ranklab diagnose` has printed."""
    verdict = re.search(r"^(launch \d+ of \d+: )?\d+ ranks?, \d+ steps? of an optimizer", report,
                        re.M)
    if not verdict:
        return UNSEEN, []
    said = report[verdict.start():]
    names = [name for name in re.findall(r"^  (\w+)$", said, re.M) if name in NAMES]
    if program.kind == "healthy":
        is_failed = "The program did not end well" in said
        return (ALARM if names else FAILED if is_failed else QUIET), names
    if not names:
        return (SILENT if program.expects else QUIET), names
    return (RIGHT if set(names) <= set(program.expects) else WRONG), names


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="of the files")
    only = parser.parse_args().only
    outcomes = {kind: Counter() for kind in OUTCOMES}
    for program in programs(only):
        start = time.monotonic()
        report = diagnosed(program)
        outcome, names = judged(program, report)
        outcomes[program.kind][outcome] += 1
        wanted = "" if outcome in (RIGHT, QUIET) else (
            f"; expects {' | '.join(program.expects) or 'nothing'}")
        print(f"{program.kind:8}{program.path.stem:27}{outcome:15}"
              f"{time.monotonic() - start:4.0f} s  {', '.join(names) or '-'}{wanted}", flush=True)
        if only:
            print(f"{program.what}\n{report}")
    for kind, counts in outcomes.items():
        if counts:
            print(f"{kind}, {counts.total()} in all: " + ", ".join(
                f"{counts[outcome]} {outcome}" for outcome in OUTCOMES[kind]))


if __name__ == "__main__":
    main()
