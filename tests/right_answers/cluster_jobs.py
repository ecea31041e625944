"""Lab 15: right answers of another kind."""

import math
import shlex

from ranklab.cluster.storage import StoragePlan


def sbatch_script__trap_and_arrays(job):
    lines = ["#!/usr/bin/env bash", f"#SBATCH -J {job.name} -N {job.nodes} -n {job.nodes}",
             f"#SBATCH -c {job.gpus * job.cpus}  # of one task",
             f"#SBATCH --gres=gpu:h100:{job.gpus}",
             f"#SBATCH -t {job.minutes // 1440}-{job.minutes // 60 % 24}:{job.minutes % 60}:00",
             f"#SBATCH --signal=B:USR1@{job.save_seconds + 60}", "", "#SBATCH --requeue",
             "#SBATCH --open-mode=append", "#SBATCH -o logs/%j.out", "#SBATCH --exclusive",
             "set -uo pipefail", "mkdir -p logs"]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in job.environment]
    if job.interface:
        lines += [f"export {name}_SOCKET_IFNAME={job.interface}" for name in ("NCCL", "GLOO")]
    pyxis = f"--container-image {shlex.quote(job.image)}" if job.image else ""
    lines.append(f"""
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
mapfile -t hosts < <(scontrol show hostnames)
port=$(( 10000 + SLURM_JOB_ID % 50000 ))
agent=(--nnodes "$SLURM_NNODES" --nproc_per_node {job.gpus} --max_restarts {job.restarts}
       --rdzv_backend c10d --rdzv_id "run-$SLURM_JOB_ID" --rdzv_endpoint "${{hosts[0]}}:$port"
       --shutdown-timeout {job.save_seconds + 10})
trap 'echo "saving"; scancel -s TERM "$SLURM_JOB_ID"' USR1
srun -W {job.save_seconds + 60} {pyxis} python -m torch.distributed.run "${{agent[@]}}" \\
    {shlex.join(job.command)} &
step=$!
while kill -0 $step 2>/dev/null; do wait $step; status=$?; done
wait $step; status=$?
if (( status )) && (( ${{SLURM_RESTART_COUNT-0}} < {job.requeues} )); then
    scontrol requeue "$SLURM_JOB_ID" && sleep 120
fi
exit $status
""")
    return "\n".join(lines)


def sbatch_script__by_variables(job):
    names = dict(job.environment) | {"PET_NNODES": job.nodes, "PET_NPROC_PER_NODE": job.gpus,
             "PET_MAX_RESTARTS": job.restarts, "PET_RDZV_BACKEND": "c10d", "SLURM_WAIT": 900,
             "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": job.save_seconds * 2}
    if job.interface:
        names |= {"NCCL_SOCKET_IFNAME": "=" + job.interface, "GLOO_SOCKET_IFNAME": job.interface}
    script = "#!/bin/sh\n"
    for option, value in (("nodes", f"{job.nodes}-{job.nodes}"), ("ntasks-per-node", 1),
                          ("job-name", f'"{job.name}"'), ("cpus-per-gpu", job.cpus),
                          ("gpus", job.gpus * job.nodes), ("time", f"{job.minutes}:00"),
                          ("signal", f"SIGTERM@{job.save_seconds}"), ("open-mode", "append")):
        script += f"#SBATCH --{option} {value}\n"
    script += "#SBATCH --output=job_%j.txt\n#SBATCH --requeue\n"
    for name, value in names.items():
        script += "export " + name + "=" + shlex.quote(str(value)) + "\n"
    image = ["--container-image=" + job.image] if job.image else []
    agent = 'exec torchrun --no-python python -u "$@"'
    run = shlex.join(["srun", "--label", *image, "bash", "-c", agent, "bash", *job.command])
    script += f"""export PET_RDZV_ENDPOINT=$SLURMD_NODENAME:$(expr 20000 + $SLURM_JOB_ID % 9999)
export PET_RDZV_ID=$SLURM_JOB_ID
if {run}; then exit 0; else code=$?; fi
[ ${{SLURM_RESTART_COUNT:-0}} -ge {job.requeues} ] || scontrol requeue $SLURM_JOB_ID || exit $code
exit $code
"""
    return script


