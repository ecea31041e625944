# %% [markdown]
# # 15 Cluster: where it really runs
#
# > 130 minutes, 110 more in a second sitting, 90 more with Further · difficulty 4/5 · **laptop**: everything; a part that needs root, Slurm or Prometheus says so, and is skipped if you don't have it · **cluster**: the same scripts, by `sbatch` or `kubectl`

# %% [markdown]
# ## 1. Story
#
# A model of 10B parameters trains on four nodes of eight H100s. Nothing fails, and the loss falls as it should. But a step takes 14 seconds, where the arithmetic says 5. After two days somebody starts it with `NCCL_DEBUG=INFO` and reads in the log: `NET/Socket`. The job's script has a line from a blog, `NCCL_IB_DISABLE=1`. So NCCL ignored eight InfiniBand cards of 400 Gb/s and took the one Ethernet card of 25 Gb/s. To sum 20 GB of gradients over four nodes, each node sends at least 30 GB, which takes 9.6 seconds instead of 0.08.
#
# The code of this run was right, and its surroundings were wrong. A job also depends on what you tell the scheduler, on the network that NCCL picks, on the storage, and on whether anybody notices a problem. The lab has two sittings. In the first you write a batch script that saves, requeues itself and goes on, derive NCCL's settings from a description of the nodes, and read NCCL's log with a function (4.1 to 4.3). In the second you write alert rules for a real Prometheus, the same job for Kubernetes, and compute what storage its checkpoints need (4.4 to 4.7). In the project a real Slurm on your machine loses a node, and the run goes on.
#
# The lab needs labs 00 to 03; the project runs lab 12's training.

# %%
import json
import math
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab.cluster.job import Job

begin("15_cluster")

# %% [markdown]
# ## 2. Picture
#
# How many bytes can leave a node in a second over each of its networks, and how long do the gradients of 10B parameters take over it on four nodes?

# %%
from ranklab.plots import cluster_links

cluster_links.networks({
    "8 InfiniBand cards, 400 Gb/s each": 8 * 400e9 / 8,
    "1 Ethernet card, 100 Gb/s": 100e9 / 8,
    "1 Ethernet card, 25 Gb/s": 25e9 / 8,
    "management, 1 Gb/s": 1e9 / 8,
}, nbytes=2 * 3 / 4 * 2 * 10e9)

# %% [markdown]
# ## 3. Smallest working code
#
# A scheduler gives you machines, and starts one program on each. That program is torchrun, an *agent*, which starts the ranks of its node. The agents must find each other, so all of them get the address of the first host. There they meet, count themselves, and number the ranks. Here two agents on one machine play two hosts:

# %%
program = Path(tempfile.mkdtemp(), "meet.py")
program.write_text("""
import os
import torch.distributed as dist
from ranklab import launch

name = f"host {os.environ['GROUP_RANK']}"
lines = launch(lambda: f"{name}: rank {dist.get_rank()} of {dist.get_world_size()}")
if dist.get_rank() == 0:
    print(*lines, sep="\\n")
""")
port = socket.socket()  # held while we need it: the system gives it to nobody, but torch may listen
port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
port.bind(("127.0.0.1", 0))
endpoint = "127.0.0.1:%d" % port.getsockname()[1]

# %% tags=["nbval-check-output"]
def agent(host):
    gpu = str(host) if torch.cuda.device_count() > 1 else ""  # each host has its own
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
         "--rdzv-backend=c10d", "--rdzv-id=lab15", f"--rdzv-endpoint={endpoint}",
         "--local-addr=127.0.0.1", program], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


outputs, errors = zip(*(process.communicate(timeout=120) for process in [agent(0), agent(1)]))
print("".join(sorted(outputs)) or "".join(errors))

# %% [markdown]
# (The agents meet at torch's TCPStore, which listens on all addresses and has no password. On a cluster, keep its port behind a firewall.)
#
# Nobody told an agent which host it is. But somebody must tell all of them *how many* they are and *where* they meet. What starts them again when one is lost? What gives them time to save? And what carries their bytes? This lab answers these questions.

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 A batch script that comes back
# > difficulty 3/5 · importance 5/5 · 30 minutes · about 20 lines
#
# *After this you can write a batch script that saves, requeues itself and goes on.*
#
# **Predict.** torchrun may restart all ranks 3 times, and Slurm may requeue the job 10 times. How many times do the ranks start, at most?

# %%
check(cluster_starts=...)

# %% [markdown]
# Slurm gives a job its nodes and runs the *batch script* on the first of them. sbatch reads the `#SBATCH` lines before bash runs, and stops at the first command, so these lines can't use the shell. In the script, `srun` starts a *task* on each node. Here a task is a torchrun, which starts the node's ranks. A job ends in one of three ways: everything is done, something failed, or the time is up. In the last two cases there should be a checkpoint, and the job should go back into the queue.
#
# The difficult part is the signals: which process gets which signal, and how long may it live after that? This is what the man pages say, and what we saw on one real Slurm with two nodes: 22.05.8 of 2022, which Debian 12 ships. Read it as a report about this version, not as a law. Details change between versions (the first trap below did, twice), so try the rows that you rely on with a job of two minutes on your own cluster. KillWait is a setting of Slurm, 30 s by default:
#
# | what happens | what the ranks see |
# |---|---|
# | `--signal=TERM@300` | SIGTERM, 300 s before the end (up to a minute earlier) |
# | `--signal=B:TERM@300` | nothing: only the batch shell gets it |
# | `kill -TERM` of srun's process | SIGKILL at once: "srun: forcing job termination" |
# | `scancel` | SIGTERM, and SIGKILL after KillWait; the script also ends, and requeues nothing |
# | a node is lost | nothing: `--requeue` is for this, and Slurm itself requeues the job |
# | `scontrol requeue` while they run | SIGTERM, and SIGKILL after KillWait |
# | one host has saved and ended with 1, under `srun --kill-on-bad-exit=1` | on the other hosts SIGTERM, and SIGKILL after KillWait, in the middle of their save |
# | the same, under `srun --wait=330` | the other hosts have 330 s |
#
# After a SIGTERM torchrun gives its ranks 30 s, or longer if you set `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`. When they have saved, torchrun ends with 1, and so does srun. The script sees a failure like any other, and requeues the job. All of this must happen before the time is up, because then Slurm ends the script as well. So the signal comes a minute earlier than the longest save needs. No wait is needed after `scontrol requeue`: slurmctld has put the job back before the command returns, and it ignores how the old script ends after that (`_job_requeue_op` and `job_complete` in Slurm's source, 284c3b9). The command itself must look for its last checkpoint when it starts.
#
# Four more traps:
#
# - From Slurm 22.05 to 23.02 srun did not inherit `--cpus-per-task` from sbatch, so 8 ranks and their data loaders shared one CPU unless the script repeated it. Since 23.11 srun inherits it again. Repeat it anyway: it does no harm, and you may not know which version the next cluster has.
# - Slurm writes a list of hosts as `gpu[07,12-13],big2`. `scontrol show hostnames "$SLURM_JOB_NODELIST"` writes one name a line.
# - Two jobs of four GPUs may share a host of eight. If both use the same port, the second job meets the first. `$SLURM_JOB_ID` is known only when the script runs, so bash computes the port: `$((20000 + SLURM_JOB_ID % 10000))`.
# - A value may hold blanks, quotes or `$`. `shlex.quote(text)` and `shlex.join(words)` write it so that bash reads the original text.
#
# `Job` is given:

