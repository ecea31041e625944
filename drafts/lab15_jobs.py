# %% [markdown]
# ### 4.1 A batch script that comes back
# > difficulty 3/5 · importance 5/5 · 30 minutes · about 20 lines
#
# **Predict.** torchrun may restart all ranks 3 times, and Slurm may requeue the job 10 times. How often do the ranks start, at most?

# %%
check(cluster_starts=...)

# %% [markdown]
# Slurm gives a job its nodes and runs the *batch script* on the first of them. Its `#SBATCH` lines are read before: they are no shell, and sbatch stops at the first command. In the script, `srun` starts a *task* on each node; here a task is a torchrun, which starts the node's ranks. A job ends in one of three ways: all is done, something failed, or the time is up. After the last two the run should be saved, and the job should go back into the queue.
#
# The difficult part is the signals: which process gets which, and how long it may live after that. This is what the man pages and a real Slurm 22.05 with two nodes say:
#
# | what is done | what the ranks see |
# |---|---|
# | `--signal=TERM@300` | SIGTERM, 300 s before the end (up to a minute earlier) |
# | `--signal=B:TERM@300` | nothing: only the batch shell gets it |
# | `kill -TERM` of srun's process | SIGKILL at once: "srun: forcing job termination" |
# | `scontrol requeue` while they run | SIGTERM, and SIGKILL after KillWait (30 s by default) |
# | `srun --kill-on-bad-exit=1`, one host has saved and ended with 1 | on the others SIGTERM, and SIGKILL after KillWait, in the middle of their save |
# | `srun --wait=330`, the same | the others have 330 s |
#
# After a SIGTERM torchrun gives its ranks 30 s, unless `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` says more. When they have saved, it ends with 1, and so does srun: the script sees a failure like any other, and requeues the job.
#
# Four more traps:
#
# - Since Slurm 22.05 srun does not take `--cpus-per-task` over from sbatch. Without it 8 ranks and their data loaders share one CPU.
# - Slurm writes a list of hosts as `gpu[07,12-13],big2`. `scontrol show hostnames "$SLURM_JOB_NODELIST"` writes one name a line.
# - Two jobs of four GPUs may share a host of eight. With one port, the second meets the first. `$SLURM_JOB_ID` is known when the script runs, so bash computes the port: `$((20000 + SLURM_JOB_ID % 10000))`.
# - A value may hold blanks, quotes or `$`. `shlex.quote(text)` and `shlex.join(words)` write text that bash reads as it was.
#
# `Job` is given:

# %%
import inspect

print(inspect.getsource(Job))


# %%
def sbatch_script(job):
    """The text of a batch script for `sbatch`: the Job under torchrun, requeued where it fails.

    #SBATCH   long options: --job-name, --nodes, --ntasks-per-node=1, --gpus-per-node,
              --cpus-per-task (job.cpus for each GPU), --time in minutes, --requeue,
              --open-mode=append, --output with %j, the job's number, in it, and --signal=TERM@
              with job.save_seconds: all ranks get a SIGTERM so long before the end
    export    job.environment, whatever its values hold; TORCH_ELASTIC_SHUTDOWN_TIMEOUT
              (job.save_seconds); NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (job.interface), but
              neither of them without an interface
    srun      starts `torchrun` itself on each node, with the same --cpus-per-task, with
              --kill-on-bad-exit=0 and --wait (job.save_seconds + 30)
    torchrun  --nnodes, --nproc-per-node, --max-restarts, --rdzv-backend=c10d, --rdzv-id (the job's
              number), --rdzv-endpoint: the first host of $SLURM_JOB_NODELIST, a list as in
              "gpu[07,12-13],big2", and a port from 1024 to 65535 that differs from job to job,
              because two may share a host; then job.command
    the end   The exit code is srun's. If it is not 0, `scontrol requeue` gets the job's number
              first, while SLURM_RESTART_COUNT (not set in the first life) is below job.requeues
    source    sbatch(1), srun(1), scontrol(1)
    """
    raise NotImplementedError("exercise 4.1: about 20 lines")