def train_job_manifest__one_shell_line(job, kind="TrainJob"):
    good = set("abcdefghijklmnopqrstuvwxyz0123456789-")
    if not job.name or set(job.name) - good or not job.name[0].isalpha() or job.name[-1] == "-":
        raise ValueError(job.name)
    if len(job.name) > 40 or not job.image or kind not in ("JobSet", "TrainJob"):
        raise ValueError(kind)
    env = [dict(name=name, value=value) for name, value in job.environment]
    for prefix in ("NCCL", "GLOO") if job.interface else ():
        env.append({"name": prefix + "_SOCKET_IFNAME", "value": job.interface})
    env.append({"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": f"{job.save_seconds}"})
    each = {"nvidia.com/gpu": str(job.gpus), "cpu": f"{job.gpus * job.cpus}000m"}
    resources = {"requests": dict(each), "limits": dict(each)}
    out = {"kind": kind, "metadata": {"name": job.name, "labels": {"app": "train"}}}
    if kind == "TrainJob":
        return out | {"apiVersion": "trainer.kubeflow.org/v1alpha1", "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime",
                           "name": "torch-distributed"}, "activeDeadlineSeconds": job.minutes * 60,
            "trainer": {"numNodes": job.nodes, "numProcPerNode": job.gpus, "image": job.image,
                        "resourcesPerNode": resources, "env": env,
                        "command": ["torchrun", f"--max-restarts={job.restarts}",
                                    *job.command]}}}
    env += [{"name": "MASTER_ADDR", "value": f"{job.name}-node-0-0.{job.name}"},
            {"name": "MASTER_PORT", "value": "3389"}]
    line = (f"exec torchrun --nnodes={job.nodes} --nproc_per_node={job.gpus} --rdzv_backend=c10d "
            f"--rdzv_id={job.name} --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT --max_restarts="
            f"{job.restarts} {shlex.join(job.command)}")
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    container = {"name": "node", "image": job.image, "command": ["bash", "-c", line], "env": env,
                 "resources": resources, "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                 "ports": [{"containerPort": 3389}]}
    pod = {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": [shm],
                    "terminationGracePeriodSeconds": job.save_seconds}}
    return out | {"apiVersion": "jobset.x-k8s.io/v1alpha2", "spec": {
        "network": {"enableDNSHostnames": True}, "failurePolicy": {"maxRestarts": job.requeues},
        "replicatedJobs": [{"name": "node", "template": {"spec": {
            "backoffLimit": 0, "completions": job.nodes, "parallelism": job.nodes,
            "activeDeadlineSeconds": job.minutes * 60, "template": pod}}}]}}


def train_job_manifest__by_variables(job, kind="TrainJob"):
    manifest = train_job_manifest__one_shell_line(job, kind)
    if kind == "TrainJob":
        manifest["spec"]["trainer"]["command"] = ["torchrun"]
        manifest["spec"]["trainer"]["args"] = [f"--nnodes={job.nodes}:{job.nodes}",
                                               f"--max-restarts={job.restarts}", *job.command]
        return manifest
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    template["completionMode"] = "Indexed"
    container = template["template"]["spec"]["containers"][0]
    container["command"] = ["python3", "-m", "torch.distributed.run"]
    container["args"] = [
        "--nnodes", str(job.nodes), "--nproc-per-node", str(job.gpus), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{job.name}-node-0-0.{job.name}.default.svc:$(MASTER_PORT)",
        "--rdzv-id", "0", "--max-restarts", str(job.restarts), *job.command]
    return manifest


def storage_plan__part_by_part(load, system):
    ranks, rate = load.nodes * load.gpus, min(load.link, system.client)
    if load.writers == "all":
        writing, written, read, opened = load.nodes, ranks, load.copies, ranks * load.copies
    else:
        writing, written, read, opened = 1, 1, load.nodes, ranks
    saves = sorted([(load.checkpoint / min(rate * writing, math.inf), "link"),
                    (load.checkpoint / system.write, "file system"),
                    (written / system.operations, "metadata")])
    starts = sorted([(read * load.checkpoint / (rate * load.nodes), "link"),
                     (read * load.checkpoint / system.read, "file system"),
                     (opened / system.operations, "metadata")])
    save, bound = saves[-1]
    needs = load.interval * load.tokens_per_second * load.bytes_per_token
    busy = needs / min(rate * load.nodes, system.read) + (save if load.beside else 0)
    stands = max(0.0, busy - load.interval) + (0 if load.beside else save)
    return StoragePlan(save, bound, *starts[-1], busy <= load.interval,
                       stands / (load.interval + stands))


def storage_plan__by_rates(load, system):
    link, ranks = min(load.link, system.client), load.nodes * load.gpus
    shared = load.writers == "all"
    speed = {"link": link * (load.nodes if shared else 1) / load.checkpoint,
             "file system": system.write / load.checkpoint,
             "metadata": system.operations / (ranks if shared else 1)}
    total = load.checkpoint * (load.copies if shared else load.nodes)
    again = {"link": link * load.nodes / total, "file system": system.read / total,
             "metadata": system.operations / (ranks * load.copies if shared else ranks)}
    save_bound, restart_bound = min(speed, key=speed.get), min(again, key=again.get)
    save = 1 / speed[save_bound]
    data = load.tokens_per_second * load.bytes_per_token / min(link * load.nodes, system.read)
    share = data + (save / load.interval if load.beside else 0)  # of an interval
    turn = max(1, share) + (0 if load.beside else save / load.interval)
    return StoragePlan(save, save_bound, 1 / again[restart_bound], restart_bound, share <= 1,
                       (turn - 1) / turn)
