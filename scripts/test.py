"""Run the tests, which run the unsolved labs, and every cell of the solved ones and of the tour:
one pytest."""
import argparse
import os
import pathlib
import sys

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
# -rs prints every skip with its reason; tests/rules.py fails those that are not allowed.
PYTEST = [sys.executable, "-m", "pytest", "-rs", "--durations=20", "--durations-min=1"]
# A cell's limit is above the engine's 60 s, so that the engine's report of a hang comes first.
NBVAL = ["--nbval-lax", "--nbval-cell-timeout=180"]
MEMORY = 2 << 30  # bytes that a job takes, about


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=most_jobs(), help="test files that run at once")
    parser.add_argument("--fast", action="store_true", help="no slow tests, no notebooks")
    parser.add_argument("--sweep", action="store_true", help="also tests of many alike")
    parser.add_argument("--stems", default="",
                        help='with --sweep: what it adds for these labs, "03 06", and no more')
    options = parser.parse_args(argv)
    command = [*PYTEST]
    if options.jobs > 1:  # conftest.py says what comes first
        command += ["-n", str(options.jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    if options.sweep:
        command += ["--sweep"]
    if options.stems:
        command += ["-m", "sweep", "--stems", options.stems, "tests",
                    "--ignore", "tests/test_cluster_slurm.py"]  # make slurm runs it
    elif options.fast:
        command += ["-m", "not slow", "tests"]
    else:
        command += [*NBVAL, "tests", "labs/tour.ipynb",
                    *map(str, sorted(pathlib.Path("solutions").glob("*.ipynb")))]
    os.execve(sys.executable, command, environment())


def most_jobs():
    """Return cores + 1, because many tests wait; fewer where memory is short.

    On two cores a fourth job gains nothing: the third keeps both of them busy.
    """
    fit = psutil.virtual_memory().available // MEMORY
    return max(1, min((os.cpu_count() or 1) + 1, 9, fit))


def environment():
    """Let tests find each other's helpers; one that calls make is no part of this make."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("MAKE", "MFLAGS"))}
    path = [str(ROOT / "tests"), env.get("PYTHONPATH")]
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


if __name__ == "__main__":
    os.chdir(ROOT)
    main(sys.argv[1:])
