"""Lab 15: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import re
import shlex
from collections import defaultdict, deque
from functools import reduce
import numpy as np
from ranklab.cluster.acceptance import ROW, Suspects
from ranklab.cluster.nccl_log import COMM, ENQUEUED, LINK, RING, TREE, NcclLog, nccl_lines
from ranklab.cluster.storage import StoragePlan


def sbatch_script__head_and_test(job):
    """A list of lines; the first host by head, the end by test and &&."""
    quoted = shlex.quote
    cpus = job.cpus * job.gpus
    options = {
        "job-name": quoted(job.name), "nodes": job.nodes, "ntasks-per-node": 1,
        "gpus-per-node": job.gpus, "cpus-per-task": cpus, "time": job.minutes,
        "output": "%x-%j.out", "open-mode": "append", "signal": f"TERM@{job.save_seconds + 60}"}
    exports = dict(job.environment)
    exports["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)
    if job.interface:
        exports |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), job.interface)
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items()),
             "#SBATCH --requeue", ""]
    lines += [f"export {name}={quoted(value)}" for name, value in exports.items()]
    lines += [
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        f"srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait={job.save_seconds + 30} "
        f"torchrun --nnodes={job.nodes} --nproc-per-node={job.gpus} "
        f"--max-restarts={job.restarts} --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID "
        f"--rdzv-endpoint=$first:$port {shlex.join(job.command)}",
        "code=$?",
        f'[ $code -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.requeues} ] && '
        'scontrol requeue "$SLURM_JOB_ID"',
        "exit $code"]
    return "\n".join(lines) + "\n"


def sbatch_script__function_and_trap(job):
    """bash -u, an array of hosts, and the requeue in a trap of EXIT."""
    cpus, wait = job.gpus * job.cpus, job.save_seconds + 30
    variables = [*job.environment, ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", job.save_seconds)]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        variables += [(name, job.interface)] * bool(job.interface)
    exports = "\n".join(f"{name}={shlex.quote(str(value))}\nexport {name}"
                        for name, value in variables)
    command = " ".join(map(shlex.quote, job.command))
    return f"""#!/usr/bin/env bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --cpus-per-task={cpus}
#SBATCH --time={job.minutes}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH --signal=TERM@{60 + job.save_seconds}
set -u
{exports}

at_the_end() {{
    local code=$?
    if (( code != 0 && ${{SLURM_RESTART_COUNT:-0}} < {job.requeues} )); then
        scontrol requeue "${{SLURM_JOB_ID}}"
    fi
    exit "$code"
}}
trap at_the_end EXIT

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
arguments=(
    --nnodes={job.nodes}
    --nproc-per-node={job.gpus}
    --max-restarts={job.restarts}
    --rdzv-backend=c10d
    --rdzv-id="$SLURM_JOB_ID"
    --rdzv-endpoint="${{hosts[0]}}:$(( SLURM_JOB_ID % 40000 + 10000 ))"
)
srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait={wait} \\
    torchrun "${{arguments[@]}}" {command}
