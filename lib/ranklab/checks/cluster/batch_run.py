"""How the check of sbatch_script reads a script's options, and runs it by bash without Slurm."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from ranklab.checks.beside import expect
from ranklab.checks.cluster import slurm_stub
from ranklab.checks.exercise import Mistake
from ranklab.engine.surroundings import patience

NODELIST, HEAD = "gpu[07,12-13],big2", "gpu07"
COMMANDS = "scontrol", "scancel", "srun", "torchrun", "python", "python3", "sleep", "hostname"
SHORT = {"A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "J": "job-name",
         "N": "nodes", "c": "cpus-per-task", "d": "dependency", "e": "error", "n": "ntasks",
         "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude"}
FLAGS = ("contiguous exclusive hold no-kill no-requeue overcommit oversubscribe propagate quiet "
         "reboot requeue spread-job use-min-nodes verbose").split()
VALUES = ("account acctg-freq array begin chdir clusters comment constraint core-spec cpu-freq "
          "cpus-per-gpu cpus-per-task deadline dependency error exclude export export-file "
          "gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint "
          "input job-name licenses mail-type mail-user mem mem-bind mem-per-cpu mem-per-gpu "
          "mincpus network nice nodelist nodes ntasks ntasks-per-core ntasks-per-gpu "
          "ntasks-per-node ntasks-per-socket open-mode output partition prefer priority profile "
          "qos reservation signal sockets-per-node switches thread-spec threads-per-core time "
          "time-min tmp wait-all-nodes wckey").split()


def header(script):
    """{long option: value} of the #SBATCH lines, as sbatch reads them: before the first command."""
    expect(isinstance(script, str), f"it returned {type(script).__name__}", "The script's text.")
    expect(script.startswith("#!"), f"the script begins with {script[:20]!r}", "sbatch refuses "
           "what does not begin with #! and a shell: nothing may stand before it.")
    found, is_over = {}, False
    for line in script.splitlines():
        if not line.startswith("#SBATCH"):
            is_over = is_over or bool(line.strip()) and not line.lstrip().startswith("#")
            continue
        expect(not is_over, f"{line!r} comes after the first command", "There sbatch does not read "
               "options any more.")
        expect("$" not in line, f"{line!r} has a variable", "sbatch expands none: write the value.")
        words = shlex.split(line[len("#SBATCH"):], comments=True)
        while words:
            word = words.pop(0)
            name, has_value, value = word[2:].partition("=")
            if not word.startswith("--"):
                name, has_value, value = SHORT.get(word[1:2], word), word[2:], word[2:]
            expect(name in FLAGS or name in VALUES, f"sbatch knows no option {word!r}",
                   "man sbatch has them all.")
            found[name] = value if has_value or name in FLAGS else (words or [""]).pop(0)
    return found


def minutes(text):
    """Of --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, ..."""
    days, is_long, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not is_long and len(parts) < 3:
        parts = [0, *parts]
    hours, mins, seconds = (parts + [0, 0])[:3]
    return (int(days or 0) * 24 + hours) * 60 + mins + seconds / 60


@dataclass
class Ran:
    """What a script did: its exit code, and the lines of the stub's log."""

    code: int
    events: list
    said: str

    def of(self, what):
        return [event for event in self.events if event["what"] == what]


def run(script, job, restarts=None, number=4711, signalled="", **way):
    """The script on job.nodes hosts; `way` is for the stub, `signalled` of #SBATCH --signal."""
    folder = Path(tempfile.mkdtemp(prefix="sbatch-"))
    try:
        return _run(folder, script, job, restarts, number, signalled, way)
    finally:
        slurm_stub.send(folder, "KILL")  # every task has a session of its own
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder, script, job, restarts, number, signalled, way):
    (folder / "bin").mkdir()
    (folder / "log").touch()
    (folder / "way.json").write_text(json.dumps(way))
    (folder / "job.sh").write_text(script)
    for name in COMMANDS:
        path = folder / "bin" / name
        path.write_text("#!/bin/sh\nexec " + shlex.join(
            [sys.executable, "-IS", slurm_stub.__file__, str(folder), name]) + ' "$@"\n')
        path.chmod(0o755)
    options = header(script)
    hosts = ",".join(list(slurm_stub.hosts(NODELIST))[:job.nodes])
    slurm = {"JOB_ID": number, "JOBID": number, "NNODES": job.nodes, "JOB_NUM_NODES": job.nodes,
             "JOB_NODELIST": NODELIST if job.nodes == 4 else hosts, "NTASKS": job.nodes,
             "NTASKS_PER_NODE": 1, "JOB_NAME": job.name, "SUBMIT_DIR": folder, "NODEID": 0,
             "GPUS_PER_NODE": job.gpus, "GPUS_ON_NODE": job.gpus, "PROCID": 0, "LOCALID": 0}
    slurm["NODELIST"] = slurm["JOB_NODELIST"]
    if "cpus-per-task" in options:
        slurm["CPUS_PER_TASK"] = options["cpus-per-task"]
    if restarts is not None:
        slurm["RESTART_COUNT"] = restarts
    environment = {"PATH": f"{folder}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(folder),
                   "SLURMD_NODENAME": HEAD, "LANG": "C.UTF-8"}
    environment |= {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    shell = "sh" if re.match(r"#!\s*\S*/(env +)?(sh|dash)\b", script) else "bash"
    with open(folder / "said", "w+", encoding="utf-8") as said:
        process = subprocess.Popen([shell, "job.sh"], cwd=folder, env=environment, stdout=said,
                                   stderr=said, start_new_session=True)
        try:
            if signalled:
                _signal(folder, process, job, signalled)
            code = process.wait((4 if signalled else 10) * patience())
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        said.seek(0)
        return Ran(code, slurm_stub.events(folder), said.read())


def _signal(folder, process, job, signalled):
    """When all agents are up: to the batch shell alone, or to all processes of all tasks."""
    until = time.monotonic() + 10 * patience()
    while (sum(event["what"] == "torchrun" for event in slurm_stub.events(folder)) < job.nodes
           and process.poll() is None and time.monotonic() < until):
        time.sleep(0.01)
    where, _, name = signalled.rpartition(":")
    name = name.partition("@")[0].upper().removeprefix("SIG")
    if "B" in where.upper():
        number = int(name) if name.isdigit() else getattr(slurm_stub.signal, f"SIG{name}")
        os.kill(process.pid, number)
    else:
        slurm_stub.send(folder, name)


def torchrun_options(event):
    """What torchrun makes of its options and of PET_ variables, by its own parser."""
    from torch.distributed.run import get_args_parser

    said, own = io.StringIO(), {name: text for name, text in event["environment"].items()
                                if name.startswith("PET_")}
    with contextlib.redirect_stderr(said), mock.patch.dict(os.environ, own):
        try:
            return get_args_parser().parse_args(event["arguments"])
        except SystemExit:
            raise Mistake(f"torchrun does not take {shlex.join(event['arguments'])}",
                          said.getvalue().strip().splitlines()[-1]) from None
