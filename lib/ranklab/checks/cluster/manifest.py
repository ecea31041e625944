"""The check of train_job_manifest: by the CRDs' schemas, and field by field."""

import re
from dataclasses import replace
from functools import partial

from ranklab.checks.beside import expect, refused
from ranklab.checks.cluster.torchrun import LARGE, SMALL, check_torchrun, compare, variables
from ranklab.cluster.manifest import invalid

JOB = "spec.replicatedJobs.0.template.spec."
POD = f"{JOB}template.spec."
TOLD = "Kubeflow tells torchrun by PET_NNODES, PET_MASTER_ADDR and others."
MEETING = "--?(nnodes|nproc|rdzv|node.rank|master|standalone|local.addr)"
PODS = "A Job's completions and parallelism give a pod for each node, all at once."


def leaves(part, path=""):
    """{"spec.trainer.numNodes": 4, "spec.trainer.args.0": "-m", ...}"""
    if not isinstance(part, (dict, list)):
        return {path[:-1]: part}
    items = dict(part if isinstance(part, dict) else enumerate(part)).items()
    return {key: leaf for name, inner in items
            for key, leaf in leaves(inner, f"{path}{name}.").items()}


def of_train_job(job):
    """({field: (value, hint)}, {torchrun's option: (value, hint)})"""
    return {"spec.runtimeRef.name": ("torch-distributed", ""),
            "spec.trainer.numNodes": (job.nodes, "Nodes, each of them a pod."),
            "spec.trainer.numProcPerNode": (job.gpus, "Ranks of one node.")}, {}


def of_job_set(job):
    return {"spec.failurePolicy.maxRestarts": (job.requeues, "For the whole set: job.requeues."),
            "spec.replicatedJobs.0.name": ("node", "It is part of the first pod's name."),
            "spec.replicatedJobs.0.replicas": (1, "A replica is a Job; its pods are the nodes."),
            f"{JOB}parallelism": (job.nodes, PODS), f"{JOB}completions": (job.nodes, PODS),
            f"{JOB}completionMode": ("Indexed", "Only Indexed pods have names."),
            f"{JOB}backoffLimit": (0, "By default a Job makes 6 new pods, one by one."),
            f"{POD}restartPolicy": ("Never", "JobSet's default restarts a single container."),
            f"{POD}terminationGracePeriodSeconds": (job.save_seconds, "Without it a pod has 30 s."),
            f"{POD}containers.0.name": ("node", "")}, {
            "--nnodes": (job.nodes, PODS), "--nproc-per-node": (job.gpus, "Ranks of one pod."),
            "--rdzv-backend": ("c10d", "Pods meet at one of them, in each life again.")}


KINDS = {"TrainJob": (of_train_job, "spec.", "spec.trainer.", "resourcesPerNode."),
         "JobSet": (of_job_set, JOB, f"{POD}containers.0.", "resources.")}


def check_manifest(manifest, job, kind):
    wrong, (special, spec, at, resources) = invalid(manifest), KINDS[kind]
    expect(not wrong, f"{kind}, by its schema: {'; '.join(wrong[:2])[:300]}", "Kubernetes refuses "
           "this: a field has another name or another type, or is missing.")
    fields, (right, told) = {"spec.replicatedJobs.0.replicas": 1} | leaves(manifest), special(job)
    compare(kind, fields, {"kind": (kind, ""), "metadata.name": (job.name, "")} | right | {
        f"{spec}activeDeadlineSeconds": (60 * job.minutes, "Seconds, not minutes, "
                                            f"in {spec[:-1]}."),
        f"{at}image": (job.image, ""), f"{at}{resources}requests.cpu": (
            job.cpus * job.gpus, "job.cpus for each GPU of the pod."),
        f"{at}{resources}limits.nvidia.com/gpu": (job.gpus, "Of one pod; without it, no GPU.")})
    names = [key for key in fields if key.startswith(f"{at}env.") and key.endswith(".name")]
    environment = {fields[key]: fields.get(f"{key[:-5]}.value") for key in names}
    compare(kind, environment, variables(job))
    expect(kind == "JobSet" or "PET_" not in str([*environment]), f"{kind}: PET_ variables in env",
           f"{TOLD} It refuses a TrainJob that sets them.")
    words = [fields[key] for part in ("command", "args") for key in fields
             if key.startswith(f"{at}{part}.")]
    expect(words[:1] == ["torchrun"], f"{kind}: it runs {words[:3]}", "The first word is torchrun.")
    own = [each for each in words[: -len(job.command)] if re.match(MEETING, str(each))]
    expect(kind == "JobSet" or not own, f"{kind}: torchrun has {' '.join(own)}",
           f"{TOLD} An option overrides that.")
    host, _, port = check_torchrun(kind, words[1:], job, told)["rdzv_endpoint"].rpartition(":")
    first = f"{job.name}-node-0-0.{job.name}"
    expect(kind == "TrainJob" or (host == first and port.isdigit()), "JobSet: ranks meet at "
           f"{host!r}, port {port!r}", f"At the first pod, {first}, and any port.")


def check_train_job_manifest(train_job_manifest):
    for kind in KINDS:
        for job in (LARGE, SMALL):
            check_manifest(train_job_manifest(job, kind=kind), job, kind)
        yield f"a {kind}, valid by its CRD's schema; its ranks, GPUs, image, command and times"
    compare("without kind", train_job_manifest(SMALL), {"kind": ("TrainJob", "")})
    for job, kind in ((LARGE, "Job"), (replace(LARGE, image=""), "JobSet")):
        refused(f"{kind}, image={job.image!r}", partial(train_job_manifest, job, kind))()
    yield "no image, another kind: a ValueError"