# %%
import inspect

print(inspect.getsource(Job))


# %%
def sbatch_script(job):
    """Write a script for `sbatch` that runs the Job under torchrun, and requeues it if it fails.

    #SBATCH   long options: --job-name, --nodes, --ntasks-per-node=1, --gpus-per-node,
              --cpus-per-task (job.cpus for each GPU), --time in minutes, --requeue,
              --open-mode=append, --output with %j, the job's number, in it, and --signal=TERM@
              with job.save_seconds + 60: all ranks get a SIGTERM this many seconds before the
              end. The 60 after the longest save are for srun to end and for the requeue
    export    job.environment, whose values may contain any characters;
              TORCH_ELASTIC_SHUTDOWN_TIMEOUT (job.save_seconds); NCCL_SOCKET_IFNAME and
              GLOO_SOCKET_IFNAME (job.interface), or neither if there is no interface
    srun      starts `torchrun` itself on each node, with the same --cpus-per-task, with
              --kill-on-bad-exit=0 and --wait (job.save_seconds + 30)
    torchrun  --nnodes, --nproc-per-node, --max-restarts, --rdzv-backend=c10d, --rdzv-id (the job's
              number) and --rdzv-endpoint: the first host of $SLURM_JOB_NODELIST, a list such as
              "gpu[07,12-13],big2", and a port from 1024 to 65535 that differs from job to job,
              because two jobs may share a host. Then job.command
    the end   The script ends with srun's exit code. Before that, if the code is not 0 and
              SLURM_RESTART_COUNT (not set in the first run) is below job.requeues, it calls
              `scontrol requeue` with the job's number
    source    sbatch(1), srun(1), scontrol(1)
    """
    raise NotImplementedError("exercise 4.1: about 20 lines")


# %%
sbatch_script = check(sbatch_script)

# %% [markdown]
# The check reads your options and runs your script in bash. The `srun` and `scontrol` in its PATH are stand-ins that write down their arguments, and srun fails when the check wants it to. The check asks for the long options, although sbatch also knows short ones. We ran the library's answer on a real Slurm 22.05.8: after a SIGTERM one host needed 12 s longer than the other, both saved, and the job was requeued and went on. Here is your script for lab 12's 10B:

# %% tags=["nbval-check-output"]
job = Job("gpt-10b", nodes=4, gpus=8, command=("-m", "ranklab.projects.hybrid", "--size", "10b"),
          interface="eth1", environment=(("DATA", "/data/my text"),))
print(sbatch_script(job))

# %% [markdown]
# ### 4.2 Tell NCCL which network
# > difficulty 3/5 · importance 5/5 · 30 minutes · about 20 lines
#
# *After this you can derive NCCL's settings from a description of the nodes.*
#
# A GPU node has several networks: a card of 400 Gb/s for each GPU, other cards for storage, Ethernet for people and the scheduler, bridges for containers. (The cards speak InfiniBand, or RoCE, which is InfiniBand's protocol over Ethernet.) NCCL chooses among them, and often it chooses well. But it does not know that a card belongs to storage, and each node chooses for itself. And if a driver is missing one morning, NCCL falls back to TCP and says so only in its log.
#
# **Predict.** A node has eight cards of 400 Gb/s and an Ethernet interface of 25 Gb/s. NCCL falls back to sockets over that interface. How many times fewer bytes leave a node in a second?

# %%
check(cluster_fallback_times_slower=...)

# %% [markdown]
# NVIDIA's guide knows two kinds of NCCL variables. Some describe the system (which interface, which cards), and these belong in the job's script. The others are for debugging, and "should not be used in production nor retained in scripts": NCCL_P2P_DISABLE, NCCL_ALGO, NCCL_PROTO. Many scripts have five of these, from a blog, for a machine that is long gone.
#
# A value is a list of prefixes, so `mlx5_1` also selects `mlx5_10`. `=` before the list means whole names, and `^` means all names but these. So `NCCL_IB_HCA==mlx5_1` is not a typo: the first `=` belongs to the shell. `selected` follows NCCL's rules:

# %% tags=["nbval-check-output"]
from ranklab.cluster.nccl import Hca, Interface, Node, Topology, node_bandwidth, selected

cards = ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]
for value in ("mlx5_1", "=mlx5_1", "=mlx5_1:1", "^=mlx5_10"):
    print(f"NCCL_IB_HCA={value:10s} selects", *selected(value, cards))

# %% [markdown]
# A `Topology` holds what you know about a job's nodes. With *rails*, card i of every node is plugged into switch i, so traffic should stay between cards of the same number. A *traffic class* is a mark on packets, so that switches can give RoCE a queue of its own:

# %%
for cls in (Interface, Hca, Node, Topology):
    print(inspect.getsource(cls))


# %%
def nccl_environment(topology):
    """Return {variable: value}, all strings: what this job must set, the same on all nodes.

    Set nothing else.

    For one node it is {}. For several nodes:
    NCCL_NET            the plugin's name; without a plugin "IB" if all nodes have an HCA port in
                        common (also for RoCE), otherwise "Socket". So NCCL fails if that
                        network is missing, instead of quietly taking a slower one
    NCCL_SOCKET_IFNAME  selects all of the fastest common interfaces: sockets use them for the data
    GLOO_SOCKET_IFNAME  the names of one or more of these, separated by commas; gloo has no "="
    NCCL_IB_HCA         with "IB": selects the common ports of one kind, InfiniBand or Ethernet,
                        because the two can't talk to each other: the one with more Gb/s on a node
    NCCL_IB_TC          with "IB", if a traffic class is given
    NCCL_CROSS_NIC      with "IB" and two ports or more: "0" on rails, "1" on one switch
    A device is common if jobs may use it and it is up, with the same name on every node. For an
    HCA port, the number and the link must be the same as well: if mlx5_0:1 is InfiniBand on one
    node and Ethernet on another, it is not common.
    A value must select these devices on each node and no others, by NCCL's rules, which selected()
    follows. NCCL_DEBUG may be set as well.
    Raises: ValueError if the nodes have no interface in common, because NCCL always bootstraps over
        one of them.
    """
    raise NotImplementedError("exercise 4.2: about 20 lines")


