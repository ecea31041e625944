# %% [markdown]
# ### 4.3 Tell NCCL which network
# > difficulty 3/5 · importance 5/5 · 30 minutes · about 20 lines
#
# A node of a GPU cluster has several networks: a card of 400 Gb/s beside each GPU, others for storage, Ethernet for people and for the scheduler, bridges of containers. NCCL chooses among them, and often well. But it does not know that a card belongs to storage. Each node chooses alone. And where a driver is missing one morning, NCCL takes TCP and says so only in its log.
#
# **Predict.** A node has eight cards of 400 Gb/s. Its Ethernet interface has 25 Gb/s. NCCL falls back to sockets over that interface. How many times fewer bytes leave a node in a second?

# %%
check(cluster_fallback_times_slower=...)

# %% [markdown]
# NCCL reads environment variables. NCCL's user guide has two kinds of them. Some describe the system: which interface, which cards. They belong into the job's script. The others are for debugging, and "should not be used in production nor retained in scripts": NCCL_ALGO, NCCL_PROTO, NCCL_P2P_DISABLE. Keeping them "may result in sub-optimal behavior, crashes, or hangs".
#
# A value is a list of prefixes: `mlx5_1` selects `mlx5_10`, too. `=` before the list means whole names, `^` all others. So `NCCL_IB_HCA==mlx5_1` is no slip: the first `=` is the shell's. `selected` follows NCCL's rules:

# %% tags=["nbval-check-output"]
from ranklab.cluster.nccl import Hca, Interface, Node, Topology, node_bandwidth, selected

cards = ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]
for value in ("mlx5_1", "=mlx5_1", "=mlx5_1:1", "^=mlx5_10"):
    print(f"NCCL_IB_HCA={value:10s} selects", *selected(value, cards))

# %% [markdown]
# `help(Topology)` says what is known about a job's nodes. What have they in common?

# %%
def nccl_environment(topology):
    """{variable: value}, all text: what must be set for this job, the same on all nodes. No more.

    Of one node: {}. Of several:
    NCCL_NET            the plugin's name; without one "IB" where all nodes have an HCA port in
                        common (RoCE is "IB", too), else "Socket". So NCCL fails where that network
                        is missing, and does not quietly take a slower one
    NCCL_SOCKET_IFNAME  selects the fastest interfaces, all of them: by sockets they carry the data
    GLOO_SOCKET_IFNAME  the name of one of these; gloo has no "="
    NCCL_IB_HCA         with "IB": selects the common ports; all of one link, InfiniBand or Ethernet
                        (they can't talk to each other): the one with more Gb/s on a node
    NCCL_IB_TC          with "IB", where somebody said a traffic class
    NCCL_CROSS_NIC      with "IB" and two ports or more: "0" on rails, "1" on one switch
    Common is what jobs may use and what is up, by the same name (and port) on every node. What a
    value selects on each node is that and no more, by NCCL's rules, which selected() follows.
    NCCL_DEBUG may be set, too.
    error   ValueError where nodes have no interface in common: NCCL starts over one of them always
    """
    raise NotImplementedError("exercise 4.3: about 20 lines")


# %%
nccl_environment = check(nccl_environment)

# %% [markdown]
# Four clusters: eight cards for jobs and four for storage; RoCE, which is InfiniBand's protocol over Ethernet, as Llama 3's cluster had (400 Gb/s a GPU, arXiv 2407.21783, section 3.3); plain Ethernet; and the first one, with a driver that is missing on one node. The last column is what leaves a node.

# %% tags=["nbval-check-output"]
ethernet = (Interface("lo", 0, "host"), Interface("eth0", 1, "management"), Interface("eth1", 25))
compute = tuple(Hca(f"mlx5_{i}", 400) for i in (0, 1, 3, 4, 5, 6, 8, 9))
storage = tuple(Hca(f"mlx5_{i}", 200, use="storage") for i in (2, 7, 10, 11))
roce = tuple(Hca(f"mlx5_{i}", 400, "Ethernet") for i in range(8))
clusters = {"InfiniBand": (compute + storage,) * 2, "RoCE": (roce,) * 2,
            "Ethernet": ((),) * 2, "a driver is missing": (compute + storage, ())}
for name, hcas in clusters.items():
    nodes = tuple(Node(f"node{i}", ethernet, each) for i, each in enumerate(hcas))
    topology = Topology(nodes, fabric="rails")
    environment = nccl_environment(topology)
    print(f"{name}: {node_bandwidth(topology, environment) / 1e9:.1f} GB/s")
    for variable, value in environment.items():
        print(f"    {variable}={value}")

# %% [markdown]
# `NCCL_NET` turns a slow run into a run that fails. With `NCCL_NET=IB` a node without its driver ends the job at once: "Failed to initialize any NET plugin" (`logs/no_infiniband.txt`). That is cheaper than a week at 1/128 of the bandwidth.
#
# Many scripts set `NCCL_IB_GID_INDEX=3` for RoCE. It was needed once: without it messages timed out (NVIDIA/nccl issue 426). Since 2.21 NCCL finds the index, and a number from another machine may be wrong.

