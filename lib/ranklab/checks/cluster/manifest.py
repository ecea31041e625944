"""train_job_manifest: compared with the CRDs' schemas, and field by field."""

import re
from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.cluster.findings import finding
from ranklab.checks.cluster.torchrun import LARGE, SMALL, rank_environment, torchrun_options
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.cluster.job import Job
from ranklab.cluster.manifest import invalid, train_job_manifest

JOB = "spec.replicatedJobs.0.template.spec."
POD = f"{JOB}template.spec."
FIELDS = {  # kind: (fields of its own, where its container is, its resources, torchrun's options)
    "TrainJob": (["spec.runtimeRef.name", "spec.trainer.numNodes", "spec.trainer.numProcPerNode",
                  "spec.activeDeadlineSeconds"], "spec.trainer.", "resourcesPerNode.",
                 ["--max-restarts"]),
    "JobSet": (["spec.failurePolicy.maxRestarts", "spec.replicatedJobs.0.name",
                "spec.replicatedJobs.0.replicas", f"{JOB}parallelism", f"{JOB}completions",
                f"{JOB}completionMode", f"{JOB}backoffLimit", f"{JOB}activeDeadlineSeconds",
                f"{POD}restartPolicy", f"{POD}terminationGracePeriodSeconds",
                f"{POD}containers.0.name"], f"{POD}containers.0.", "resources.",
               ["--nnodes", "--nproc-per-node", "--rdzv-backend", "--max-restarts"])}
DEFAULTS = {"spec.replicatedJobs.0.replicas": 1}
MEETING = "--?(nnodes|nproc|rdzv|node.rank|master|standalone|local.addr)"


class Case(NamedTuple):
    """kind  None: not given"""

    job: Job
    kind: str | None

    def __str__(self):
        return f"{self.kind or 'without kind'}, {self.job.nodes} x {self.job.gpus} GPUs" + (
            ", no image" * (not self.job.image))


def leaves(part, path=""):
    """Flatten a manifest: {"spec.trainer.numNodes": 4, "spec.trainer.args.0": "-m", ...}."""
    if not isinstance(part, (dict, list)):
        return {path[:-1]: part}
    items = dict(part if isinstance(part, dict) else enumerate(part)).items()
    return {key: leaf for name, inner in items
            for key, leaf in leaves(inner, f"{path}{name}.").items()}


def _see(fn, case):
    manifest = fn(case.job, kind=case.kind) if case.kind else fn(case.job)
    errors, fields = invalid(manifest), DEFAULTS | leaves(manifest)
    own, container, resources, options = FIELDS.get(case.kind, FIELDS["TrainJob"])
    names = ["kind", "metadata.name", *own, f"{container}image",
             f"{container}{resources}requests.cpu", f"{container}{resources}limits.nvidia.com/gpu"]
    yield {"what its schema finds wrong": finding([each.partition(":")[0] for each in errors],
                                                  "; ".join(errors[:2])[:300]),
           **{name: str(fields[name]) if name in fields else None for name in names},
           **_environment(case, fields, f"{container}env."),
           **_command(case, fields, container, options)}


def _environment(case, fields, path):
    names = [key for key in fields if key.startswith(path) and key.endswith(".name")]
    environment = {fields[key]: fields.get(f"{key[:-5]}.value") for key in names}
    looked_at = rank_environment(case.job, environment)
    if case.kind != "JobSet":
        looked_at["what env tells torchrun"] = [
            name for name in environment if str(name).startswith("PET_")]
    return looked_at


def _command(case, fields, container, options):
    words = [fields[key] for part in ("command", "args") for key in fields
             if key.startswith(f"{container}{part}.")]
    by_torchrun, endpoint = torchrun_options(words[1:], options)
    host, _, port = endpoint.partition(":")
    meeting = [each for each in words[: -len(case.job.command)] if re.match(MEETING, str(each))]
    return {"the first word": words[0] if words else None} | (
        {"the host where pods meet": host, "the port there": finding(
            port.isdigit(), f"{port!r}, not a number")} if case.kind == "JobSet"
        else {"what the options say about nodes and rendezvous": meeting}) | by_torchrun