"""


def nccl_environment__intersections(topology):
    """Dicts of what each node has, intersected by reduce."""
    nodes = topology.nodes
    if len(nodes) < 2:
        return {}

    def common(devices_of, key):
        each = [{key(d): d.gbit for d in devices_of(node) if d.up and d.use == "jobs"}
                for node in nodes]
        return reduce(lambda a, b: {k: min(a[k], b[k]) for k in a if k in b}, each)

    interfaces = common(lambda node: node.interfaces, lambda d: d.name)
    if not interfaces:
        raise ValueError("the nodes have no interface in common")
    names = [name for name, gbit in interfaces.items() if gbit == max(interfaces.values())]
    environment = {"NCCL_SOCKET_IFNAME": "=" + ",".join(names),
                   "GLOO_SOCKET_IFNAME": ",".join(names)}
    ports = common(lambda node: node.hcas, lambda d: (d.label, d.link))
    network = topology.plugin or ("IB" if ports else "Socket")
    environment["NCCL_NET"] = network
    if network == "IB" and ports:
        total = defaultdict(float)
        for (_, link), gbit in ports.items():
            total[link] += gbit
        link = max(total, key=total.get)
        labels = [label for label, of in ports if of == link]
        environment["NCCL_IB_HCA"] = "=" + ",".join(labels)
        if topology.traffic_class is not None:
            environment["NCCL_IB_TC"] = str(topology.traffic_class)
        crossing = {"rails": "0", "one switch": "1"}.get(topology.fabric)
        if crossing and len(labels) > 1:
            environment["NCCL_CROSS_NIC"] = crossing
    return environment


def nccl_environment__first_node_filtered(topology):
    """Filters the first node's devices by all others; gloo gets one name."""
    first, *others = topology.nodes
    if not others:
        return {}

    def usable(devices):
        return [d for d in devices if d.up and d.use == "jobs"]

    interfaces = [d for d in usable(first.interfaces)
                  if all(d.name in [e.name for e in usable(node.interfaces)] for node in others)]
    if not interfaces:
        raise ValueError(f"{first.host} shares no interface with all others")
    speeds = {d.name: min(e.gbit for node in topology.nodes for e in usable(node.interfaces)
                          if e.name == d.name) for d in interfaces}
    fastest = sorted(name for name in speeds if speeds[name] == max(speeds.values()))
    found = {"NCCL_SOCKET_IFNAME": f"={','.join(fastest)}", "GLOO_SOCKET_IFNAME": fastest[0]}
    ports = [d for d in usable(first.hcas)
             if all(any((d.name, d.port, d.link) == (e.name, e.port, e.link)
                        for e in usable(node.hcas)) for node in others)]
    if topology.plugin:
        return found | {"NCCL_NET": topology.plugin}
    if not ports:
        return found | {"NCCL_NET": "Socket"}
    by_link = [[d for d in ports if d.link == link] for link in ("InfiniBand", "Ethernet")]
    chosen = max(by_link, key=lambda devices: sum(d.gbit for d in devices))
    found |= {"NCCL_NET": "IB", "NCCL_IB_HCA": "=" + ",".join(d.label for d in chosen)}
    if topology.traffic_class is not None:
        found["NCCL_IB_TC"] = f"{topology.traffic_class}"
    if len(chosen) >= 2 and topology.fabric in ("rails", "one switch"):
        found["NCCL_CROSS_NIC"] = "0" if topology.fabric == "rails" else "1"
    return found


def _walk(after, ranks):
    path, at = [], 0
    while at not in path:
        path.append(at)
        if at not in after:
            return None
        at = after[at]
    return tuple(path) if at == 0 and len(path) == ranks else None


def read_nccl_log__several_passes(text):
    """A pass over the lines for each field."""
    lines = nccl_lines(text)
    told = [(line, re.search(COMM, line.text)) for line in lines]
    rank_of = {(line.host, line.pid): int(match["rank"]) for line, match in told if match}
    ranks = max((int(match["ranks"]) for _, match in told if match), default=0)
    hosts = {}
    for (host, _), rank in rank_of.items():
        hosts[host] = tuple(sorted({*hosts.get(host, ()), rank}))
    networks = [line.text.partition("Using network ")[2].strip() for line in lines
                if "Using network " in line.text]
    links, sides, after = {}, {}, {}
    for line in lines:
        match = re.search(LINK, line.text)
        if not match:
            continue
        channel, source, target = (int(match[n]) for n in ("channel", "source", "target"))
        key = channel, source, target
        if key not in links or sides[key] == "receive" != match["side"]:
            links[key], sides[key] = match["via"].strip(), match["side"]
        if match["side"] != "receive":
            after.setdefault(channel, {}).setdefault(source, target)
    rings = {}
    for line in lines:
        match = re.fullmatch(RING, line.text)
        if match and match["order"].strip():
            rings[int(match["channel"])] = tuple(map(int, match["order"].split()))
    for channel, steps in after.items():
        if channel not in rings and (path := _walk(steps, ranks)):
            rings[channel] = path
    trees = {}
    for line in lines:
        for channel, rank, parent in re.findall(TREE, line.text):
            trees.setdefault(int(channel), {})[int(rank)] = int(parent)
    warnings = tuple(dict.fromkeys((rank_of.get((line.host, line.pid)), line.text)
                                   for line in lines if line.warns))
    entered = {int(rank): int(number) for rank, number in re.findall(ENQUEUED, text)}
    return NcclLog(networks[-1] if networks else "", hosts, rings, trees, links, warnings, entered)