# %%
nccl_environment = check(nccl_environment)

# %% [markdown]
# Four clusters: InfiniBand with eight cards for jobs and four for storage; RoCE, as in Llama 3's cluster (400 Gb/s for each GPU, arXiv 2407.21783, 3.3.1); plain Ethernet; and the first one again, with a driver missing on one node:

# %% tags=["nbval-check-output"]
ethernet = (Interface("lo", 0, "host"), Interface("eth0", 1, "management"), Interface("eth1", 25))
compute = tuple(Hca(f"mlx5_{i}", 400) for i in (0, 1, 3, 4, 5, 6, 8, 9))
storage = tuple(Hca(f"mlx5_{i}", 200, use="storage") for i in (2, 7, 10, 11))
roce = tuple(Hca(f"mlx5_{i}", 400, "Ethernet") for i in range(8))
clusters = {"InfiniBand": (compute + storage,) * 2, "RoCE": (roce,) * 2, "Ethernet": ((),) * 2,
            "a driver is missing": (compute + storage, ())}
for name, hcas in clusters.items():
    nodes = tuple(Node(f"node{i}", ethernet, node_hcas) for i, node_hcas in enumerate(hcas))
    topology = Topology(nodes, fabric="rails")
    environment = nccl_environment(topology)
    print(f"{name}: {node_bandwidth(topology, environment) / 1e9:.1f} GB/s leave a node")
    for variable, value in environment.items():
        print(f"    {variable}={value}")

# %% [markdown]
# In the last cluster the description shows the missing driver, so all nodes take Ethernet. If the driver breaks after you have made the script, `NCCL_NET=IB` ends the job at once: "Failed to initialize any NET plugin". That is cheaper than a week at 1/128 of the bandwidth. Many scripts set `NCCL_IB_GID_INDEX=3` for RoCE. It was needed once (NVIDIA/nccl issue 426), but since 2.21 NCCL finds the index, and a number from another machine may be wrong.

# %% [markdown]
# ### 4.3 Read what NCCL did
# > difficulty 4/5 · importance 5/5 · 40 minutes · about 25 lines
#
# *After this you can find in NCCL's log which network it took, and who failed first.*
#
# With `NCCL_DEBUG=INFO` each rank prints what it does. 16 GPUs print thousands of lines, mixed into one file. Somewhere among them you find the way that your gradients take.
#
# **Predict.** Two nodes have eight GPUs each. NCCL makes four channels, each with a ring that runs through all GPUs of the first node, then through all of the second. A link is a GPU that sends to the next one. How many of the 64 links are between the nodes? Count both directions.

# %%
check(cluster_links_between_nodes=...)

# %% [markdown]
# The lines, after `host:pid:thread [GPU] NCCL INFO`:
#
# | line | meaning |
# |---|---|
# | `comm 0x5.. rank 3 nranks 8 .. Init COMPLETE` | this process is rank 3 |
# | `Using network IB` | what carries data between nodes |
# | `Channel 01/04 : 0 7 6 5 ...` | the ring of channel 1; only rank 0 prints it |
# | `Trees [0] 1/3/-1->2->0 [1] ...` | in channel 0's tree rank 2 has children 1 and 3, and parent 0 |
# | `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM` | 0 sends to 1 over NVLink or PCIe, by CUDA's memory handles |
# | `... via SHM/direct/direct` | through the host's memory |
# | `Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA` | through card 0, which reads the GPU's memory itself |
# | `.. NCCL WARN ...` | what went wrong |
#
# When a collective doesn't end, torch adds lines of its own, which tell how many collectives each rank has *enqueued*. Look at the rank that has enqueued fewer than the others.
#
# You are given the patterns for these lines, written from NCCL's source: COMM, RING, LINK, TREE, ENQUEUED. The logs of this lab were captured on an H100, except for one that says so in its first line.

# %% tags=["nbval-check-output"]
from ranklab.cluster.nccl_log import (
    COMM, ENQUEUED, LINK, RING, TREE, Line, NcclLog, nccl_lines, of_all_ranks, read_log, suspects,
)

print(nccl_lines(read_log("killed_rank"))[0])
print(re.search(LINK, "Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA").groupdict())
print(re.findall(TREE, "Trees [0] 1/3/-1->2->0 [1] -1/-1/-1->2->1"))

# %% [markdown]
# `nccl_lines` takes NCCL's lines out of the text. You return a `NcclLog`:

# %%
for cls in (Line, NcclLog):
    print(inspect.getsource(cls))


# %%
def read_nccl_log(text):
    """Read `text` into an NcclLog; what the log does not contain stays empty.

    `text` has the lines of all ranks, or of some, among other text. The patterns of the lines are
    given.

    network   the name after the last "Using network"
    hosts     a process logs its rank: "comm 0x.. rank 3 nranks 8", "nRanks" in newer lines
    rings     rank 0 prints "Channel 00/16 : 0 1 2 ...". NCCL cuts the list after 127 characters
              ("..."). If a channel has no whole list, start at rank 0 and follow each rank's first
              link in the channel, without [receive] lines. It is a ring only if this path visits
              all ranks once and comes back
    trees     "Trees [0] 1/-1/-1->0->-1 [1] ...": children -> rank -> parent, for each channel
    links     "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0": from 0 to 8 in channel 0. A link
              over a network has two lines, [receive] and [send]; prefer what [send] says
    warnings  (rank of its process, text) of each NCCL WARN, once, in the log's order
    entered   the number in torch's last "Rank 3] ... last enqueued work: 12" for each rank; the
              wording differs between versions
    groups    a job's log has more than one communicator: of_all_ranks(text), which is given,
              returns (the lines of the one with the most ranks, groups)
    """
    raise NotImplementedError("exercise 4.3: about 25 lines")


# %%
read_nccl_log = check(read_nccl_log)

# %% [markdown]
# Your function has read these rings. The nodes have four cards. Each ring runs through all GPUs of a node before it leaves the node, and each leaves from a different GPU, so every card has a ring of its own:

# %%
log = read_nccl_log(read_log("two_nodes"))
cluster_links.rings(log)

# %% tags=["nbval-check-output"]
ring_links = [(channel, a, b) for channel, ring in log.rings.items()
              for a, b in zip(ring, ring[1:] + ring[:1])]
print(Counter(log.links[link].split("/")[0] for link in ring_links))
print(sorted({log.links[link] for link in ring_links}))

# %% [markdown]
# And three runs that failed. Which rank would you look at?