NUM_NODES, NUM_RANKS = '"numNodes": job.nodes', '"numProcPerNode": job.gpus'
LIMITS, CPU = '"limits": {"nvidia.com/gpu": job.gpus}', '{"cpu": job.cpus * job.gpus}'
BOTH = '"parallelism": job.nodes, "completions": job.nodes'
TORCHRUN, ARGS = '["torchrun", f"--max-restarts={job.restarts}"]', '"args": list(job.command)'
ENV, NAMED = " | dict(job.environment)", '["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]'
SHUTDOWN = 'variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)'
HOST, REPLICAS = "{job.name}-node-0-0.{job.name}:29400", '"replicas": 1'
MANIFEST = Proof(
    train_job_manifest,
    Stage("a TrainJob, valid by its CRD's schema; its ranks, GPUs, image, command and times", _see,
          (Case(SMALL, "TrainJob"), Case(LARGE, "TrainJob"))),
    Stage("a JobSet, valid by its CRD's schema; its ranks, GPUs, image, command and times", _see,
          (Case(SMALL, "JobSet"), Case(LARGE, "JobSet"))),
    Stage("a TrainJob without `kind`; a ValueError without an image, or for another kind", _see, (
        Case(SMALL, None), Case(LARGE, "Job"), Case(replace(LARGE, image=""), "JobSet"))),
    mistakes=(
        Slip("The schema has no such name: it has numNodes and numProcPerNode.",
             (NUM_RANKS, NUM_RANKS.replace("numProc", "nproc")),
             (NUM_NODES, NUM_NODES.replace("numNodes", "nnodes"))),
        Slip("numNodes counts nodes, and each node is one pod.",
             (NUM_NODES, '"numNodes": job.nodes * job.gpus')),
        Slip("numProcPerNode counts the ranks of one node.",
             (NUM_RANKS, '"numProcPerNode": job.nodes * job.gpus'),
             (NUM_RANKS, '"numProcPerNode": 1')),
        Slip("A pod needs GPUs and CPUs for all of its ranks.",
             (LIMITS, '"limits": {"nvidia.com/gpu": 1}'), (CPU, '{"cpu": job.cpus}')),
        Slip("A limit is for one pod, not for the whole job.",
             (LIMITS, '"limits": {"nvidia.com/gpu": job.nodes * job.gpus}')),
        Slip("Without a limit for nvidia.com/gpu, a pod gets no GPU.",
             (f'{LIMITS}, "requests": {{', '"requests": {"nvidia.com/gpu": job.gpus, ')),
        Slip("Request CPUs as well: requests.cpu.", (f', "requests": {CPU}', "")),
        Slip("activeDeadlineSeconds is in seconds, not minutes: 60 * job.minutes.",
             ("60 * job.minutes", "job.minutes")),
        Slip("A TrainJob has its own activeDeadlineSeconds: set spec.activeDeadlineSeconds.",
             ('"activeDeadlineSeconds": limit,\n            "trainer": container | {',
              '"trainer": container | {"activeDeadlineSeconds": limit, '),
             ('"activeDeadlineSeconds": limit,\n            ', "")),
        Slip("In a JobSet, activeDeadlineSeconds belongs in the Job's spec, next to backoffLimit.",
             ('"activeDeadlineSeconds": limit, "template"', '"template"'),
             ('"activeDeadlineSeconds": limit, "template"', '"template"',
              '"failurePolicy": {', '"activeDeadlineSeconds": limit, "failurePolicy": {')),
        Slip("The values in env are strings: str(job.save_seconds).",
             ("= str(job.save_seconds)", "= job.save_seconds")),
        Slip("env is a list of name-value pairs, not a dict.",
             ('[{"name": name, "value": text} for name, text in variables.items()]', "variables")),
        Slip("Each value of job.environment belongs in env as well.", (ENV, "")),
        Slip("No shell removes quotes here: give each value as it is.",
             (ENV, " | {name: repr(text) for name, text in job.environment}")),
        Slip("torchrun kills its ranks 30 s after a SIGTERM, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT "
             "gives them longer.", (SHUTDOWN, "pass")),
        Slip("If the job has no interface, set neither variable: empty is not the same as unset.",
             (f"{NAMED} if job.interface else []", NAMED)),
        Slip("NCCL and Gloo each read their own variable: set both.",
             (NAMED, '["NCCL_SOCKET_IFNAME"]'), (NAMED, '["GLOO_SOCKET_IFNAME"]')),
        Slip("Kubeflow configures torchrun through PET_NNODES, PET_MASTER_ADDR and others, and "
             "refuses a TrainJob that sets them.",
             (SHUTDOWN, f'{SHUTDOWN}\n    variables["PET_NNODES"] = str(job.nodes)')),
        Slip("Kubeflow configures a TrainJob's torchrun through PET_NNODES, PET_MASTER_ADDR and "
             "others: a command-line option overrides them.",
             (TORCHRUN, f'{TORCHRUN} + [f"--nnodes={{job.nodes}}"] * (kind != "JobSet")'),
             (TORCHRUN, f'{TORCHRUN} + ["--nnodes=1"] * (kind != "JobSet")'),
             (TORCHRUN, f'{TORCHRUN} + ["--nnodes=1"]'),
             (TORCHRUN, f'{TORCHRUN} + [f"--nnodes={{job.nodes}}"]'),
             (TORCHRUN, f'{TORCHRUN} + [f"--nproc-per-node={{job.gpus}}"]'),
             (TORCHRUN, f'{TORCHRUN} + [f"--nnodes={{job.nodes}}", '
              'f"--nproc-per-node={job.gpus}"]')),
        Slip("command and args are lists of words: nothing here splits a string into words.",
             (ARGS, '"args": [" ".join(job.command)]'), (ARGS, '"args": " ".join(job.command)'),
             (TORCHRUN, '[f"torchrun --max-restarts={job.restarts}"]')),
        Slip("The container runs torchrun directly, without a shell.",
             (f'"command": torchrun, {ARGS}',
              '"command": ["sh", "-c", " ".join([*torchrun, *job.command])]'),
             (f'"command": torchrun, {ARGS}',
              '"command": ["bash", "-c"], "args": [" ".join([*torchrun, *job.command])]')),
        Slip("torchrun starts the ranks; Python alone would be one process.",
             (TORCHRUN, '["python"]')),
        Slip("torchrun also needs the job's own command to run.", (f", {ARGS}", "")),
        Slip("job.restarts is for torchrun, which restarts the ranks; job.requeues is for the "
             "scheduler, which restarts the whole job.",
             (TORCHRUN, TORCHRUN.replace("restarts}", "requeues}")),
             ('"maxRestarts": job.requeues', '"maxRestarts": job.restarts')),
        Slip("Without --max-restarts torchrun restarts no rank.", (TORCHRUN, '["torchrun"]')),
        Slip("Without failurePolicy, a JobSet fails as soon as one pod fails: set maxRestarts to "
             "job.requeues.", ('"failurePolicy": {"maxRestarts": job.requeues},', "")),
        Slip("A replica is a whole Job, and its pods are the nodes: use one replica.",
             (REPLICAS, '"replicas": job.nodes'),
             (REPLICAS, '"replicas": job.nodes', BOTH, '"parallelism": 1, "completions": 1')),
        Slip("A Job's parallelism and completions must give one pod for each node, all at once.",
             (BOTH, '"parallelism": 1, "completions": job.nodes'),
             (BOTH, '"parallelism": job.nodes, "completions": 1'),
             (BOTH, '"parallelism": 1, "completions": 1'), (BOTH, '"completions": job.nodes'),
             (BOTH, '"parallelism": job.nodes')),
        Slip("There is one pod for each node, not for each GPU.",
             (BOTH, BOTH.replace("job.nodes", "job.nodes * job.gpus"))),
        Slip("Only the pods of an Indexed Job have predictable names.",
             ('"completionMode": "Indexed",', '"completionMode": "NonIndexed",'),
             ('"completionMode": "Indexed",', "")),
        Slip("By default a Job replaces up to 6 failed pods, one by one: set backoffLimit to 0.",
             ('"backoffLimit": 0, ', ""), ('"backoffLimit": 0', '"backoffLimit": 6')),
        Slip("failurePolicy counts the restarts: set the Job's backoffLimit to 0.",
             ('"backoffLimit": 0', '"backoffLimit": job.requeues')),
        Slip("A container that is restarted alone finds no other ranks to join: set restartPolicy "
             "to Never.",
             ('"restartPolicy": "Never", ', ""),
             ('"restartPolicy": "Never"', '"restartPolicy": "OnFailure"')),
        Slip("Without terminationGracePeriodSeconds, a pod has only 30 s to save.",
             ('"terminationGracePeriodSeconds": job.save_seconds,', "")),
        Slip("The first pod's name contains the name of the replicated job: node.",
             ('[{"name": "node", "replicas"', '[{"name": "workers", "replicas"')),
        Slip("The container must be called node.", ('{"name": "node", "resources"',
                                               '{"name": "trainer", "resources"')),
        Slip("Pods meet at the first pod, <set>-node-0-0.<set>: the last part is the set's name, "
             "which is also its service's name.", (HOST, "{job.name}-node-0-0:29400")),
        Slip("Pods meet at the first pod, <set>-node-0-0.<set>: the numbers are the replica's and "
             "the pod's.", (HOST, "{job.name}-node-0.{job.name}:29400")),
        Slip("All pods must meet at the same one, the first: in each pod, localhost means that pod "
             "itself.", (HOST, "localhost:29400"), (HOST, "127.0.0.1:29400")),
        Slip("The JobSet is called job.name.", (HOST, "train-node-0-0.train:29400")),
        Slip("Pods do not find each other by themselves: --rdzv-endpoint says where they meet.",
             (f'"--rdzv-backend=c10d",\n                 f"--rdzv-endpoint={HOST}"',
              '"--rdzv-backend=c10d"')),
        Slip("The endpoint is a host and a port, separated by a colon.", (":29400", "")),
        Slip("In a JobSet, torchrun knows nothing about the other pods: pass it --nnodes, "
             "--nproc-per-node and --rdzv-backend=c10d.", ('f"--nnodes={job.nodes}", ', ""),
             ('f"--nproc-per-node={job.gpus}", ', ""), ('"--rdzv-backend=c10d",', "")),
        Slip("--nnodes counts pods; --nproc-per-node counts the ranks of one pod.",
             ("--nnodes={job.nodes}", "--nnodes={job.nodes * job.gpus}"),
             ("--nproc-per-node={job.gpus}", "--nproc-per-node={job.nodes * job.gpus}")),
        Slip("metadata.name is job.name.", ('{"name": job.name}', '{"name": "train"}')),
        Slip("runtimeRef must name the runtime torch-distributed.",
             ('"runtimeRef": {"name": "torch-distributed"}, ', ""),
             ('{"name": "torch-distributed"}', '{"name": "torch"}')),
        Slip("Raise a ValueError for any other kind.",
             ('kind not in ("TrainJob", "JobSet") or ', "")),
        Slip("Raise a ValueError for a job without an image.", (" or not job.image", "")),
        Slip("Refuse with a ValueError.", ("raise ValueError(f", "raise RuntimeError(f"),
             ("raise ValueError(f", "assert False, (f")),
    ), hints=(
        "What counts the nodes, what starts the ranks, and what restarts them?",
        "A TrainJob only gives numbers, and Kubeflow makes a JobSet from them. In a JobSet you "
        "describe the pods yourself: spec.replicatedJobs[0].template is a Job, and its "
        "spec.template is a pod.",
        '{"failurePolicy": {"maxRestarts": job.requeues}, "replicatedJobs": [{"name": "node", '
        '"replicas": 1, "template": {"spec": {"parallelism": job.nodes, "completions": job.nodes, '
        '"completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": pods}}}}]}',
    ))