# %% [markdown]
# ### 4.4 Read what NCCL did
# > difficulty 4/5 · importance 5/5 · 40 minutes · about 25 lines
#
# With `NCCL_DEBUG=INFO` each rank prints what it does, usually all into one file. 16 GPUs give thousands of lines, mixed. They tell which way your gradients go.
#
# **Predict.** Two nodes of eight GPUs. NCCL makes four channels, each with a ring of all 16 ranks; each GPU sends to the next one. How many of all links go from one node to the other?

# %%
check(cluster_links_between_nodes=...)

# %% [markdown]
# Lines of NCCL, after `host:pid:thread [GPU] NCCL INFO`:
#
# | line | says |
# |---|---|
# | `comm 0x5.. rank 3 nranks 8 .. Init COMPLETE` | this process is rank 3 |
# | `Using network IB` | what carries data between nodes |
# | `Channel 01/04 : 0 7 6 5 ...` | the ring of channel 1, by rank 0 alone |
# | `Trees [0] 1/3/-1->2->0 [1] ...` | in channel 0's tree rank 2 has children 1 and 3, and parent 0 |
# | `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM` | 0 sends to 1 over NVLink or PCIe, by CUDA's memory handles |
# | `... via SHM/direct/direct` | through memory of the host |
# | `Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA` | through card 0, and the card reads the GPU's memory itself |
# | `.. NCCL WARN ...` | what went wrong, with file and line |
#
# torch adds lines of its own when a collective doesn't end: of each rank, how many it has *enqueued*. The rank that has enqueued fewer than others is the one to look at.
#
# The forms are NCCL's source, 2.8 to 2.30 (`src/init.cc`, `src/graph/rings.cc`, `src/transport/`), and are given as patterns: COMM, RING, LINK, TREE, ENQUEUED. The logs of this lab were captured on an H100, but for one that says so. `help(NcclLog)` says what a report holds.

# %% tags=["nbval-check-output"]
from ranklab.cluster.nccl_log import (
    COMM, ENQUEUED, LINK, RING, TREE, NcclLog, nccl_lines, read_log, suspects,
)

lines = nccl_lines(read_log("killed_rank"))
print(lines[0])
print(re.search(LINK, "Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA").groupdict())
print(re.findall(TREE, "Trees [0] 1/3/-1->2->0 [1] -1/-1/-1->2->1"))


# %%
def read_nccl_log(text):
    """The NcclLog of `text`: all ranks' lines mixed with other text, or only some of them. What is
    not said stays empty. The patterns of the lines are given.

    network   after "Using network", the last time
    hosts     a process says who it is: "comm 0x.. rank 3 nranks 8", "nRanks" in newer lines
    rings     rank 0 prints "Channel 00/16 : 0 1 2 ...". NCCL cuts the list after 127 characters
              ("..."). A channel without a whole list: follow from rank 0 the first link that each
              rank opens in it; a ring only where that meets every rank once and comes back
    trees     "Trees [0] 1/-1/-1->0->-1 [1] ...": children -> rank -> parent, of each channel
    links     "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0": from 0 to 8 in channel 0. A
              network's link is said twice, by [receive] and by [send]: [send]'s word counts
    warnings  each NCCL WARN once, in the log's order; of which rank, by its process
    entered   torch's "Rank 3] ... last enqueued work: 12", whatever its words; the last time
    """
    raise NotImplementedError("exercise 4.4: about 25 lines")


# %%
read_nccl_log = check(read_nccl_log)

# %% [markdown]
# Rings by your function. Each runs through all GPUs of a node before it leaves, and each leaves by another GPU, so that each card has a ring of its own:

# %%
from ranklab.plots import cluster_links

log = read_nccl_log(read_log("two_nodes"))
cluster_links.rings(log)

# %% tags=["nbval-check-output"]
on_rings = [(channel, a, b) for channel, ring in log.rings.items()
            for a, b in zip(ring, ring[1:] + ring[:1])]
print(Counter(log.links[link].split("/")[0] for link in on_rings))
print(sorted({log.links[link] for link in on_rings}))

# %% [markdown]
# And three runs that failed, on four hosts. Which rank would you look at?

# %% tags=["nbval-check-output"]
for name in ("waiting_rank", "killed_rank", "no_infiniband"):
    report = read_nccl_log(read_log(name))
    print(f"{name}: network {report.network or 'none'}, hosts {len(report.hosts)}")
    for sentence in suspects(report):
        print("   ", sentence)

# %% [markdown]
# In the killed run ranks 1 and 3 complain, rank 0 waits, and the dead rank says nothing at all. That is usual: the loudest ranks are its neighbours in the ring.
#
# What we left out: a job of several process groups has a communicator for each, with ranks of its own, and the lines do not say which they mean; NVLS and CollNet, which reduce in a switch, have lines of their own.