# %% tags=["nbval-check-output"]
for name in ("waiting_rank", "killed_rank", "no_infiniband"):
    report = read_nccl_log(read_log(name))
    print(f"{name}: network {report.network or 'none'}, hosts {len(report.hosts)}")
    for sentence in suspects(report):
        print("   ", sentence)

# %% [markdown]
# In the killed run ranks 1 and 3 complain, rank 0 waits, and the dead rank says nothing. That is typical: the loudest ranks are the dead one's neighbours in the ring.

# %% [markdown]
# > **The first sitting ends here**: a job that comes back, on the right network, and a log that you can read. Look at section 7, where the bytes of a wrong network are counted, and at the questions of section 8. The **second sitting** (110 minutes: 4.4 to 4.7, sections 5 and 6) is about what happens while nobody looks: alerts, Kubernetes, storage. Of the first it needs only the job of 4.1.

# %% [markdown]
# ### 4.4 An alert on low MFU
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 8 lines
#
# *After this you can write an alert rule that fires on slow runs, and sleeps through a pause.*
#
# A run that hangs costs as much as a run that works, so somebody must hear about it, even at night. **Prometheus** asks each rank for its numbers (it "scrapes" the rank) and keeps them as series, here every 15 seconds; the default is a minute. It also evaluates *rules*. The expression of a rule computes with these series, and each series in its result is an active alert. If an alert stays active for the time in `for`, it fires, and Alertmanager sends it to a person, or to a script that drains the node.
#
# *MFU* is the share of the GPUs' FLOP/s that the model's own FLOPs use (lab 01). Whatever makes a run slow, the MFU shows it.
#
# **Predict.** 16 GPUs of 989 TFLOP/s each train on 100,000 tokens a second in total. The model of 7B parameters needs 42 GFLOPs for a token. What is the MFU, in percent?

# %%
check(cluster_mfu_percent=...)

# %% [markdown]
# The expression is written in PromQL. You need this much of it, for a counter `c` and a gauge `g` that have the labels run and rank:
#
# | PromQL | gives |
# |---|---|
# | `g{run="a"}` | the newest sample of each series; none if the last scrape has failed |
# | `rate(c[5m])` | each series' growth per second over five minutes; if a counter falls, it has begun again at 0 |
# | `avg_over_time(g[1m])` | the mean of the samples of a minute |
# | `sum by (run) (g)`, `quantile by (run) (0.5, g)` | one number for each run |
# | `x / on (run) group_left y` | each series of x divided by the series of y with the same run |
# | `x < 0.3` | the series of x that are below 0.3; the others are gone |
# | `for: 10m` | the alert fires if it was active at each evaluation for ten minutes |
#
# The check judges your rule by what it does. In ten stories, series go in and alerts come out. A small evaluator in Python reads your PromQL, and section 5 asks Prometheus whether the evaluator is right. Write a time as Prometheus does: `"10m"`.

# %%
def mfu_alert_rule(least, minutes):
    """Return a Prometheus alerting rule, as a dict with the keys of a rules file.

    It raises one alert for each run whose MFU has been below `least` for `minutes` minutes.

    MFU      the model's FLOPs per second / FLOP/s of all its GPUs, over some minutes, because a
             step may take more than a minute, and counters jump
    fires    within 2 x minutes, and until the run has recovered, or at most `minutes` longer. It
             also fires if ranks hang, if scrapes fail now and then, or if another run is fine
    silent   while a run compiles, for its first 4 minutes; in a pause or a restart that takes
             a third of `minutes`, after which counters begin again at 0, perhaps on different
             instances; and after a run has ended
    labels   the alert has the labels run and severity, but not rank
    annotations  one of them contains the run and the value: {{ $labels.run }}, {{ $value }}
    metrics  train_tokens_total, a counter; train_flops_per_token; train_peak_flops, of one GPU.
             Each rank exports all three, with labels run, rank, instance, job, scraped every 15 s
    minutes  10 or more
    """
    raise NotImplementedError("exercise 4.4: about 8 lines")


# %%
mfu_alert_rule = check(mfu_alert_rule)

# %% [markdown]
# Your rule on an hour of a run. It compiles for 4 minutes, pauses for a checkpoint from minute 15 to 18, and is slow from minute 30 on. When do you hear of it?

# %% tags=["nbval-check-output"]
from ranklab.cluster import promql
from ranklab.cluster.alerts import alerts
from ranklab.cluster.stories import stepped, trained

story = trained((0, [(4, 0.0), (15, 0.4), (18, 0.0), (30, 0.4), (60, 0.2)]))
if promql.missing():
    print(promql.missing())
else:
    firings = alerts(mfu_alert_rule(0.3, 10), story, range(0, 3601, 15))
    print(f"silent for {firings[0][0] / 60:.0f} minutes; then an alert for run "
          f"{firings[0][1]['run']}")

# %% [markdown]
# ### 4.5 An alert on stragglers
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 8 lines
#
# *After this you can write an alert rule that names the slow rank.*
#
# In lab 14 the ranks found the slow one among themselves. A server outside knows the ranks only by their labels, and any of their numbers may be missing. Our own MFU rule forgot that: after a failed scrape a rank's tokens still counted above the line, but its peak was missing below, so a run in trouble looked faster.
#
# **Predict.** A common rule is "more than three standard deviations above the mean". Seven of eight ranks need the same time, and one needs more. How many standard deviations is it above the mean, however slow it is? (Prometheus' `stddev` is the standard deviation of a population.)

# %%
check(cluster_deviations=...)

# %% [markdown]
# So with eight ranks that rule can never fire. You need another one:

# %%
def straggler_rule(factor, minutes):
    """Return a Prometheus alerting rule, as a dict.

    It raises an alert for each rank whose steps have taken more than `factor` times as long as the
    median rank's steps, in its run, for `minutes` minutes.

    fires    within 2 x minutes, and until the rank has recovered, or at most `minutes` longer. It
             also fires if two ranks of eight are slow, if every eighth scrape fails, or if
             another rank is gone
    silent   if a single step is slow (the first one, a checkpoint), even if the gauge shows it in
             two scrapes; if a rank is slow for only a third of `minutes`; if all are slow at once,
             or some are fast; if a run has longer steps than another run; if a rank is gone
    labels   the alert has the labels run, rank and severity
    annotations  one of them contains the run, the rank and the value
    metrics  train_step_seconds, a gauge: seconds of a rank's last step, until it reached the
             collective; labels run, rank, instance, job; scraped every 15 s
    minutes  5 or more
    """
    raise NotImplementedError("exercise 4.5: about 8 lines")


# %%
straggler_rule = check(straggler_rule)

# %%
from ranklab.plots import cluster as plots

story = stepped((5, 10, 99, 1.5), (3, 20, 20.5, 3.0))
if not promql.missing():
    plots.step_times(story, 1.2, alerts(straggler_rule(1.2, 5), story, range(0, 2401, 15)))