# %%
sbatch_script = check(sbatch_script)

# %% [markdown]
# The check reads the options, and runs your text by bash. `srun` and `scontrol` in its PATH are stand-ins: they write down what they are asked, and srun fails when the check wants it. We ran this answer on a real Slurm 22.05.8, too: after a SIGTERM one host needed 12 s longer than the other, both saved, the job was requeued and went on. Yours, for lab 12's 10B:

# %% tags=["nbval-check-output"]
job = Job("gpt-10b", nodes=4, gpus=8, command=("-m", "ranklab.projects.hybrid", "--size", "10b"),
          interface="eth0", environment=(("DATA", "/data/my text"),))
print(sbatch_script(job))

# %% [markdown]
# ### 4.2 The same for Kubernetes
# > difficulty 3/5 · importance 4/5 · 25 minutes · about 25 lines
#
# **Predict.** A JobSet of 4 nodes with 8 GPUs each, `maxRestarts: 3`, in which a pod fails in each life. How many pods are made in all?

# %%
check(cluster_pods=...)

# %% [markdown]
# Kubernetes knows no ranks. Three things stand above each other:
#
# - A *Job* makes pods until enough of them have ended well. A pod that fails it makes anew, 6 times by default (`backoffLimit`), one by one. Ranks can't work like that: the others wait for the dead one, so all must begin anew.
# - A *JobSet* holds Jobs that fail and begin together (`maxRestarts`). It gives each pod a name that the others can find: `<set>-<replicated job>-<replica>-<pod>.<set>`. A rendezvous needs that. Without its end, the name of the set, the name is not found.
# - A *TrainJob* of Kubeflow Trainer says how many nodes and ranks, and no more. Its controller writes a JobSet from a *runtime*, which the cluster's owner keeps, and sets torchrun's options as variables: `PET_NNODES`, `PET_NPROC_PER_NODE`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`. Options of the command line would come before them. In `env` its webhook refuses them.
#
# Two defaults are traps. A pod has 30 s from SIGTERM to SIGKILL, whatever torchrun is told. And `restartPolicy` is OnFailure in a JobSet: a container starts again by itself, beside ranks of another life.
#
# Both kinds are custom resources, and their definitions (CRDs) bring a schema. `invalid(manifest)` asks it: `ranklab/cluster/schemas/` holds Kubeflow Trainer's and JobSet's own, trimmed. What a schema can't see, the check looks for: ranks, limits, times, names.

# %%
def train_job_manifest(job, kind="TrainJob"):
    """The Job as a dict for `kubectl apply -f`, valid by its CRD's schema: a TrainJob or a JobSet.

    both      metadata.name: job.name. image, command, args: job.image runs, without a shell,
              torchrun, --max-restarts, job.command. Resources: limits of nvidia.com/gpu (job.gpus),
              requests of cpu (job.cpus for each). env: job.environment;
              TORCH_ELASTIC_SHUTDOWN_TIMEOUT (job.save_seconds); the interface, but only if there is
              one, as NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME
    TrainJob  trainer.kubeflow.org/v1alpha1: runtimeRef to torch-distributed, activeDeadlineSeconds
              (job.minutes), and a trainer: numNodes, numProcPerNode, resourcesPerNode and what both
              have. Kubeflow tells torchrun by PET_NNODES and others how many ranks there are and
              where they meet: neither options nor env say it again
    JobSet    jobset.x-k8s.io/v1alpha2: failurePolicy.maxRestarts (job.requeues), one replicated
              job "node" of one replica. Its spec: parallelism and completions, a pod for each node,
              completionMode Indexed, backoffLimit 0, activeDeadlineSeconds. Its pods: restartPolicy
              Never, terminationGracePeriodSeconds (job.save_seconds), a container "node". torchrun
              gets --nnodes, --nproc-per-node, --rdzv-backend=c10d and --rdzv-endpoint: any port of
              the first pod, <set>-<replicated job>-<replica>-<pod>.<set>, with numbers from 0
    error     ValueError for another kind, and without an image
    """
    raise NotImplementedError("exercise 4.2: about 25 lines")


