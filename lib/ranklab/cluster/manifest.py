"""train_job_manifest: a Job as Kubernetes objects, a TrainJob or a JobSet."""

import json
from pathlib import Path


def train_job_manifest(job, kind="TrainJob"):
    """Return the Job as a dict for `kubectl apply -f`: a TrainJob or JobSet that fits its schema.

    both      metadata.name is job.name. image is job.image; command and args run torchrun with
              --max-restarts and job.command, without a shell. Resources have limits for
              nvidia.com/gpu (job.gpus) and requests for cpu (job.cpus for each GPU). env has
              job.environment, TORCH_ELASTIC_SHUTDOWN_TIMEOUT (job.save_seconds), and the interface,
              if there is one, as NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME
    TrainJob  trainer.kubeflow.org/v1alpha1: runtimeRef to torch-distributed, activeDeadlineSeconds
              (job.minutes), and a trainer, which has numNodes, numProcPerNode, resourcesPerNode and
              the fields above. Kubeflow tells torchrun how many ranks there are and where they meet
              (PET_NNODES and others), so set them neither in options nor in env
    JobSet    jobset.x-k8s.io/v1alpha2: failurePolicy.maxRestarts (job.requeues), and one replicated
              job "node" with one replica. Its spec has parallelism and completions (a pod for each
              node), completionMode Indexed, backoffLimit 0 and activeDeadlineSeconds. Its pods have
              restartPolicy Never, terminationGracePeriodSeconds (job.save_seconds) and a container
              "node". torchrun gets --nnodes, --nproc-per-node, --rdzv-backend=c10d and
              --rdzv-endpoint: any port of the first pod,
              <set>-<replicated job>-<replica>-<pod>.<set>, numbered from 0
    Raises: ValueError for any other kind, or if job.image is empty.
    Lab: 15
    """
    if kind not in ("TrainJob", "JobSet") or not job.image:
        raise ValueError(f"kind={kind!r}, image={job.image!r}: TrainJob or JobSet, with an image")
    names = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] if job.interface else []
    variables = dict.fromkeys(names, job.interface) | dict(job.environment)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)
    torchrun = ["torchrun", f"--max-restarts={job.restarts}"]
    container = {"image": job.image, "command": torchrun, "args": list(job.command),
                 "env": [{"name": name, "value": text} for name, text in variables.items()]}
    resources = {"limits": {"nvidia.com/gpu": job.gpus}, "requests": {"cpu": job.cpus * job.gpus}}
    head, limit = {"kind": kind, "metadata": {"name": job.name}}, 60 * job.minutes
    if kind == "TrainJob":
        return head | {"apiVersion": "trainer.kubeflow.org/v1alpha1", "spec": {
            "runtimeRef": {"name": "torch-distributed"}, "activeDeadlineSeconds": limit,
            "trainer": container | {"numNodes": job.nodes, "numProcPerNode": job.gpus,
                                    "resourcesPerNode": resources}}}
    torchrun += [f"--nnodes={job.nodes}", f"--nproc-per-node={job.gpus}", "--rdzv-backend=c10d",
                 f"--rdzv-endpoint={job.name}-node-0-0.{job.name}:29400"]
    pods = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.save_seconds,
            "containers": [container | {"name": "node", "resources": resources}]}
    nodes = {"parallelism": job.nodes, "completions": job.nodes, "completionMode": "Indexed",
             "backoffLimit": 0, "activeDeadlineSeconds": limit, "template": {"spec": pods}}
    return head | {"apiVersion": "jobset.x-k8s.io/v1alpha2", "spec": {
        "failurePolicy": {"maxRestarts": job.requeues},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}]}}


def invalid(manifest):
    """List the errors that the CRD's own schema finds in a manifest, as sentences; [] if valid.

    schemas/ holds the CRDs as JSON Schema: see scripts/trim_crds.py. A field that no CRD has is
    always found; the contents of fields that a training job seldom has, such as affinity, are not
    checked.
    """
    from jsonschema import Draft202012Validator  # comes with jupyterlab

    kind = manifest.get("kind", "") if isinstance(manifest, dict) else ""
    path = Path(__file__).with_name("schemas") / f"{str(kind).lower()}.json"
    if kind not in ("TrainJob", "JobSet"):
        return [f"kind is {kind!r}, not TrainJob or JobSet"]
    errors = Draft202012Validator(json.loads(path.read_text())).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.path)) or 'the manifest'}: {error.message}"
            for error in sorted(errors, key=lambda error: len(error.path))]