# %% [markdown]
# Rank 3 has one long step, the grey spike, which is over before the time in `for` is. Rank 5 stays slow, and you hear of it after five minutes. That is the price of a rule that a single step can't fool.

# %% [markdown]
# ### 4.6 The same job on Kubernetes
# > difficulty 3/5 · importance 4/5 · 25 minutes · about 25 lines
#
# *After this you can write a job for Kubernetes in which all ranks restart together.*
#
# Kubernetes knows no ranks. Three kinds of objects build on each other:
#
# - A *Job* makes pods until enough of them have ended well. It replaces each pod that fails, one by one, 6 times by default (`backoffLimit`). Ranks can't work like that: the others wait for the dead one, so all must start again together.
# - A *JobSet* holds Jobs that fail and start together (`maxRestarts`). It gives each pod a name that the others can find: `<set>-<replicated job>-<replica>-<pod>.<set>`. A rendezvous needs this whole name: without the set's name at the end it does not resolve.
# - A *TrainJob* of Kubeflow Trainer says only how many nodes and ranks you want. Its controller makes a JobSet from a *runtime*, which the cluster's owner keeps, and sets torchrun's options as variables: `PET_NNODES`, `PET_NPROC_PER_NODE`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`. Options on torchrun's command line would override them. If you put them into `env`, the webhook refuses the TrainJob.
#
# **Predict.** A JobSet has 4 nodes with 8 GPUs each, and `maxRestarts: 3`. In each life a pod fails. How many pods are made in total?

# %%
check(cluster_pods=...)

# %% [markdown]
# Two defaults are traps. A pod has 30 s from SIGTERM to SIGKILL, whatever you tell torchrun. And in a JobSet `restartPolicy` is OnFailure, so a container starts again by itself, next to ranks from an earlier start.
#
# Both kinds are custom resources, and their definitions (CRDs) bring a schema, which `invalid(manifest)` asks. `ranklab/cluster/schemas/` holds trimmed ones, of Kubeflow Trainer and JobSet. The check looks at what a schema can't see: ranks, limits, times, names.

# %%
from ranklab.cluster.manifest import invalid


