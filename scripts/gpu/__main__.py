"""What this machine's GPUs do with the course, in ten minutes: a report as JSON and Markdown.

    make gpu                                    or, where nothing can be installed:
    python scripts/gpu --minutes 10 --out build/gpu

It needs torch, numpy, cloudpickle and psutil; what else is missing leaves out single parts. Each
part is a process with a limit of its own, so one that fails or hangs takes no other with it. Where
there are fewer GPUs than ranks, these share them (NCCL 2.30.3 or newer); without a GPU all parts
run on the CPU under a GPU's rules, on two ranks, at their smallest size: that is a rehearsal.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "lib"))

import parts  # noqa: E402
import report  # noqa: E402

from ranklab.engine import surroundings  # noqa: E402

LEAST = 10  # seconds: a part does not begin with less
OLD_TORCH = HERE / "older_torch"  # on the path, it gives torch the names that the course uses
FAILED_LINES = 15  # of a part that failed, at most


def main(argv=None):
    """Run the parts in order while time is left; returns 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="for all parts together")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder")
    parser.add_argument("--ranks", type=int, help="by default the GPUs, or 4 that share one")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="these alone, in this order")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, also where GPUs are")
    options = parser.parse_args(argv)
    unknown = {*(options.parts or ())} - {*parts.PARTS}
    if unknown:
        parser.error(f"no part is called {sorted(unknown)[0]}; there are {', '.join(parts.PARTS)}")
    job = new_job(options)
    chosen = options.parts or [*parts.PARTS]
    if options.list:
        for name in chosen:
            print(f"{parts.PARTS[name].seconds:5} s  {name:24} {parts.PARTS[name].what}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    results = []
    for name in chosen:
        results.append(run(name, job, options.out, end - time.monotonic()))
        print(report.line(results[-1]), flush=True)
        report.write(options.out, job, results)  # after each: a machine may go at any moment
    print(f"written to {options.out / 'report.md'} and report.json")
    return int(any(result["state"] == "failed" for result in results))


def new_job(options):
    """Return what every part is told: {gpus, ranks, rehearsal, share}."""
    import torch

    gpus = 0 if options.rehearse or not torch.cuda.is_available() else torch.cuda.device_count()
    ranks = options.ranks or (gpus if gpus > 1 else 4 if gpus else 2)
    return {"gpus": gpus, "ranks": ranks, "rehearsal": not gpus, "share": 0 < gpus < ranks,
            "torch": torch.__version__}


def environment(job):
    """Return the environment of a part."""
    version = tuple(int(part) for part in job["torch"].split("+")[0].split(".")[:2])
    path = [*[str(OLD_TORCH)] * (version < (2, 13)), str(ROOT / "lib"), str(HERE)]
    changes = {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).rstrip(":")}
    if job["rehearsal"]:
        changes["RANKLAB_REHEARSE"] = "gpu"
    elif job["share"]:
        changes["RANKLAB_SHARE_GPU"] = "1"
    return {**os.environ, **changes}


def run(name, job, out, left):
    """Run a part; return {name, what, state, seconds, numbers, words}."""
    part = parts.PARTS[name]
    result = {"name": name, "section": part.section, "what": part.what, "seconds": 0.0,
              "numbers": {}, "words": ""}
    if left < LEAST:
        return {**result, "state": "left out", "words": "no time was left"}
    # A rehearsal shares its cores with whatever else this machine does.
    limit = min(part.seconds * (surroundings.patience() if job["rehearsal"] else 1), left)
    answer = out / f"{name}.json"
    answer.unlink(missing_ok=True)
    started = time.monotonic()
    with open(out / f"{name}.txt", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", str(HERE / "part.py"), name, json.dumps(job), str(answer)],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
            env=environment(job), start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all(process)
        log.seek(0)
        last = log.read().rstrip().splitlines()[-FAILED_LINES:]
    result["seconds"] = round(time.monotonic() - started, 1)
    if answer.exists():
        return result | json.loads(answer.read_text())
    why = f"not done after {limit:.0f} s" if code is None else f"exit code {code}"
    return {**result, "state": "failed", "words": "\n".join([why, *last])}


def end_all(process):
    """End the part and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
