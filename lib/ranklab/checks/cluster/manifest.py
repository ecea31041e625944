"""The check of train_job_manifest: by the CRDs' schemas, and by what Kubernetes does with it."""

import copy
import json
import os
import re
import shlex
from dataclasses import replace
from functools import partial
from unittest import mock

from ranklab.checks.beside import expect, refused
from ranklab.checks.cluster.batch_run import torchrun_options
from ranklab.cluster.job import Job
from ranklab.cluster.manifest import invalid

LARGE = Job("gpt-70b", 4, 8, ("-m", "train", "--size", "70b"), 7, minutes=1530, save_seconds=240,
            restarts=2, requeues=5, image="example.org/train:26.1",
            environment=(("STEPS", "100"), ("NOTE", "a b, it's")))
SMALL = Job("a", 1, 2, ("train.py", "--note", "two words"), 3, minutes=20, save_seconds=45,
            restarts=0, requeues=0, interface="ib0", image="x")
JOB = {"parallelism": "All of job.nodes pods run at once.", "completions": "Each of job.nodes pods "
       "must end well.", "backoffLimit": "0: a pod that is made anew by its Job (6 times by "
       "default) would meet ranks of another life; the JobSet begins all anew.", 
       "activeDeadlineSeconds": "Seconds: 60 * job.minutes."}


def amount(quantity):
    """A quantity of Kubernetes as a number: 8, "8", "8000m"; None where there is none."""
    text = str(quantity)
    return None if quantity is None else (
        float(text[:-1]) / 1000 if text.endswith("m") else float(text))


def arguments(container, environment):
    """What is run, as a list: $(NAME) filled in by Kubernetes, $NAME by a shell."""
    words = [re.sub(r"\$\((\w+)\)", lambda name: environment.get(name[1], name[0]), word)
             for word in [*container.get("command", []), *container.get("args", [])]]
    if os.path.basename(words[0]) in ("bash", "sh") and re.fullmatch(r"-\w*c", words[1]):
        with mock.patch.dict(os.environ, environment):
            words = shlex.split(os.path.expandvars(words[2]))
    return words[1:] if words[:1] == ["exec"] else words


def check_container(container, resources, job, kind):
    """The options that torchrun gets; all else is as the job says."""
    environment = {each["name"]: each.get("value") for each in container.get("env", [])}
    names = [name for name in environment if name.startswith("PET_")]
    expect(kind == "JobSet" or not names, f"{kind}: {names} in env", "Trainer refuses them: it "
           "sets them itself.")
    wanted = dict(job.environment) | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds)}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted[name] = job.interface or None
    for name, text in wanted.items():
        expect(environment.get(name) == text, f"{kind}: {name} is {environment.get(name)!r}, not "
               f"{text!r}", "Of job.environment, job.interface (both names, or none of them) and "
               "job.save_seconds.")
    expect(container.get("image") == job.image, f"{kind}: image is {container.get('image')!r}", "")
    limits, requests = (resources.get(each, {}) for each in ("limits", "requests"))
    gpus = amount(limits.get("nvidia.com/gpu")), amount(requests.get("nvidia.com/gpu"))
    expect(gpus[0] == job.gpus, f"{kind}: a pod's limit is {gpus[0]} GPUs, not {job.gpus}",
           "limits, nvidia.com/gpu, of one node: without a limit Kubernetes gives none.")
    expect(gpus[1] in (None, job.gpus), f"{kind}: {gpus[1]} GPUs requested, with a limit of "
           f"{gpus[0]}", "Of GPUs the request must equal the limit.")
    cpus = amount(requests.get("cpu", limits.get("cpu")))
    expect(cpus == job.cpus * job.gpus, f"{kind}: {cpus} CPUs requested, not {job.cpus * job.gpus}",
           "job.cpus for each GPU of the pod.")
    words = arguments(container, environment)
    is_module = words[1:3] == ["-m", "torch.distributed.run"]
    expect(is_module or words[:1] == ["torchrun"], f"{kind}: it runs {words[:3]}", "torchrun and "
           "its options, then job.command.")
    found = torchrun_options({"arguments": words[3 if is_module else 1:],
                              "environment": environment})
    got = ["-m"] * found.module + [found.training_script, *found.training_script_args]
    expect(got == list(job.command), f"{kind}: ranks run {got}, not {list(job.command)}", "A list "
           "has no shell that splits it: give each word as it is.")
    expect(found.max_restarts == job.restarts, f"{kind}: --max-restarts is {found.max_restarts}, "
           f"not {job.restarts}", "job.restarts are torchrun's; job.requeues are the JobSet's.")
    return found


def check_ranks(found, job, kind, told):
    """torchrun knows how many ranks there are: by options, or, not `told`, by PET_ variables."""
    for name, number, default, right in (("--nnodes", found.nnodes, "1:1", job.nodes),
                                         ("--nproc-per-node", found.nproc_per_node, "1", job.gpus)):
        is_right = number.removeprefix(f"{right}:") == str(right)
        expect(is_right or (not told and number == default), f"{kind}: {name} is {number}, not "
               f"{right}", f"{job.nodes} pods of {job.gpus} ranks.")


def check_train_job(manifest, job):
    spec = manifest["spec"]
    trainer, runtime = spec.get("trainer", {}), spec["runtimeRef"].get("name")
    expect(runtime == "torch-distributed", f"TrainJob: runtimeRef.name is {runtime!r}", "")
    for name, right in (("numNodes", job.nodes), ("numProcPerNode", job.gpus)):
        expect(trainer.get(name) == right, f"TrainJob: {name} is {trainer.get(name)}, not {right}",
               "Nodes, and ranks of one node.")
    seconds = spec.get("activeDeadlineSeconds")
    expect(seconds == 60 * job.minutes, "TrainJob: activeDeadlineSeconds "
           f"is {seconds}, not {60 * job.minutes}", JOB["activeDeadlineSeconds"])
    found = check_container(trainer, trainer.get("resourcesPerNode", {}), job, "TrainJob")
    check_ranks(found, job, "TrainJob", told=False)
    expect(not found.rdzv_endpoint, f"TrainJob: --rdzv-endpoint={found.rdzv_endpoint}", "Kubeflow "
           "sets PET_MASTER_ADDR and PET_MASTER_PORT.")


