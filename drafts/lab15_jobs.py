# %% [markdown]
# ### 4.1 A batch script
# > difficulty 4/5 · importance 5/5 · 30 minutes · about 20 lines
#
# **Predict.** torchrun may restart all ranks 3 times (`restarts=3`), and Slurm may requeue the job 10 times. How often do the ranks start, at most?

# %%
check(cluster_starts=...)

# %% [markdown]
# Slurm gives a job its nodes and runs the *batch script* on the first of them. `srun` starts a *task* on each; here a task is a torchrun, which starts the node's ranks. Three ends are usual: all is done; something failed; or the time is up. The last two are not the end: the run saves, and the job goes back into the queue.
#
# The difficulty is who gets which signal. We asked the man pages and a real Slurm 22.05 with two nodes:
#
# | what is done | what the ranks see |
# |---|---|
# | `--signal=TERM@300` | SIGTERM, 300 s before the end (at most a minute earlier) |
# | `--signal=B:TERM@300` | nothing: the batch shell alone gets it |
# | `kill -TERM` of srun's process | SIGKILL, at once: "srun: forcing job termination" |
# | `scancel --signal=TERM $SLURM_JOB_ID` | SIGTERM |
# | `scontrol requeue` while they run | SIGTERM, and SIGKILL after KillWait (30 s by default) |
# | `srun --kill-on-bad-exit=1`, one host has saved and ended with 1 | the others: SIGTERM, and SIGKILL after KillWait, in the middle of their save |
# | `srun --wait=30`, the same | the others have 30 s |
#
# And torchrun itself gives its ranks 30 s after a SIGTERM, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says more. `Job` is given:

# %%
import inspect

print(inspect.getsource(Job))


# %%
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
    """
    raise NotImplementedError("exercise 4.1: about 20 lines")


# %%
sbatch_script = check(sbatch_script)

# %% [markdown]
# The check runs your text by bash: `srun`, `scontrol`, `scancel` and `torchrun` in its PATH are stand-ins that write down what they are asked, fail, or take signals as the real ones do. So any script that does the right thing passes. Yours, for lab 12's 10B:

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
# Kubernetes knows no ranks. A *Job* makes pods until enough of them end well. A *JobSet* holds Jobs that begin and fail together, and gives each pod a name that others can find: without that there is no rendezvous. Kubeflow's *TrainJob* is shorter: it says how many nodes and ranks, and its controller writes the JobSet out of a runtime that the cluster's owner keeps.
#
# A manifest with a misspelt field is refused, if it is checked: a CRD (custom resource definition) brings its schema. Both schemas are in `ranklab/cluster/schemas/`, trimmed from Kubeflow Trainer's and JobSet's own. `invalid(manifest)` asks them. What a schema can't see, the check looks for: ranks, limits, times, names.

# %%
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
    """
    raise NotImplementedError("exercise 4.2: about 25 lines")


# %%
train_job_manifest = check(train_job_manifest)

# %% tags=["nbval-check-output"]
job = replace(job, image="example.org/ranklab:1")
for kind in ("TrainJob", "JobSet"):
    manifest = train_job_manifest(job, kind)
    print(f"{kind}: {len(json.dumps(manifest))} bytes of JSON, schema:", invalid(manifest) or "valid")

spoilt = train_job_manifest(job)
spoilt["spec"]["trainer"]["nprocPerNode"] = spoilt["spec"]["trainer"].pop("numProcPerNode")
spoilt["spec"]["trainer"]["numNodes"] = "4"
print(*invalid(spoilt), sep="\n")

# %% [markdown]
# `kubectl apply -f` takes it as JSON. No cluster was at hand here: both are validated, not run. A container's `/dev/shm` has 64 MB by default; data loaders with workers want more, by an `emptyDir` with `medium: Memory` mounted there.

# %% [markdown]
# ### 4.3 What storage must do
# > difficulty 3/5 · importance 4/5 · 25 minutes · about 15 lines
#
# **Predict.** Llama 3 405B: 405.85 billion parameters, 14 bytes each in a checkpoint (bf16 weights, 12 of the optimizer). Its file system took 2 TB/s sustained, and 7 TB/s for a moment (arXiv 2407.21783, 3.3.1). How many seconds does a checkpoint take, sustained?

# %%
check(cluster_save_seconds=...)

# %% [markdown]
# Three things bound a save: a node's *link*; what the *file system* takes of all nodes together; and *metadata*, since somebody must enter each file. A plain NFS server is one machine with one link. Lustre spreads a file's bytes over many servers, and has others for names. An object store has no folders, but a limit for requests of each prefix. Four examples, with their sources:

# %% tags=["nbval-check-output"]
for system in SYSTEMS:
    print(f"{system.name:44} {system.write / 1e9:6.1f} GB/s written, {system.operations:9,.0f} files/s")

# %%
print(inspect.getsource(Load))
print(inspect.getsource(StoragePlan))


# %%
def storage_plan(load, system):
    """The StoragePlan of a Load on a FileSystem.

    A save, or the read of a restart, takes as long as the slowest of three, which names its bound:
    "link"         of each node, all at once; at most system.client
    "file system"  bytes of all nodes, by its read or write
    "metadata"     files that are created, or opened by each rank, by its operations
    While the job works it reads its tokens, by all nodes alike. Storage does one thing at a time:
    an interval's tokens and what is written beside the work add up. `fits`: the job need not wait
    for them. `lost`: all seconds without work of a turn from checkpoint to checkpoint, which are
    those of a save (unless written beside) and of waiting where it does not fit, divided by the
    turn's seconds.
    source  Who reads and writes what: see Load
    """
    raise NotImplementedError("exercise 4.3: about 15 lines")


# %%
storage_plan = check(storage_plan)

# %% [markdown]
# Llama 3's checkpoint on all four, by your plan, with a link of 25 GB/s a node (our assumption: 200 Gb/s), every 20 minutes. It read 2.7 million tokens a second (16,384 GPUs at 400 TFLOP/s, 6 FLOPs a parameter): 11 MB/s. Text is nothing; a checkpoint is all.

# %% tags=["nbval-check-output"]
llama = Load(nodes=2048, gpus=8, link=25e9, checkpoint=14 * 405.85e9, interval=1200,
             tokens_per_second=2.7e6)
for writers in ("all", "one"):
    for system in SYSTEMS:
        plan = storage_plan(replace(llama, writers=writers), system)
        print(f"{writers:3}  {system.name.partition(':')[0].partition(',')[0]:8}  {plan}")

# %% [markdown]
# One writer costs minutes. And what it wrote costs more: each of 2,048 nodes must read all of it. That is why checkpoints are sharded.
