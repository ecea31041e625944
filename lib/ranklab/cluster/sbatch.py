"""sbatch_script: a Job as a batch script for Slurm, which saves, requeues itself and goes on."""

import shlex


def sbatch_script(job):
    """The text of a batch script for `sbatch`, which runs the Job under torchrun.

    options   --job-name, --nodes, --time; --ntasks-per-node=1; of each node job.gpus GPUs, and
              job.cpus CPUs for each GPU; --requeue, one --output with the job's number (%j) in its
              name, to which a requeue appends
    agents    srun starts one torchrun, found in the PATH, on each host, with all its CPUs: since
              Slurm 22.05 srun does not take them over. --rdzv-backend=c10d, and on all hosts one
              --rdzv-endpoint: the first host of the allocation, whose list is as in
              "gpu[07,12-13]", and a port that depends on the job's number, because jobs may share
              a host; one --rdzv-id of the job, and --max-restarts. No fixed list of hosts
    saving    job.save_seconds before the end all ranks get a SIGTERM: of --signal, or of scancel
              by the script. Then they have these seconds, on each host: torchrun's shutdown timeout
              is 30 s otherwise. srun waits as long when one agent has ended (--wait, at least 30
              s); then it ends the others, also where one has died
    requeue   whenever srun fails and all is saved, job.requeues times at most. Else the script
              ends with srun's exit code, also where scontrol can't requeue it
    the rest  job.environment, exported as it is, whatever it holds; NCCL_SOCKET_IFNAME and
              GLOO_SOCKET_IFNAME with an interface, and not without; srun's --container-image (of
              the pyxis plugin) with an image, as it stands
    source    sbatch(1), srun(1), scontrol(1)
    lab       15
    """
    names = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] if job.interface else []
    variables = dict.fromkeys(names, job.interface) | dict(job.environment)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)
    exports = "\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items())
    image = f"--container-image={shlex.quote(job.image)} " if job.image else ""
    return f"""#!/bin/bash
#SBATCH --job-name={shlex.quote(job.name)}
#SBATCH --nodes={job.nodes} --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus} --cpus-per-task={job.cpus * job.gpus}
#SBATCH --time={job.minutes} --signal=TERM@{job.save_seconds}
#SBATCH --requeue --open-mode=append --output=%x-%j.log

{exports}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task={job.cpus * job.gpus} --kill-on-bad-exit=0 \\
    --wait={max(30, job.save_seconds)} {image}torchrun \\
    --nnodes={job.nodes} --nproc-per-node={job.gpus} --max-restarts={job.restarts} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" {shlex.join(job.command)}
code=$?
if [ "$code" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.requeues} ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # until Slurm ends this script
fi
exit "$code"
"""
