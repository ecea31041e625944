"""Run the tests, which run the unsolved labs, then the solved; end with each stage's summary."""
import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# -rs prints every skip with its reason; tests/conftest.py fails those that are not allowed.
PYTEST = [sys.executable, "-m", "pytest", "-rs", "--durations=20", "--durations-min=1"]


def stages(jobs, fast, sweep=False):
    """(name, pytest's arguments), in the order they run."""
    parallel = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    if fast:
        return [("fast tests", ["tests", "-m", "not slow", *parallel])]
    # A cell's limit is above the engine's 60 s, so that the engine's report of a hang comes first.
    notebooks = ["-p", "conftest", "--nbval-lax", "--nbval-cell-timeout=180", "--timeout=300"]
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "solutions").glob("*.ipynb"))]
    return [("tests", ["tests", *parallel, *(["--sweep"] if sweep else [])]),
            ("notebooks", [*notebooks, *parallel, *found])][:2 if found else 1]


def run(name, arguments):
    """(exit code, pytest's last line) of one stage; its output goes to the screen as it comes."""
    print(f"\n##### {name}", flush=True)
    # Tests that call make themselves must not look like a part of the make that runs them.
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("MAKE", "MFLAGS"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), env.get("PYTHONPATH")]))
    process = subprocess.Popen([*PYTEST, *arguments], cwd=ROOT, env=env, text=True,
                               errors="replace", stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    summary = "no summary: pytest did not finish"
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        if re.fullmatch(r"=+ .* in [\d.]+s.*=+", line.strip()):
            summary = line.strip()
    return process.wait(), summary


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3, help="test files that run at the same time")
    parser.add_argument("--fast", action="store_true", help="no slow tests, no notebooks")
    parser.add_argument("--sweep", action="store_true", help="also tests of many alike")
    options = parser.parse_args(argv)
    results = [(name, *run(name, arguments))
               for name, arguments in stages(options.jobs, options.fast, options.sweep)]
    print("\n##### all stages")
    for name, code, summary in results:
        print(f"{name}: {'ok' if code == 0 else 'FAILED'}\n{summary}")
    return int(any(code for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
