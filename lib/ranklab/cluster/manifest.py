"""train_job_manifest: a Job as Kubernetes objects, a TrainJob or a JobSet."""

import json
import re
from pathlib import Path


def train_job_manifest(job, kind="TrainJob"):
    """The Job as a dict, for `json.dump` and `kubectl apply -f`: a TrainJob or a JobSet.

    Both      metadata.name is the job's. Its image runs torchrun with --max-restarts and the job's
              command. Each pod has job.gpus of nvidia.com/gpu as its limit, and requests job.cpus
              CPUs for each. env: job.environment; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with
              an interface, and not without; TORCH_ELASTIC_SHUTDOWN_TIMEOUT, job.save_seconds.
              activeDeadlineSeconds is of the whole TrainJob, or of each of the JobSet's lives
    TrainJob  trainer.kubeflow.org/v1alpha1, of the runtime torch-distributed: numNodes,
              numProcPerNode, resourcesPerNode. Kubeflow tells torchrun by variables (PET_NNODES,
              ...) how many ranks there are, and where they meet: say nothing about it. How often
              all begins anew is the runtime's affair: job.requeues is not used
    JobSet    jobset.x-k8s.io/v1alpha2: one replicated Job, "node", of one replica with job.nodes
              pods, all at once, Indexed; its container is "node", too. A pod that fails, fails its
              Job at once (backoffLimit 0, restartPolicy Never), and the set begins anew,
              job.requeues times at most. A pod that is ended has job.save_seconds to save. torchrun
              is told --nnodes, --nproc-per-node and a c10d rendezvous at the first pod: in a JobSet
              its name is <set>-<replicated job>-<replica>-<pod>.<set>, numbers from 0. Any port
    JSON: str, int, list and dict; values of env are texts; nothing is shared with another call.
    error     ValueError for another kind, without an image, and for a name that is no DNS label: of
              a-z, 0-9 and "-", from a letter to a letter or digit, at most 40 long, so that names
              of pods have 63 at most
    source    the schemas in schemas/, and JobSet's and Trainer's own examples
    lab       15
    """
    if kind not in ("TrainJob", "JobSet"):
        raise ValueError(f'kind={kind!r} must be "TrainJob" or "JobSet"')
    if not job.image or not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", job.name):
        raise ValueError(f"image={job.image!r} and name={job.name!r}: Kubernetes needs an image, "
                         "and a name of a-z, 0-9 and -, at most 40 long")
    names = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] if job.interface else []
    variables = dict.fromkeys(names, job.interface) | dict(job.environment)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)
    torchrun = ["torchrun", f"--max-restarts={job.restarts}"]
    container = {"image": job.image,
                 "env": [{"name": name, "value": text} for name, text in variables.items()]}
    resources = {"limits": {"nvidia.com/gpu": job.gpus}, "requests": {"cpu": job.cpus * job.gpus}}
    deadline = {"activeDeadlineSeconds": 60 * job.minutes}
    if kind == "TrainJob":
        container |= {"command": torchrun, "args": list(job.command)}
        spec = deadline | {"runtimeRef": {"name": "torch-distributed"}, "trainer": container | {
            "numNodes": job.nodes, "numProcPerNode": job.gpus, "resourcesPerNode": resources}}
        return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": kind,
                "metadata": {"name": job.name}, "spec": spec}
    torchrun += [f"--nnodes={job.nodes}", f"--nproc-per-node={job.gpus}", "--rdzv-backend=c10d",
                 f"--rdzv-id={job.name}", f"--rdzv-endpoint={job.name}-node-0-0.{job.name}:29400"]
    container |= {"name": "node", "command": torchrun, "args": list(job.command),
                  "resources": resources}
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
