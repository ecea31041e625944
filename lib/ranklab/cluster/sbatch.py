"""sbatch_script: a Job as a batch script for Slurm, which saves, requeues itself and resumes."""

import shlex


def sbatch_script(job):
    """Write a script for `sbatch` that runs the Job under torchrun, and requeues it if it fails.

    #SBATCH   long options: --job-name, --nodes, --ntasks-per-node=1, --gpus-per-node,
              --cpus-per-task (job.cpus for each GPU), --time in minutes, --requeue,
              --open-mode=append, --output with %j, the job's number, in it, and --signal=TERM@
              with job.save_seconds + 60: all ranks get a SIGTERM this many seconds before the
              end. The 60 after the longest save are for srun to end and for the requeue
    export    job.environment, whose values may contain any characters;
              TORCH_ELASTIC_SHUTDOWN_TIMEOUT (job.save_seconds); NCCL_SOCKET_IFNAME and
              GLOO_SOCKET_IFNAME (job.interface), or neither if there is no interface
    srun      starts `torchrun` itself on each node, with the same --cpus-per-task, with
              --kill-on-bad-exit=0 and --wait (job.save_seconds + 30)
    torchrun  --nnodes, --nproc-per-node, --max-restarts, --rdzv-backend=c10d, --rdzv-id (the job's
              number) and --rdzv-endpoint: the first host of $SLURM_JOB_NODELIST, a list such as
              "gpu[07,12-13],big2", and a port from 1024 to 65535 that differs from job to job,
              because two jobs may share a host. Then job.command
    the end   The script ends with srun's exit code. Before that, if the code is not 0 and
              SLURM_RESTART_COUNT (not set in the first run) is below job.requeues, it calls
              `scontrol requeue` with the job's number
    source    sbatch(1), srun(1), scontrol(1)
    Lab: 15
    """
    names = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] if job.interface else []
    variables = dict.fromkeys(names, job.interface) | dict(job.environment)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)
    exports = "\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items())
    cpus = job.cpus * job.gpus
    return f"""#!/bin/bash
#SBATCH --job-name={shlex.quote(job.name)} --output=%x-%j.log --open-mode=append --requeue
#SBATCH --nodes={job.nodes} --ntasks-per-node=1 --gpus-per-node={job.gpus} --cpus-per-task={cpus}
#SBATCH --time={job.minutes} --signal=TERM@{job.save_seconds + 60}
{exports}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait={job.save_seconds + 30} torchrun \\
    --nnodes={job.nodes} --nproc-per-node={job.gpus} --max-restarts={job.restarts} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" {shlex.join(job.command)}
code=$?
if [ "$code" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.requeues} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