def check_job_set(manifest, job):
    spec = manifest["spec"]
    jobs = spec.get("replicatedJobs", [])
    names = [(each["name"], each.get("replicas", 1)) for each in jobs]
    expect(names == [("node", 1)], f"JobSet: replicated jobs and replicas are {names}", "One, "
           "called node, of one replica: a Job with job.nodes pods. A replica is a whole Job.")
    restarts = spec.get("failurePolicy", {}).get("maxRestarts", 0)
    expect(restarts == job.requeues, f"JobSet: failurePolicy.maxRestarts is {restarts}, not "
           f"{job.requeues}", "It begins all anew: job.requeues. job.restarts are torchrun's.")
    inner = jobs[0]["template"]["spec"]
    for name, right in (("parallelism", job.nodes), ("completions", job.nodes), ("backoffLimit", 0),
                        ("activeDeadlineSeconds", 60 * job.minutes)):
        expect(inner.get(name) == right, f"JobSet: {name} is {inner.get(name)}, not {right}",
               JOB[name])
    mode = inner.get("completionMode", "Indexed")  # as JobSet's webhook sets it
    expect(mode == "Indexed", f"JobSet: completionMode is {mode}", "Only Indexed pods have names.")
    pod = inner["template"]["spec"]
    policy = pod.get("restartPolicy")
    expect(policy == "Never", f"JobSet: restartPolicy is {policy}",
           "Never: JobSet's default, OnFailure, starts a container again that others don't expect.")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    expect(grace == job.save_seconds, f"JobSet: a pod has {grace} s from SIGTERM to SIGKILL; to "
           f"save takes {job.save_seconds}", "terminationGracePeriodSeconds, of the pod.")
    container, = pod["containers"]
    expect(container["name"] == "node", f"JobSet: the container is {container['name']!r}", "node.")
    found = check_container(container, container.get("resources", {}), job, "JobSet")
    check_ranks(found, job, "JobSet", told=True)
    network = spec.get("network", {})
    expect(network.get("enableDNSHostnames", True), "JobSet: pods have no names", "")
    host, _, port = found.rdzv_endpoint.rpartition(":")
    name = f"{job.name}-node-0-0.{network.get('subdomain') or job.name}"
    expect(found.rdzv_backend == "c10d" and found.rdzv_id not in ("", "none"), "JobSet: rendezvous "
           f"{found.rdzv_backend!r}, id {found.rdzv_id!r}", "c10d, with an id of the job.")
    expect((host == name or host.startswith(f"{name}.")) and port.isdigit(), "JobSet: ranks meet "
           f"at {found.rdzv_endpoint!r}, not at {name}", "<set>-<replicated "
           "job>-<replica>-<pod>.<set>, and a port: the first pod's name.")


def check_train_job_manifest(train_job_manifest):
    for kind, look in (("TrainJob", check_train_job), ("JobSet", check_job_set)):
        for job in (LARGE, SMALL):
            manifest = train_job_manifest(job, kind=kind)
            expect(isinstance(manifest, dict), f"{kind}: it returned {type(manifest).__name__}",
                   "A dict: json or yaml writes it.")
            is_json = json.loads(json.dumps(manifest, default=repr)) == manifest
            expect(is_json, f"{kind}: JSON does not give it back as it is", "Keys are texts, and "
                   "lists are lists, not tuples.")
            wrong = invalid(manifest)
            expect(not wrong, f"{kind}, by its schema: {'; '.join(wrong[:2])[:300]}", "Kubernetes "
                   "refuses unknown fields, and a text where a number is due; in env a number.")
            name = manifest["metadata"].get("name")
            expect((manifest["kind"], name) == (kind, job.name), f"{kind}: kind "
                   f"{manifest['kind']}, name {name!r}", "metadata.name is the job's.")
            look(manifest, job)
        yield f"a {kind}, valid by its CRD's schema; its ranks, GPUs, image, command and times"
        first = copy.deepcopy(manifest)
        _spoil(manifest)
        expect(train_job_manifest(SMALL, kind=kind) == first, f"{kind}: a change of one manifest "
               "shows in the next", "Make lists and dicts anew in each call: a copy of a template "
               "is not deep.")
    yield "nothing is shared by two manifests"
    expect(train_job_manifest(SMALL)["kind"] == "TrainJob", "without kind: no TrainJob", "")
    for kind in ("TrainJob", "JobSet"):
        for what in ({"image": ""}, {"name": "GPT-70b"}, {"name": "gpt_70b"}, {"name": "70b"},
                     {"name": "gpt-"}, {"name": "g" * 41}, {"name": "gpt\n"}, {"name": ""}):
            call = partial(train_job_manifest, replace(LARGE, **what), kind)
            refused(f"{kind} of {what}", call)()
    refused("kind='Job'", partial(train_job_manifest, LARGE, "Job"))()
    yield "no image, a name that is no DNS label, another kind: a ValueError"


def _spoil(part):
    """Each list and dict in it gets one more."""
    for inner in list(part.values() if isinstance(part, dict) else part):
        if isinstance(inner, (dict, list)):
            _spoil(inner)
    part.update(spoilt=1) if isinstance(part, dict) else part.append("spoilt")