# %%
train_job_manifest = check(train_job_manifest)

# %% tags=["nbval-check-output"]
job = replace(job, image="example.org/ranklab:1")
for kind in ("TrainJob", "JobSet"):
    manifest = train_job_manifest(job, kind)
    print(f"{kind}: {len(json.dumps(manifest))} bytes of JSON;", invalid(manifest) or "valid")

spoilt = train_job_manifest(job)
spoilt["spec"]["trainer"]["nprocPerNode"] = spoilt["spec"]["trainer"].pop("numProcPerNode")
spoilt["spec"]["trainer"]["numNodes"] = "4"
print(*invalid(spoilt), sep="\n")

# %% [markdown]
# `kubectl apply -f` takes it as JSON. We had no cluster: both are validated, not run. Two things a TrainJob does not say here: how often all begins anew, and how long a pod may save. Both are the runtime's; `torch-distributed` as published leaves them at their defaults: never, and 30 s. A container's `/dev/shm` has 64 MB by default. Data loaders with workers want more: an `emptyDir` with `medium: Memory`, mounted there.

# %% [markdown]
# ### 4.3 What storage must do
# > difficulty 3/5 · importance 4/5 · 25 minutes · about 15 lines
#
# **Predict.** Llama 3 405B: 405.85 billion parameters, 14 bytes each in a checkpoint (bf16 weights, 12 of the optimizer). Its file system took 2 TB/s sustained, and 7 TB/s for a moment (arXiv 2407.21783, 3.3.1). How many seconds does a checkpoint take, sustained?

# %%
check(cluster_save_seconds=...)

# %% [markdown]
# Three things bound a save: a node's *link*; what the *file system* takes of all nodes together; and *metadata*, because somebody must enter each new file. The slowest counts. A plain NFS server is one machine with one link. Lustre spreads the bytes of a file over many servers, and has others for names. An object store has no folders, but a limit of requests for each prefix. Four examples, each at its published limit (`FileSystem.source` says where):

# %% tags=["nbval-check-output"]
for system in SYSTEMS:
    print(f"{system.name:44} {system.write / 1e9:8,.1f} GB/s, {system.operations:9,.0f} files/s")

# %%
print(inspect.getsource(Load))
print(inspect.getsource(StoragePlan))


# %%
def storage_plan(load, system):
    """The StoragePlan of a Load on a FileSystem.

    A save, or the read of a restart, takes as long as the slowest of three, which names the bound:
    "link"         all nodes that write or read, at once, each by load.link, at most system.client
    "file system"  the bytes of all nodes, by its write or read
    "metadata"     the files that are created, or opened by all ranks, by its operations
    fits  While it works the job reads an interval's data, through links and file system as above.
          In the background it also writes a save, after the data. Both take an interval at most
    lost  A turn takes an interval, or what is beside the work, if that is longer; then a save,
          unless it is in the background. Lost is the share of the turn that is not the interval
    """
    raise NotImplementedError("exercise 4.3: about 15 lines")


# %%
storage_plan = check(storage_plan)

# %% [markdown]
# Llama 3's checkpoint on all four, by your plan, every 20 minutes, with a link of 25 GB/s a node (our assumption: 200 Gb/s). At 400 TFLOP/s and 6 FLOPs a parameter and token, 16,384 GPUs read 2.7 million tokens a second; of 4 bytes each, these are 11 MB/s. Text is nothing; the checkpoint is all.

# %% tags=["nbval-check-output"]
llama = Load(nodes=2048, gpus=8, link=25e9, checkpoint=14 * 405.85e9, interval=1200, data=1.1e7)
for sharded in (True, False):
    print("each rank writes its shard" if sharded else "one rank writes all")
    for system in SYSTEMS:
        plan = storage_plan(replace(llama, sharded=sharded), system)
        print(f"  {system.name.partition(':')[0].partition(',')[0]:9} {plan}")

# %% [markdown]
# One writer needs minutes for what takes seconds. And its one file costs more at the restart: each of 2,048 nodes must read all of it. That is why checkpoints are sharded.