def read_nccl_log__one_loop(text):
    """One loop that tries each pattern on a line, then what needs the whole log."""
    network, ranks, process = "", 0, {}
    whole, sent, received, follows, trees = {}, {}, {}, defaultdict(list), defaultdict(dict)
    complaints, entered = [], {}
    for line in nccl_lines(text):
        said, who = line.text, (line.host, line.pid)
        if line.warns:
            complaints.append((who, said))
        if found := re.match(COMM, said):
            process[who], ranks = int(found["rank"]), int(found["ranks"])
        if found := re.search(r"Using network (.+)", said):
            network = found[1].strip()
        if found := re.search(LINK, said):
            key = int(found["channel"]), int(found["source"]), int(found["target"])
            if found["side"] == "receive":
                received.setdefault(key, found["via"])
            else:
                sent.setdefault(key, found["via"])
                follows[key[0]].append(key[1:])
        elif (found := re.match(RING + "$", said)) and "..." not in said:
            whole[int(found["channel"])] = tuple(int(r) for r in found["order"].split())
        if said.startswith("Trees"):
            for channel, rank, parent in re.findall(TREE, said):
                trees[int(channel)][int(rank)] = int(parent)
    for line in text.splitlines():
        for rank, number in re.findall(ENQUEUED, line):
            entered[int(rank)] = int(number)
    hosts = defaultdict(set)
    for (host, _), rank in process.items():
        hosts[host].add(rank)
    for channel, steps in follows.items():
        after = dict(reversed(steps))  # so that the first link of a rank stays
        path = _walk(after, ranks)
        if path:
            whole.setdefault(channel, path)
    warnings = []
    for who, said in complaints:
        if (process.get(who), said) not in warnings:
            warnings.append((process.get(who), said))
    return NcclLog(network=network, hosts={h: tuple(sorted(r)) for h, r in hosts.items()},
                   rings=whole, trees=dict(trees), links=received | sent,
                   warnings=tuple(warnings), entered=entered)


def mfu_alert_rule__average_rank(least, minutes):
    """The mean rate of a rank, times FLOPs, over the peak of one GPU."""
    tokens, flops, peak = (f"avg by (run) ({each})" for each in (
        "rate(train_tokens_total[4m])", "avg_over_time(train_flops_per_token[4m])",
        "avg_over_time(train_peak_flops[4m])"))
    return {"alert": "LowMFU", "expr": f"{tokens} * {flops} / {peak} < {least}",
            "for": f"{minutes}m", "labels": {"severity": "page"},
            "annotations": {"summary": "run {{ $labels.run }} has an MFU of {{ $value }}"}}


def mfu_alert_rule__sums(least, minutes):
    """FLOPs of all ranks in a second, over the sum of their peaks."""
    work = ("sum by (run) (rate(train_tokens_total[5m]) "
            "* avg_over_time(train_flops_per_token[5m]))")
    return {
        "alert": "TooLittleWork",
        "expr": f"{work} / sum by (run) (avg_over_time(train_peak_flops[5m])) < {least}",
        "for": f"{minutes}m",
        "labels": {"severity": "critical"},
        "annotations": {
            "summary": "{{ $labels.run }} is slow",
            "description": "MFU {{ $value }} of {{ $labels.run }} for " + f"{minutes} minutes"},
    }


def straggler_rule__ratio_of_means(factor, minutes):
    """Means of two minutes, divided by their median."""
    mean = "avg_over_time(train_step_seconds[2m])"
    return {"alert": "SlowRank",
            "expr": f"{mean} / on (run) group_left quantile by (run) (0.5, {mean}) > {factor}",
            "for": f"{minutes}m", "labels": {"severity": "warning"},
            "annotations": {"summary": "rank {{ $labels.rank }} of {{ $labels.run }} takes "
                                       "{{ $value }} times as long as the median rank"}}


def straggler_rule__compared(factor, minutes):
    """Means of one minute, each divided by `factor` and then by the median; above 1 is slow."""
    mean = "avg_over_time(train_step_seconds[1m])"
    median = f"quantile by (run) (0.5, {mean})"
    return {"alert": "Straggler",
            "expr": f"({mean} / {factor}) / on (run) group_left {median} > 1",
            "for": f"{60 * minutes}s", "labels": {"severity": "critical"},
            "annotations": {"text": "{{ $labels.run }}: rank {{ $labels.rank }}, {{ $value }} x "
                                    "what is allowed"}}


def _torchrun_env(job):
    env = {**dict(job.environment), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds)}
    if job.interface:
        env["NCCL_SOCKET_IFNAME"] = env["GLOO_SOCKET_IFNAME"] = job.interface
    return [{"name": name, "value": value} for name, value in env.items()]


