"""The check of sbatch_script: its options are read, and its text is run by a shell."""

import re

from ranklab.checks.beside import expect
from ranklab.checks.cluster import batch_run
from ranklab.checks.cluster.torchrun import LARGE, SMALL, check_torchrun, compare, variables

READ = "Give it before the first command: sbatch reads no further."
LIVES = (
    (LARGE, 3, "Usual reasons: $? holds srun's exit code for the next command only; after set -e "
               "a script ends when srun fails; the limit is job.requeues, not job.restarts."),
    (LARGE, None, "In the first life SLURM_RESTART_COUNT is not set: ${SLURM_RESTART_COUNT:-0}."),
    (LARGE, 4, "Requeue job.requeues times, and no more."), (SMALL, None, "job.requeues may be 0."))


def check_options(script, job):
    found = batch_run.header(script)

    def unread(name):
        """READ if the option stands in a later #SBATCH line."""
        return READ * bool(re.search(rf"^#SBATCH.*--{name}\b", script, re.M))

    compare("#SBATCH", found, {f"--{name}": (value, hint) for name, value, hint in (
        ("job-name", job.name, unread("job-name")), ("nodes", job.nodes, unread("nodes")),
        ("ntasks-per-node", 1, "A task is a torchrun, which starts all ranks of its node."),
        ("gpus-per-node", job.gpus, unread("gpus-per-node")),
        ("cpus-per-task", job.cpus * job.gpus, "The task of a node is all of its ranks."),
        ("time", job.minutes, "A number alone is minutes."), ("requeue", "", unread("requeue")),
        ("open-mode", "append", "Without it a requeue truncates the output of the previous life."),
        ("signal", f"TERM@{job.save_seconds + 60}", "All processes of all tasks must get it, a "
         "minute earlier than a save needs. With B: the batch shell alone does."))})
    expect("%j" in found.get("--output", ""), f"#SBATCH: --output is {found.get('--output')!r}",
           "Without %j all jobs of one name write into one file.")


def check_start(ran, job, number):
    where = f"job {number} of {job.nodes} x {job.gpus} GPUs"
    at = [*ran.words, "torchrun"].index("torchrun")
    asked = batch_run.options(ran.words[:at])
    expect(at < len(ran.words) and "" not in asked, f"{where}: srun {' '.join(ran.words)}; the "
           f"shell says {ran.said!r}", "srun OPTIONS torchrun OPTIONS COMMAND" * bool(ran.words))
    compare(f"{where}: srun", asked, {
        "--cpus-per-task": (job.cpus * job.gpus, "In Slurm 22.05 to 23.02 srun does not take it "
                            "over from sbatch, and all ranks of a node would share one CPU."),
        "--kill-on-bad-exit": (0, "torchrun ends with 1 after a SIGTERM. With 1 the first host "
                                  "that has saved ends the others while they save."),
        "--wait": (job.save_seconds + 30, "How long the others may run when one has ended.")})
    compare(where, ran.variables, variables(job))
    found = check_torchrun(where, ran.words[at + 1:], job, {
        "--nnodes": (job.nodes, "All hosts of the job."),
        "--nproc-per-node": (job.gpus, "A rank for each GPU of the node."),
        "--rdzv-backend": ("c10d", "Hosts meet at one of them, and again after each restart."),
        "--rdzv-id": (number, "$SLURM_JOB_ID, which Slurm sets when the job runs.")})
    host, _, port = found["rdzv_endpoint"].rpartition(":")
    expect(host == batch_run.HEAD, f"{where}: ranks meet at {host!r}, not at {batch_run.HEAD!r}, "
           "the first host", 'scontrol show hostnames "$SLURM_JOB_NODELIST"')
    expect(port.isdigit() and 1024 <= int(port) < 65536, f"{where}: port {port!r}", "From 1024 to "
           "65535. Job numbers grow beyond that, so take a remainder.")
    expect((ran.code, ran.requeued) == (0, ""), f"{where}: srun ends with 0, the script with "
           f"{ran.code}, requeued: {ran.requeued!r}", "All is done: exit with 0, no requeue.")
    return port


def check_sbatch_script(sbatch_script):
    scripts = {job: sbatch_script(job) for job in (LARGE, SMALL)}
    for job, script in scripts.items():
        check_options(script, job)
    yield "#SBATCH lines ask for nodes, one task on each, GPUs, CPUs, time, signal, requeue, output"
    ports = [check_start(batch_run.run(scripts[job], job, number), job, number)
             for job, number in ((LARGE, 4711), (LARGE, 59965520), (SMALL, 59949999))]
    expect(ports[0] != ports[1], f"jobs 4711 and 59965520 meet at one port, {ports[0]}", "They may "
           "share a host: 20000 + SLURM_JOB_ID % 10000, say.")
    yield "run by a shell: a torchrun on each host; ranks, command and variables are the job's"
    for job, restarts, hint in LIVES:
        ran = batch_run.run(scripts[job], job, restarts=restarts, code=7)
        where = f"srun ends with 7, after {restarts or 0} requeues of {job.requeues}"
        right = "4711" if (restarts or 0) < job.requeues else ""
        expect(ran.requeued == right, f"{where}: it requeues {ran.requeued!r}, not {right!r}; the "
               f"shell says {ran.said!r}", "" if right and ran.requeued else hint)
        expect(right or ran.code == 7, f"{where}: the script ends with {ran.code}", "Exit with "
               "srun's code, taken in the next command: each command changes $?.")
    yield "srun fails: requeued, 4 times and no more; then the script ends with srun's exit code"
