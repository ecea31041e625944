"""Read a batch script's options, and run it in a shell, with stand-ins for Slurm's commands."""

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

from ranklab.engine.surroundings import patience

HEAD, LIST, HOSTS = "gpu07", "gpu[07,12-13],big2", "gpu07\ngpu12\ngpu13\nbig2"  # of one or four
COMMANDS = "scontrol", "srun", "scancel", "torchrun", "python", "python3", "sleep", "hostname"
STAND_IN = """#!/bin/sh
case "${0##*/} $1" in
    "scontrol show") [ "${3-$SLURM_NODELIST}" = "$SLURM_NODELIST" ] && echo "$STUB_HOSTS" ;;
    "scontrol requeue") printf %s "${2-no number}" >> requeued ;;
    hostname*) echo "$SLURMD_NODENAME" ;;
    torchrun*) echo alone >> alone ;;
    srun*) printf '%s\\0' "$@" > words; env -0 > variables; exit "$STUB_CODE" ;;
esac
"""


def options(words):
    """Parse the words into {--option: value}, with "=" or a blank between option and value.

    The key "" has the last of all other words.
    """
    values, name = {}, ""
    for word in words:
        if word.startswith("-"):
            name, has_value, word = word.partition("=")
            values[name] = word
            name = "" if has_value else name
        else:
            values[name], name = word, ""
    return values


def header(script):
    """Parse the options of the #SBATCH lines that sbatch reads."""
    lines = takewhile(lambda line: line.strip()[:1] in ("", "#"), script.splitlines())
    return options(word for line in lines if line.startswith("#SBATCH")
                   for word in shlex.split(line[7:], comments=True))


def run(script, job, number=4711, restarts=None, code=0):
    """Run the job's script with stand-ins for Slurm's commands, and return what it did.

    number, restarts: of the job, as Slurm would set them
    code: srun's exit code
    Returns: a namespace of its exit code, srun's words and variables, the number of the job that is
             requeued, whether torchrun ran without srun (alone), and what it printed (said)
    """
    slurm = {"JOB_ID": number, "JOBID": number, "JOB_NAME": job.name, "NNODES": job.nodes,
             "JOB_NUM_NODES": job.nodes, "NTASKS": job.nodes, "GPUS_ON_NODE": job.gpus,
             "CPUS_PER_TASK": job.cpus * job.gpus, "JOB_NODELIST": LIST if job.nodes > 1 else HEAD}
    slurm |= {"NODELIST": slurm["JOB_NODELIST"]}
    slurm |= {} if restarts is None else {"RESTART_COUNT": restarts}
    environment = {f"SLURM_{name}": str(value) for name, value in slurm.items()} | {
        "STUB_CODE": str(code), "STUB_HOSTS": HOSTS if job.nodes > 1 else HEAD,
        "SLURMD_NODENAME": HEAD, "LANG": "C.UTF-8"}
    with tempfile.TemporaryDirectory(prefix="sbatch-", ignore_cleanup_errors=True) as name:
        folder, files = Path(name), ("words", "variables", "requeued", "alone")
        for file in COMMANDS + files:
            (folder / file).write_text(STAND_IN if file in COMMANDS else "")
            (folder / file).chmod(0o755)
        status, output = _run(script, folder, environment | {
            "PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin", "HOME": "."})
        words, variables, requeued, alone = ((folder / file).read_text() for file in files)
        variables = dict(each.split("=", 1) for each in variables.split("\0")[:-1])
        return SimpleNamespace(code=status, words=words.split("\0")[:-1], variables=variables,
                               requeued=requeued, alone=bool(alone), said=output)


def _run(script, folder, environment):
    """Return (exit code, the end of its output); leave nothing of the script running."""
    (folder / "job.sh").write_text(script)
    shell = "sh" if re.match(r"#!\s*\S*/(env +)?(sh|dash)\b", script) else "bash"
    with open(folder / "said", "w+", encoding="utf-8") as output:
        process = subprocess.Popen([shell, "job.sh"], cwd=folder, env=environment, stdout=output,
                                   stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(10 * patience())
        except subprocess.TimeoutExpired:
            code = "none after 10 s, and srun ends at once"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        output.seek(0)
        return code, output.read()[-300:].strip()
