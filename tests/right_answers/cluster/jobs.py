"""Lab 15: right answers of another kind."""

import shlex

from ranklab.cluster.storage import StoragePlan


def sbatch_script__lines_of_sh(job):
    options = {"nodes": job.nodes, "ntasks-per-node": 1, "gpus-per-node": job.gpus,
               "cpus-per-task": job.cpus * job.gpus, "time": job.minutes, "open-mode": "append",
               "job-name": f'"{job.name}"', "output": "logs/%j.txt  # of each job", "mem": 0}
    lines = ["#!/bin/sh", *(f"#SBATCH --{name} {value}" for name, value in options.items()), "",
             "# a comment", f"#SBATCH --requeue --signal TERM@{job.save_seconds + 60}", "set -eu"]
    named = [*job.environment, ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{job.save_seconds}")]
    named += [(f"{name}_SOCKET_IFNAME", job.interface) for name in ("NCCL", "GLOO")
              if job.interface]
    for name, text in named:
        lines += [f"{name}=" + shlex.quote(text), f"export {name}"]
    agent = ["--nnodes", f"{job.nodes}:{job.nodes}", "--nproc_per_node", str(job.gpus),
             "--max_restarts", str(job.restarts), "--rdzv_backend", "c10d"]
    return "\n".join([*lines, f"""
for host in $(scontrol show hostname $SLURM_NODELIST); do break; done
port=$(expr 10000 + $SLURM_JOB_ID % 50000)
if srun --label --wait {job.save_seconds + 30} --kill-on-bad-exit=0 \\
    --cpus-per-task $SLURM_CPUS_PER_TASK torchrun --rdzv_id $SLURM_JOB_ID \\
    --rdzv_endpoint $host:$port {shlex.join([*agent, *job.command])}
then exit 0; else code=$?; fi
[ ${{SLURM_RESTART_COUNT-0}} -ge {job.requeues} ] || scontrol requeue $SLURM_JOB_ID || exit $code
exit $code
"""])


def sbatch_script__arrays_of_bash(job):
    env = "".join(f"declare -x {name}={shlex.quote(text)}\n" for name, text in job.environment)
    if job.interface:
        env += f"export NCCL_SOCKET_IFNAME={job.interface} GLOO_SOCKET_IFNAME={job.interface}\n"
    return f"""#!/usr/bin/env bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --cpus-per-task={job.gpus * job.cpus}
#SBATCH --time={job.minutes}
#SBATCH --signal=TERM@{job.save_seconds + 60}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -uo pipefail
{env}export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.save_seconds}
mapfile -t hosts < <(scontrol show hostnames)
agent=(torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={job.gpus} --rdzv-backend=c10d
       --max-restarts={job.restarts} --rdzv-id="$SLURM_JOB_ID"
       --rdzv-endpoint="${{hosts[0]}}:$(( 1024 + SLURM_JOB_ID % 60000 ))")
srun --cpus-per-task={job.gpus * job.cpus} --kill-on-bad-exit=0 --wait={job.save_seconds + 30} \\
    "${{agent[@]}}" {" ".join(map(shlex.quote, job.command))} || {{
    status=$?
    (( ${{SLURM_RESTART_COUNT:-0}} >= {job.requeues} )) || scontrol requeue "$SLURM_JOB_ID"
    exit $status
}}
"""


def train_job_manifest__options_as_arguments(job, kind="TrainJob"):
    if not job.image or kind not in ("JobSet", "TrainJob"):
        raise ValueError(kind)
    env = [dict(value=value, name=name) for name, value in job.environment]
    for prefix in ("NCCL", "GLOO") if job.interface else ():
        env.append({"name": prefix + "_SOCKET_IFNAME", "value": job.interface})
    env.append({"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": f"{job.save_seconds}"})
    each = {"nvidia.com/gpu": str(job.gpus), "cpu": str(job.gpus * job.cpus)}
    resources = {"requests": dict(each), "limits": dict(each)}
    out = {"kind": kind, "metadata": {"name": job.name, "labels": {"app": "train"}}}
    if kind == "TrainJob":
        return out | {"apiVersion": "trainer.kubeflow.org/v1alpha1", "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime",
                           "name": "torch-distributed"}, "activeDeadlineSeconds": job.minutes * 60,
            "trainer": {"numNodes": job.nodes, "numProcPerNode": job.gpus, "image": job.image,
                        "resourcesPerNode": resources, "env": env, "command": [
                            "torchrun", "--max_restarts", str(job.restarts), *job.command]}}}
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    container = {"name": "node", "image": job.image, "command": ["torchrun"], "env": env, "args": [
        f"--nnodes={job.nodes}:{job.nodes}", f"--nproc_per_node={job.gpus}", "--rdzv_backend=c10d",
        "--rdzv_id=0", f"--rdzv_endpoint={job.name}-node-0-0.{job.name}:3389",
        f"--max_restarts={job.restarts}", *job.command], "ports": [{"containerPort": 3389}],
        "resources": resources, "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    pod = {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": [shm],
                    "terminationGracePeriodSeconds": job.save_seconds}}
    return out | {"apiVersion": "jobset.x-k8s.io/v1alpha2", "spec": {
        "network": {"enableDNSHostnames": True}, "failurePolicy": {"maxRestarts": job.requeues},
        "replicatedJobs": [{"name": "node", "template": {"spec": {
            "backoffLimit": 0, "completions": job.nodes, "parallelism": job.nodes,
            "completionMode": "Indexed", "activeDeadlineSeconds": job.minutes * 60,
            "template": pod}}}]}}


def storage_plan__by_rates(load, system):
    link, ranks = min(load.link, system.client), load.nodes * load.gpus
    speed = {"link": link * (load.nodes if load.sharded else 1) / load.checkpoint,
             "file system": system.write / load.checkpoint,
             "metadata": system.operations / (ranks if load.sharded else 1)}
    total = load.checkpoint * (load.copies if load.sharded else load.nodes)
    again = {"link": link * load.nodes / total, "file system": system.read / total,
             "metadata": system.operations / (ranks * load.copies if load.sharded else load.nodes)}
    save_bound, restart_bound = min(speed, key=speed.get), min(again, key=again.get)
    save = 1 / speed[save_bound]
    data = load.data / min(link * load.nodes, system.read)
    share = data + (save / load.interval if load.background else 0)  # of an interval
    turn = max(1, share) + (0 if load.background else save / load.interval)
    return StoragePlan(save, save_bound, 1 / again[restart_bound], restart_bound, share <= 1,
                       (turn - 1) / turn)