def train_job_manifest__two_branches(job, kind="TrainJob"):
    """A literal dict for each kind."""
    if kind not in ("TrainJob", "JobSet") or not job.image:
        raise ValueError(f"kind {kind!r}, image {job.image!r}")
    resources = {"limits": {"nvidia.com/gpu": job.gpus}, "requests": {"cpu": job.cpus * job.gpus}}
    restarts, seconds = f"--max-restarts={job.restarts}", 60 * job.minutes
    if kind == "TrainJob":
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": kind,
            "metadata": {"name": job.name},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "activeDeadlineSeconds": seconds,
                     "trainer": {"numNodes": job.nodes, "numProcPerNode": job.gpus,
                                 "image": job.image, "command": ["torchrun", restarts],
                                 "args": list(job.command), "env": _torchrun_env(job),
                                 "resourcesPerNode": resources}}}
    container = {
        "name": "node", "image": job.image, "command": ["torchrun"],
        "args": [f"--nnodes={job.nodes}", f"--nproc-per-node={job.gpus}", restarts,
                 "--rdzv-backend=c10d", f"--rdzv-endpoint={job.name}-node-0-0.{job.name}:29400",
                 *job.command],
        "env": _torchrun_env(job), "resources": resources}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.save_seconds,
           "containers": [container]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": kind, "metadata": {"name": job.name},
        "spec": {"failurePolicy": {"maxRestarts": job.requeues},
                 "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": {
                     "parallelism": job.nodes, "completions": job.nodes,
                     "completionMode": "Indexed", "backoffLimit": 0,
                     "activeDeadlineSeconds": seconds, "template": {"spec": pod}}}}]}}


