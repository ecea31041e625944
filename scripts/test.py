"""Run the tests, which run the unsolved labs, and every cell of the solved ones: one pytest."""
import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# -rs prints every skip with its reason; tests/rules.py fails those that are not allowed.
PYTEST = [sys.executable, "-m", "pytest", "-rs", "--durations=20", "--durations-min=1"]
# A cell's limit is above the engine's 60 s, so that the engine's report of a hang comes first.
NBVAL = ["--nbval-lax", "--nbval-cell-timeout=180"]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3, help="test files that run at the same time")
    parser.add_argument("--fast", action="store_true", help="no slow tests, no notebooks")
    parser.add_argument("--sweep", action="store_true", help="also tests of many alike")
    options = parser.parse_args(argv)
    command = [*PYTEST, "tests"]
    if options.jobs > 1:
        command += ["-n", str(options.jobs), "--dist", "loadfile"]
    if options.sweep:
        command += ["--sweep"]
    if options.fast:
        command += ["-m", "not slow"]
    else:
        command += [*NBVAL, *map(str, sorted(pathlib.Path("solutions").glob("*.ipynb")))]
    os.execve(sys.executable, command, environment())


def environment():
    """Tests find each other's helpers; one that calls make is no part of the make that runs it."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("MAKE", "MFLAGS"))}
    path = [str(ROOT / "tests"), env.get("PYTHONPATH")]
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


if __name__ == "__main__":
    os.chdir(ROOT)
    main(sys.argv[1:])