# %%
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
    """
    raise NotImplementedError("exercise 4.6: about 25 lines")


# %%
train_job_manifest = check(train_job_manifest)

# %% [markdown]
# Here the schemas check your manifests for the job of 4.1, and one manifest with two mistakes:

# %% tags=["nbval-check-output"]
job = replace(job, image="example.org/ranklab:1")
for kind in ("TrainJob", "JobSet"):
    manifest = train_job_manifest(job, kind)
    print(f"{kind}: {len(json.dumps(manifest))} bytes of JSON;", invalid(manifest) or "valid")

manifest = train_job_manifest(job)
manifest["spec"]["trainer"]["nprocPerNode"] = manifest["spec"]["trainer"].pop("numProcPerNode")
manifest["spec"]["trainer"]["numNodes"] = "4"
print(*invalid(manifest), sep="\n")

# %% [markdown]
# `kubectl apply -f` takes a manifest as JSON. We had no cluster, so both are validated, not run. A TrainJob sets neither the number of restarts nor a pod's grace period. Both belong to the runtime, and the published `torch-distributed` leaves them at their defaults: none, and 30 s. A container's `/dev/shm` has 64 MB by default. NCCL and data loaders need more: mount an `emptyDir` with `medium: Memory` there. And when its activeDeadlineSeconds are over, a TrainJob or JobSet has failed, and nothing requeues it.

# %% [markdown]
# ### 4.7 Storage for checkpoints
# > difficulty 3/5 · importance 4/5 · 25 minutes · about 15 lines
#
# *After this you can say what bounds a checkpoint's time: link, file system or metadata.*
#
# **Predict.** Llama 3 405B has 405.85 billion parameters, with 14 bytes each in a checkpoint (2 for the weight in bf16, 12 for the optimizer). Its file system took 2 TB/s sustained and 7 TB/s at the peak (arXiv 2407.21783, 3.3.1). How many seconds does a checkpoint take at the sustained speed?

# %%
check(cluster_save_seconds=...)

# %% [markdown]
# Three things bound a save: each node's *link*, the *file system*, which serves all nodes together, and *metadata*, because each new file must be entered somewhere. The slowest one counts. A plain NFS server is one machine with one link. Lustre spreads a file's bytes over many servers, and keeps the names on others. An object store has no folders, but limits the requests for each prefix. Four examples, each at its published limit (`FileSystem.source` says where):

# %% tags=["nbval-check-output"]
from ranklab.cluster.storage import SYSTEMS, FileSystem, Load, StoragePlan

for system in SYSTEMS:
    print(f"{system.name:44} {system.write / 1e9:8,.1f} GB/s, {system.operations:9,.0f} files/s")

# %% [markdown]
# What a job asks for, and what the plan says:

# %%
for cls in (FileSystem, Load, StoragePlan):
    print(inspect.getsource(cls))


# %%
def storage_plan(load, system):
    """Compute the StoragePlan of a Load on a FileSystem.

    A save, or the read at a restart, takes as long as the slowest of three parts, which is its
    bound:
    "link"         all nodes that write or read do so at once, each at load.link or system.client,
                   whichever is lower
    "file system"  the bytes of all nodes, at its write or read speed
    "metadata"     the files that are created, or that all ranks open, at its operations per second
    fits  During an interval of work the job reads its data, over links and file system as above.
          A background save comes after the data. True if both together fit into an interval
    lost  A turn is an interval (or the time of data and a background save, if that is longer),
          and then a save, if it is not in the background. lost is the fraction of the turn that
          is not the interval
    """
    raise NotImplementedError("exercise 4.7: about 15 lines")


# %%
storage_plan = check(storage_plan)

# %% [markdown]
# Here is Llama 3's checkpoint on all four systems by your plan, every 20 minutes, with a link of 25 GB/s a node (our assumption: 200 Gb/s). Llama 3 trained on 2.7 million tokens a second (16,384 GPUs at 400 TFLOP/s, 6 FLOPs for each parameter), of 4 bytes each: 11 MB/s. Compared with a checkpoint, text is nothing.

# %% tags=["nbval-check-output"]
llama = Load(nodes=2048, gpus=8, link=25e9, checkpoint=14 * 405.85e9, interval=1200,
             data=4 * 2.7e6)
for sharded in (True, False):
    print("each rank writes its part" if sharded else "one rank writes all")
    for system in SYSTEMS:
        plan = storage_plan(replace(llama, sharded=sharded), system)
        print(f"    {system.name.partition(':')[0].partition(',')[0]:8}  {plan}")

# %% [markdown]
# A single writer costs minutes. At a restart its one file costs hours if the file system has a limit, because each of 2,048 nodes reads all of it. That is why checkpoints are sharded.

# %% [markdown]
# ### Further
#
# #### `pair_rounds`
# > difficulty 2/5 · importance 4/5 · 15 minutes · about 8 lines
#
# **Accept the nodes before you train on them.** 32 nodes have come, and one bad cable makes every job on all of them slow, without a word about where it is. With nccl-tests, `all_reduce_perf -b 1G -e 16G -f 2`, write down the *busbw* of four things, and agree on the numbers before you sign:
#
# - **Each node alone.** 8 H200 reach 473 to 482 GB/s from 4 to 16 GiB, and 366 without NVLS, the sum in the NVSwitch (`NCCL_NVLS_ENABLE=0`). H100 has the same NVLink, 450 GB/s on paper. The lowest node is the suspect.
# - **Every pair**: this exercise and the next one.
# - **Two, four, eight, all nodes.** Four nodes of 8 H200, with 8 cards of 400 Gb/s each, reached 365 GB/s as a ring and 310 as NVLSTree, 91% and 78% of the 400 GB/s of their cards. We know no published number for 32 nodes of H100. Read NCCL's log in each run: only for a ring is busbw what the cards send.
# - **One rail at a time.** With rails, card i of every node is on switch i. `NCCL_TESTS_SPLIT="MOD 8"` runs eight operations at once, each with one GPU of each node, so a slow rail stands out.
#
# (The numbers are from stas00/ml-engineering, 744d01e, some with its own benchmark in place of nccl-tests; the split from the README of nccl-tests, a0b82b2.)
#
# Pairs take time, and two pairs that share a node would share its links. Meta's gcm offers both ends: `check-nccl --pairwise` for all pairs, `--pairwise-quick` with each node once.
#
# **Predict.** A pair takes 2 minutes. How many minutes do all pairs of 32 nodes take at least, if as many pairs as possible run at once?

# %%
check(cluster_pair_minutes=...)

# %% [markdown]
# **Your target:** every pair once, in the fewest rounds: 31 for 32 nodes, where one pair after another needs 496. The check counts the rounds.

# %%
def pair_rounds(nodes):
    """Return the rounds in which all pairs are measured: [[(node, node), ...], ...].

    Each two nodes are a pair in exactly one round, in either order. In a round each node is in one
    pair at most, so all pairs of a round run at once.
    The rounds are as few as possible: nodes - 1, and one more for an odd number of nodes, because
    one of them rests in each round. No nodes or one node have none.
    nodes: different names, not modified.
    """
    raise NotImplementedError("exercise pair_rounds: about 8 lines")


# %%
pair_rounds = check(pair_rounds)

# %% tags=["nbval-check-output"]
for round_ in pair_rounds(["n0", "n1", "n2", "n3", "n4", "n5"]):
    print(*("-".join(sorted(pair)) for pair in sorted(map(sorted, round_))))

# %% [markdown]
# #### `suspect_parts`
# > difficulty 3/5 · importance 4/5 · 25 minutes · about 18 lines
#
# 496 outputs, and which part do you send back? *Leaf switches* join the nodes of a *block*, such as a rack or a scalable unit, and the block's *uplinks* lead through spine switches to the other blocks. A bad node is slow with everyone. Bad uplinks are slow only for pairs that cross them. You get the text of each pair in nccl-tests' own format (**emulated**: real numbers of 32 nodes are nobody's to publish), and ROW, a pattern for one of its lines:

# %%
from ranklab.cluster.acceptance import ROW, Suspects, emulated_outputs

outputs, block_of = emulated_outputs(nodes=("b0n5",), uplinks=("b2",), pairs=(("b1n1", "b3n2"),))
print(outputs["b0n0", "b0n1"])
print(re.search(ROW, outputs["b0n0", "b0n1"]).groupdict())
print(inspect.getsource(Suspects))

# %%
cluster_links.pairs(outputs)

# %% [markdown]
# Look for three things: a thin cross, a wide cross that is white where it meets itself, and one pair alone. Your function finds them from the texts:

# %%
def suspect_parts(outputs, block_of, share=0.9):
    """Return the Suspects: which nodes and which blocks' uplinks make pairs slow.

    outputs: {(node, node): the text that all_reduce_perf printed}, every pair once, in any order.
    block_of: {node: its block}.
    A pair has the busbw of its largest size, out of place; it has 0 with wrong values (in a line
    #wrong is neither 0 nor N/A), and without a line of numbers, because the test hung or died.
    It is slow below `share` times the median of all pairs. (So no pair is slow if most of them
    are: compare the median with the number that was agreed on.)
    nodes: all pairs of the node are slow.
    blocks: without these nodes, all pairs between this block and others are slow, and there is at
        least one.
    pairs: slow pairs, as in `outputs`, that have no suspect node and do not cross a suspect uplink.
    """
    raise NotImplementedError("exercise suspect_parts: about 18 lines")


# %%
suspect_parts = check(suspect_parts)

# %% tags=["nbval-check-output"]
print(suspect_parts(outputs, block_of))

# %% [markdown]
# Then the job's placement counts. With `topology/tree` Slurm knows the switches, and `--switches=1@60` waits up to an hour for nodes under one of them. `topology/block` (since 23.11) keeps a job within blocks of nodes, such as the racks of an NVL72, and `--segment` (24.05) says how many nodes must be together. NCCL uses adaptive routing on InfiniBand by default and not on RoCE (`NCCL_IB_ADAPTIVE_ROUTING`, user guide). RoCE needs PFC and ECN on all its switches for the traffic class of 4.2; if `ethtool -S` counts pause frames or drops there, look at them before you look at NCCL. We ran nothing of this paragraph, and nccl-tests on no more than one node.

# %% [markdown]
# #### `sick_rank_alarm`
# > difficulty 5/5 · importance 4/5 · 50 minutes · about 20 lines · open: no recipe
#
# Your rules saw one number. A person who looks for a sick GPU sees eight: clock and temperature, corrected memory errors, link errors, the wait for data, and more. A bad link makes *all* ranks slow, and no rank's own time shows it. A rank with a larger share of the work is slow from the start, but healthy. There is no recipe.
#
# Nobody publishes the metrics of a large cluster together with what was wrong. So the recordings are **emulated**: `help(recordings)` says which parts are published, and which are our own choice. Five kinds of runs are sick. Eight kinds are healthy, and look sick. Eight ranks in a row share a host:

# %%
from ranklab.cluster import recordings
from ranklab.cluster.alarm import rule_alarm, score
from ranklab.cluster.recordings import CLOCK, DATA, ECC, SECONDS, SYMBOLS, record

for kind, words in (recordings.SICK | recordings.HEALTHY).items():
    print(f"{kind:14} {words}")
plots.recorded(record("hot GPU", seed=3))

# %% [markdown]
# Each run gives points. A sick run gives 1 - s / 900, where s are the seconds from the onset to the alarm, and 0 if the alarm comes later than 900 s or never. A healthy run gives 1, and a false alarm makes it 0. The mean is the score. An alarm that never fires gets 0.62, the rule of 4.5 alone 0.64, and the library's answer 0.94, because its alarm comes after 140 s on average. On 520 runs that nobody had looked at, it made one false alarm. The check calls your function about 6,000 times, so a call may take a few milliseconds.

# %%
### BEGIN SOLUTION


### END SOLUTION
def sick_rank_alarm(metrics):
    """Return the rank that is sick, or None while no rank is.

    It is called at each scrape, with everything scraped from a run so far. If a whole host is sick,
    any of its ranks counts.

    metrics  {name: (scrapes, ranks)}, and train_mfu: (scrapes,); a scrape every 15 s, NaN if it
             failed. Do not modify them. Errors are counters. See recordings for the names, and for
             what may happen to a run
    counted  the seconds from onset to alarm, and false alarms: in a healthy run, before the onset,
             or about a healthy rank. The first alarm ends a run
    least    a Score of 0.88 on 39 recordings that the lab has not shown, with at most one false
             alarm; a Score of 0.75 on 26 recordings that the check draws when it runs
    """
    raise NotImplementedError("exercise sick_rank_alarm: about 20 lines")


# %%
sick_rank_alarm = check(sick_rank_alarm)

# %% [markdown]
# Your alarm against the rule from 4.5, on runs that the check does not use:

# %%
runs = recordings.recordings(seeds=range(3))
plots.alarms({"yours": score(sick_rank_alarm, runs), "straggler_rule": score(rule_alarm, runs)})

# %% [markdown]
# A bar of 900 s is an alarm that never came. See which kinds of sickness the rule does not notice.

# %% [markdown]
# ## 5. The real thing
#
# **Prometheus' own test.** Your straggler rule goes into a rules file, with the series of 4.5 and the alerts that our small evaluator saw, taken every two minutes. `promtool test rules` says whether Prometheus agrees:

# %%
from ranklab.cluster.promtool import promtool_on

print(promql.missing() or promtool_on(straggler_rule(1.2, 5), story, range(0, 2401, 15)))

# %% [markdown]
# `labs/jobs/monitoring/` has the files for a cluster: `prometheus.yml`, the rules, a list for dcgm-exporter, and a Grafana dashboard with MFU, tokens/s, own step times, stragglers and GPUs. `promtool` and `amtool` accept them. We had no Grafana, so nobody has opened the dashboard, but a test evaluates each of its queries. On a cluster the GPUs' numbers come from NVIDIA's dcgm-exporter on each node; here a stand-in exports metrics with the same names. Start it there with `-f dcgm-metrics.csv`. In its default list the corrected memory errors, `ECC_SBE_VOL_TOTAL`, are only a comment (default-counters.csv and dcp-metrics-included.csv, d5e5f51), so the panel would stay empty and an alarm on dying memory would be blind. On an H100 or B200 also watch the remapped rows: the GPU replaces bad rows of its memory by spare ones and counts them. `ROW_REMAP_FAILURE` is 1 when it could not.
#
# **TensorBoard** reads files, so it needs no server. Here a trainer's History is written and read back:

# %% tags=["nbval-check-output"]
from ranklab.cluster.curves import (
    read_scalars, read_trace, traced_steps, waits_in_traces, write_scalars,
)
from ranklab.trainer import History

history = History([1, 50], [3.125, 2.25], speed=[0.0, 950.0], waits=[0.0, 0.5], held_out={50: 2.5})
with tempfile.TemporaryDirectory() as folder:
    if promql.missing("tensorboard"):
        print(promql.missing("tensorboard"))
    else:
        write_scalars(folder, history)
        print(*read_scalars(folder).items(), sep="\n")

# %% [markdown]
# `tensorboard --logdir FOLDER` shows the curves. **Weights & Biases** also works without a network: `write_wandb(folder, history)` writes the same with `mode="offline"`, and `wandb sync FOLDER` sends it later. `make lab` does not install wandb; we ran this with wandb 0.31.0.
#
# **A trace.** Metrics tell you which rank is slow, and a trace tells you why. `torch.profiler` writes a JSON file for each rank, which ui.perfetto.dev opens. Here rank 1 of three computes eight times as much as the others. Which rank waits least in the all-reduce?

# %%
with tempfile.TemporaryDirectory() as folder:
    paths = launch(traced_steps, folder, 1, ranks=3)
    info, events = read_trace(paths[1])
    print(f"rank {info['rank']} of {info['world_size']}: {len(events)} events")
    waits = waits_in_traces(paths)
print("seconds in all-reduces:", {rank: round(x, 3) for rank, x in waits.items()})
print("all wait for rank", min(waits, key=waits.get))

# %% [markdown]
# On GPUs, NVIDIA's own tools show more. We have not run these two lines:
#
# ```bash
# torchrun --no-python ... nsys profile --trace=cuda,nvtx,osrt -o rank%q{RANK} python train.py
# ncu --set full --kernel-name regex:gemm --launch-count 3 -o gemm python train.py
# ```
#
# nsys shows a timeline of kernels, NCCL and NVTX ranges. ncu takes one kernel apart, and runs it several times to do so. So don't give it a collective in its default mode, because the other ranks would wait.
#
# **When a team outgrows one machine.** Don't write a scheduler: Slurm, Kubernetes, Ray and the clouds have one. They differ in what they give a job (all nodes at once, or pod after pod), in how many seconds it has to save, and in how a node learns its place. `labs/jobs/agent.py` reads that place in five ways and starts torchrun, always with lab 12's training. The table says what we did with each system, without a GPU unless one is named, and a test looks for the proof of each line. *Run* means that it did its work. *Validated* means that its own schema takes our file, and nothing was submitted.

# %% tags=["nbval-check-output"]
from ranklab.cluster import systems

print(systems.table())

# %% [markdown]
# ## 6. Project
#
# **A run that is watched.** Four ranks train a GPT. Each serves its numbers at a port of its own, and writes that port into a file where the server looks for targets. Rank 2 waits 0.1 s for each batch. The server is a real Prometheus with Alertmanager if you have them (`apt install prometheus prometheus-alertmanager`), and otherwise a small one from the library. It evaluates *your* rule, here with `for: 2s`, and the training goes on until the alert has reached a webhook:

# %%
from ranklab.projects import cluster as project

rule = straggler_rule(1.5, 5) | {"for": "2s"}
with tempfile.TemporaryDirectory() as folder:
    print(project.watched_report(project.watched_run(folder, rule)))

# %% [markdown]
# The step time of every rank is the same, because all wait for rank 2, but the rule sees each rank's own time.
#
# **A job that loses a node.** For this a real Slurm runs on your machine: hosts in network namespaces, each with fake GPUs, and accounting. It runs lab 12's job, submitted by `labs/jobs/cluster.sbatch`, and we pull the plug of a host. In a terminal, as root (3 minutes; `apt install slurm-wlm munge slurmdbd mariadb-server`):
#
# ```bash
# make slurm
# ```
#
# Without root or Slurm it says so in one sentence. On our machine it printed:

# %% tags=["nbval-check-output"]
print(project.printed())

# %% [markdown]
# Nobody touched anything between the power-off and the end. Prometheus saw the silent host first; its alert is a rule like yours. Slurm set the node DOWN after SlurmdTimeout (5 s here, 300 s by default), requeued the job, and started it again once the credential of the job's first life had expired (5 s here, 120 s by default). So on a cluster with the defaults this takes about seven minutes. The job found the last whole checkpoint, and its final state equals an undisturbed run's, bit for bit. Your `sbatch_script` has the same lines around `srun`, and we also submitted the library's to this Slurm.
#
# **Your turn.** Change one thing, and first write down what you expect. Ideas: another `slow` rank, two milliseconds more instead of a hundred, a rule with a higher factor. When does the alert come? Does it come at all?

# %%
rule = straggler_rule(3.0, 5) | {"for": "4s"}
with tempfile.TemporaryDirectory() as folder:
    print(project.watched_report(project.watched_run(folder, rule, slow=0, sleep=0.05)))

# %% [markdown]
# ## 7. Measure
#
# Two nodes of two ranks sum a tensor of 1 MB. How many of its bytes leave a node? Slurm may place ranks in blocks (0 and 1 on the first node) or cyclically (0 and 2). Cyclically, a flat ring sends more between nodes, while a hierarchical sum does not change. The table shows the bytes by formula, the bytes counted on real ranks, and the seconds that a gradient of 20 GB would need between two nodes:

# %% tags=["nbval-check-output"]
from ranklab.collectives import hierarchical_all_reduce, node_groups, ring_all_reduce
from ranklab.meter import Traffic


def leaving(way, placement):
    host = {"block": lambda rank: rank // 2, "cyclic": lambda rank: rank % 2}[placement]
    inside, across = node_groups(2)
    if placement == "cyclic":
        inside, across = across, inside
    x, rank = torch.ones(250_000, device=device()), dist.get_rank()
    with Traffic() as traffic:
        ring_all_reduce(x) if way == "flat" else hierarchical_all_reduce(x, inside, across)
    return host(rank), sum(n for peer, n in traffic.bytes_to.items() if host(peer) != host(rank))


for way, placement, formula in (("flat", "block", 2 * 3 / 4), ("flat", "cyclic", 2 * 2 * 3 / 4),
                                ("hierarchical", "block", 1), ("hierarchical", "cyclic", 1)):
    counted = sum(n for host, n in launch(leaving, way, placement, ranks=4) if host == 0)
    print(f"{way:12} {placement:6}  predicted {formula:3.1f} MB, counted {counted / 1e6:3.1f} MB;  "
          f"20 GB: {20 * formula / 400:4.2f} s by InfiniBand, {20 * formula / 3.125:4.1f} s "
          "at 25 Gb/s")

# %% [markdown]
# NCCL knows which ranks share a host, and orders its rings by that, however Slurm places them. But it can't repair the wrong network, in the last column. The wrong network costs 128 times as much, and the wrong ring 3 times here, or 15 times with eight GPUs a node. With links of 200 Mbit/s (`make slurm`, above) a flat cyclic ring took 2.7 times as long as a hierarchical sum; the bytes say 3.0.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 15` in a terminal asks these and more, with other numbers each time.

# %%
questions("15_cluster")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# sbatch labs/jobs/cluster.sbatch                    # Slurm; ParallelCluster makes the cluster
# sky jobs launch labs/jobs/skypilot.yaml            # Kubernetes, by SkyPilot
# aws sagemaker create-training-job --cli-input-yaml file://labs/jobs/sagemaker.yaml
# gcloud batch jobs submit ranklab-hybrid --location us-central1 --config labs/jobs/gcp_batch.yaml
# python labs/jobs/ray_train.py                      # two workers here; one is killed
# python labs/jobs/validate.py                       # asks the tools that are installed
# ```
#
# Each job file trains a GPT of 70B parameters on 256 H100s. Its first lines say how to make the job small, what was validated and what was run. We submitted nothing to a cloud, and built no image. Three things cost most of the first days, and they differ from cloud to cloud. The first is *capacity*: 32 nodes of H100 can hardly be had on demand, so reserve them first. On AWS this is a capacity block or a capacity reservation, on SageMaker a training plan, on Google Cloud a reservation or its Dynamic Workload Scheduler; each job file shows the field as a comment. The second is the *network*: EFA needs the plugin aws-ofi-nccl in the image, Google's A3 High needs GPUDirect-TCPX, and A3 Mega needs TCPXO. Without them NCCL takes TCP, and only its log says so. If you set `NCCL_NET`, the job fails instead. The third thing is the *seconds* after a SIGTERM: `--signal` in Slurm, 120 s on SageMaker, a pod's terminationGracePeriodSeconds. A save must fit into them.
#
# Before the first job, accept the nodes: every pair, two, four, eight, all of them (`pair_rounds` under Further in section 4).
#
# We ran Ray Train eleven times on two busy cores. Ten runs took 52 to 187 s, went on from step 5 after a worker's death, and ended with the loss of an undisturbed run. In the other one Ray's own start timed out.

# %% [markdown]
# ## 10. Take with you
#
# 1. Fail loudly: with `NCCL_NET=IB` a job that would go on over one Ethernet card instead of eight of 400 Gbit/s ends at once.
# 2. Plan the end: a signal 300 s before it helps only if torchrun's own limit and Slurm's KillWait, 30 s by default, are longer than your save.
# 3. Measure before the collective, because an average names no rank. Count bytes: 64 nodes that save 1 TB to 5 GB/s wait 200 s, sharded or not.
#
# **What we left out**
#
# - **Several process groups in one log.** Each group has a communicator with its own ranks, and most lines don't say which communicator they mean.
# - **NVLS and CollNet**, which reduce in a switch, have lines of their own in NCCL's log.
# - **Which job runs when**: fair share, priorities, preemption, gang scheduling on Kubernetes.
# - **Images**: your cloud's documentation tells you what a container needs to reach the cards (MOFED, the cloud's plugins).
#
# Next: [16_clinic](16_clinic.ipynb): eight sick programs, and you are the doctor.
