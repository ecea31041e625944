"""train_job_manifest: a Job as Kubernetes objects, a TrainJob or a JobSet."""

import json
import re
from pathlib import Path


def train_job_manifest(job, kind="TrainJob"):
    """The Job as a dict for `kubectl apply -f`, by json or yaml: a TrainJob or a JobSet.

    Both      job.image runs torchrun with --max-restarts and job.command. A pod's limit is job.gpus
              of nvidia.com/gpu, and it requests job.cpus CPUs for each. env: job.environment;
              NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with an interface, and not without;
              TORCH_ELASTIC_SHUTDOWN_TIMEOUT, job.save_seconds. activeDeadlineSeconds: job.minutes
    TrainJob  trainer.kubeflow.org/v1alpha1, of the runtime torch-distributed: numNodes,
              numProcPerNode, resourcesPerNode. Kubeflow tells torchrun by variables (PET_NNODES,
              ...) how many ranks there are and where they meet: don't. job.requeues: the runtime's
    JobSet    jobset.x-k8s.io/v1alpha2: one replicated Job "node" of one replica: job.nodes pods at
              once, Indexed, with one container "node". A pod that fails, fails its Job at once
              (backoffLimit 0, restartPolicy Never), and the set begins anew, job.requeues times at
              most. It has job.save_seconds from SIGTERM to SIGKILL. torchrun gets --nnodes,
              --nproc-per-node and a c10d rendezvous, any port, at the first pod, whose name in a
              JobSet is <set>-<replicated job>-<replica>-<pod>.<set>, with numbers from 0
    Of str, int, list and dict; values of env are texts; nothing is shared with another call.
    error     ValueError for another kind, without an image, and for a name that is no DNS label: of
              a-z, 0-9 and "-", from a letter to a letter or digit, at most 40 long (a pod's: 63)
    lab       15
    """
    is_label = re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", job.name)
    if kind not in ("TrainJob", "JobSet") or not job.image or not is_label:
        raise ValueError(f"kind={kind!r}, image={job.image!r}, name={job.name!r}: TrainJob or "
                         "JobSet, with an image, and a name of a-z, 0-9 and -, at most 40 long")
    names = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] if job.interface else []
    variables = dict.fromkeys(names, job.interface) | dict(job.environment)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)
    torchrun = ["torchrun", f"--max-restarts={job.restarts}"]
    container = {"image": job.image, "command": torchrun, "args": list(job.command),
                 "env": [{"name": name, "value": text} for name, text in variables.items()]}
    resources = {"limits": {"nvidia.com/gpu": job.gpus}, "requests": {"cpu": job.cpus * job.gpus}}
    deadline = {"activeDeadlineSeconds": 60 * job.minutes}
    if kind == "TrainJob":
        spec = deadline | {"runtimeRef": {"name": "torch-distributed"}, "trainer": container | {
            "numNodes": job.nodes, "numProcPerNode": job.gpus, "resourcesPerNode": resources}}
        return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": kind,
                "metadata": {"name": job.name}, "spec": spec}
    torchrun += [f"--nnodes={job.nodes}", f"--nproc-per-node={job.gpus}", "--rdzv-backend=c10d",
                 f"--rdzv-id={job.name}", f"--rdzv-endpoint={job.name}-node-0-0.{job.name}:29400"]
    container |= {"name": "node", "resources": resources}
    pods = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.save_seconds,
            "containers": [container]}
    template = {"spec": deadline | {"parallelism": job.nodes, "completions": job.nodes,
                "completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": pods}}}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": kind, "metadata": {"name": job.name},
            "spec": {"failurePolicy": {"maxRestarts": job.requeues}, "replicatedJobs": [
                {"name": "node", "replicas": 1, "template": template}]}}


def invalid(manifest):
    """What the CRD's own schema says against a manifest, a sentence each; [] where it is valid.

    schemas/ holds what a training job may use of the CRDs, as JSON Schema: see trim_crds.py in
    scripts/. A field that is right, but was left out there, is refused here.
    """
    from jsonschema import Draft202012Validator  # comes with jupyterlab

    kind = manifest.get("kind", "") if isinstance(manifest, dict) else ""
    path = Path(__file__).with_name("schemas") / f"{str(kind).lower()}.json"
    if kind not in ("TrainJob", "JobSet"):
        return [f"kind is {kind!r}, not TrainJob or JobSet"]
    found = Draft202012Validator(json.loads(path.read_text())).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.path)) or 'the manifest'}: {error.message}"
            for error in sorted(found, key=lambda error: len(error.path))]