def train_job_manifest__text_quantities(job, kind="TrainJob"):
    """Quantities as text, options as two words, and the kinds in a table of functions."""
    options = ["--max-restarts", str(job.restarts)]
    shared = {"image": job.image, "env": _torchrun_env(job)}
    resources = {"requests": {"cpu": f"{job.gpus * job.cpus}", "nvidia.com/gpu": str(job.gpus)},
                 "limits": {"nvidia.com/gpu": str(job.gpus)}}

    def train_job():
        return "trainer.kubeflow.org/v1alpha1", {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime",
                           "name": "torch-distributed"},
            "activeDeadlineSeconds": job.minutes * 60,
            "trainer": shared | {"numNodes": job.nodes, "numProcPerNode": job.gpus,
                                 "command": ["torchrun"], "args": options + [*job.command],
                                 "resourcesPerNode": resources}}

    def job_set():
        head = f"{job.name}-node-0-0.{job.name}"
        where = ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.gpus),
                 "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:12345"]
        node = {"name": "node", "resources": resources, "command": ["torchrun"] + where + options,
                "args": [*job.command]} | shared
        pods = {"restartPolicy": "Never", "containers": [node],
                "terminationGracePeriodSeconds": job.save_seconds}
        jobs = dict.fromkeys(("parallelism", "completions"), job.nodes) | {
            "completionMode": "Indexed", "backoffLimit": 0,
            "activeDeadlineSeconds": job.minutes * 60, "template": {"spec": pods}}
        return "jobset.x-k8s.io/v1alpha2", {
            "failurePolicy": {"maxRestarts": job.requeues},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": jobs}}]}

    kinds = {"TrainJob": train_job, "JobSet": job_set}
    if kind not in kinds:
        raise ValueError(f"{kind} is neither of {list(kinds)}")
    if not job.image:
        raise ValueError("a pod needs an image")
    version, spec = kinds[kind]()
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def storage_plan__dicts(load, system):
    """A dict {bound: seconds} for the save and for the restart."""
    ranks, speed = load.nodes * load.gpus, min(load.link, system.client)
    if load.sharded:
        save = {"link": load.checkpoint / load.nodes / speed,
                "file system": load.checkpoint / system.write,
                "metadata": ranks / system.operations}
        read = load.checkpoint * load.copies
        opened = ranks * load.copies
    else:
        save = {"link": load.checkpoint / speed, "file system": load.checkpoint / system.write,
                "metadata": 1 / system.operations}
        read, opened = load.checkpoint * load.nodes, load.nodes
    restart = {"link": read / load.nodes / speed, "file system": read / system.read,
               "metadata": opened / system.operations}
    save_bound, restart_bound = max(save, key=save.get), max(restart, key=restart.get)
    data = load.data * load.interval
    busy = max(data / load.nodes / speed, data / system.read)
    busy += save[save_bound] * load.background
    turn = max(load.interval, busy) + save[save_bound] * (not load.background)
    return StoragePlan(save[save_bound], save_bound, restart[restart_bound], restart_bound,
                       busy <= load.interval, (turn - load.interval) / turn)


def storage_plan__numpy(load, system):
    """One function of (nodes, bytes of a node, speed, files), and numpy's argmax."""
    names = ("link", "file system", "metadata")

    def slowest(nodes, each, speed, files):
        seconds = np.array([each / min(load.link, system.client), nodes * each / speed,
                            files / system.operations])
        return float(seconds.max()), names[seconds.argmax()]

    n, size, ranks = load.nodes, load.checkpoint, load.nodes * load.gpus
    writers, files = (n, ranks) if load.sharded else (1, 1)
    save, save_bound = slowest(writers, size / writers, system.write, files)
    restart, restart_bound = slowest(
        n, size * load.copies / n if load.sharded else size, system.read,
        load.copies * ranks if load.sharded else n)
    data, _ = slowest(n, load.data * load.interval / n, system.read, 0)
    together = data + save if load.background else data
    turn = max(load.interval, together)
    if not load.background:
        turn += save
    return StoragePlan(save_seconds=save, save_bound=save_bound, restart_seconds=restart,
                       restart_bound=restart_bound, fits=together <= load.interval,
                       lost=1 - load.interval / turn)


def pair_rounds__sums(nodes):
    """In round r meet those whose numbers add up to r; whoever is left over meets the last node."""
    odd = len(nodes) - (len(nodes) % 2 == 0)
    rounds = []
    for r in range(odd if len(nodes) > 1 else 0):
        pairs = {frozenset((a, (r - a) % odd)) for a in range(odd)}
        rounds.append([tuple(nodes[i] for i in (*pair, len(nodes) - 1)[:2]) for pair in pairs
                       if len(pair) == 2 or odd < len(nodes)])
    return rounds


def pair_rounds__deque(nodes):
    """Pop the fixed node, and rotate a deque of the others by two places."""
    if len(nodes) < 2:
        return []
    others = deque([*nodes, *["nobody"] * (len(nodes) % 2)])
    fixed, rounds = others.pop(), []
    for _ in range(len(others)):
        first, *rest = others
        pairs = [(fixed, first), *((rest[i], rest[-1 - i]) for i in range(len(rest) // 2))]
        rounds.append([pair for pair in pairs if "nobody" not in pair])
        others.rotate(2)
    return rounds


def suspect_parts__matrix(outputs, block_of, share=0.9):
    """A table of nodes by nodes; rows and rectangles that are all slow."""
    names = [*block_of]
    rate = np.full((len(names), len(names)), np.nan)
    for (a, b), text in outputs.items():
        lines = [line.split() for line in text.splitlines() if re.match(r" *\d", line)]
        is_right = lines and not any(line[8].strip("0").isdigit() for line in lines)
        i, j = names.index(a), names.index(b)
        rate[i, j] = rate[j, i] = float(lines[-1][7]) if is_right else 0
    slow = rate < share * np.nanmedian(rate)
    np.fill_diagonal(slow, True)
    bad = slow.all(1)
    blocks = []
    for block in {*block_of.values()}:
        inside = np.array([block_of[name] == block for name in names])
        across = slow[np.ix_(inside & ~bad, ~inside & ~bad)]
        if across.size and across.all():
            blocks.append(block)
    left = [(a, b) for a, b in outputs
            if slow[names.index(a), names.index(b)]
            and not bad[names.index(a)] and not bad[names.index(b)]
            and (block_of[a] == block_of[b] or not {block_of[a], block_of[b]} & {*blocks})]
    return Suspects([name for name, is_bad in sorted(zip(names, bad)) if is_bad],
                    sorted(blocks), sorted(left))


def suspect_parts__removing(outputs, block_of, share=0.9):
    """Slow pairs are a set, from which what is explained is taken out."""
    rates = {}
    for pair, text in outputs.items():
        rates[pair] = 0
        for match in re.finditer(ROW, text):
            rates[pair] = float(match["busbw"])
        if any(match["wrong"] not in "0 N/A" for match in re.finditer(ROW, text)):
            rates[pair] = 0
    limit = share * float(np.median([*rates.values()]))
    slow, nodes, blocks = {pair for pair, rate in rates.items() if rate < limit}, [], []
    fast = {node for pair in outputs if pair not in slow for node in pair}
    nodes = sorted(block_of.keys() - fast)
    rates = {pair: rate for pair, rate in rates.items() if not {*pair} & {*nodes}}
    for block in sorted({*block_of.values()}):
        across = [(a, b) for a, b in rates if (block_of[a] == block) != (block_of[b] == block)]
        if across and all(pair in slow for pair in across):
            blocks.append((block, across))
    slow &= rates.keys()
    slow -= {pair for _, across in blocks for pair in across}
    return Suspects(nodes, [block for block, _ in blocks], sorted(slow))
