"""Lab 15, NCCL: right answers that differ from the library's. Each must pass."""

import re
from collections import Counter, defaultdict

from ranklab.cluster.nccl_log import COMM, ENQUEUED, LINK, RING, TREE, NcclLog, nccl_lines


def nccl_environment__by_exclusion(topology):
    nodes = topology.nodes
    if len(nodes) < 2:
        return {}

    def split(devices_of, key):
        """(names that are everywhere, all others that some node has up)"""
        everywhere = Counter(key(each) for node in nodes for each in devices_of(node)
                             if each.up and each.use == "jobs")
        common = {name for name, times in everywhere.items() if times == len(nodes)}
        return common, {key(each) for node in nodes for each in devices_of(node)} - common

    eth, other = split(lambda node: node.interfaces, lambda each: each.name)
    if not eth:
        raise ValueError("the nodes share no interface")
    speed = {each.name: each.gbit for each in nodes[-1].interfaces}
    best = sorted(name for name in eth if speed[name] == max(map(speed.get, eth)))
    env = {"NCCL_SOCKET_IFNAME": "^=" + ",".join(sorted(other | (eth - set(best)))),
           "GLOO_SOCKET_IFNAME": ",".join(best), "NCCL_DEBUG": "WARN",
           "NCCL_NET": topology.plugin.lower() or "socket"}
    ports, _ = split(lambda node: node.hcas, lambda each: (each.label, each.link))
    totals = Counter()
    for hca in nodes[0].hcas:
        totals[hca.link] += hca.gbit * ((hca.label, hca.link) in ports)
    if topology.plugin or not +totals:
        return env
    link = totals.most_common(1)[0][0]
    env["NCCL_NET"] = "ib"
    env["NCCL_IB_HCA"] = "^=" + ",".join(sorted(
        {hca.label for node in nodes for hca in node.hcas
         if (hca.label, hca.link) not in ports or hca.link != link} or {"none"}))
    if topology.traffic_class is not None:
        env.update(NCCL_IB_TC=f"{topology.traffic_class}")
    if topology.fabric and sum(each[1] == link for each in ports) > 1:
        env.update(NCCL_CROSS_NIC="0" if topology.fabric == "rails" else "1")
    return env


def read_nccl_log__in_passes(text):
    lines = nccl_lines(text)
    who = {(line.host, line.pid): re.search(COMM, line.text)["rank"] for line in lines
           if re.search(COMM, line.text)}
    whole = [re.fullmatch(RING, line.text) for line in lines]
    rings = {int(each["channel"]): tuple(int(rank) for rank in each["order"].split())
             for each in whole if each}
    arrows = [each for each in (re.match(LINK, line.text) for line in lines) if each]
    arrows.sort(key=lambda each: each["side"] != "receive")  # the sender's word comes last
    keys = [(int(each["channel"]), int(each["source"]), int(each["target"])) for each in arrows]
    links = {key: each["via"] for key, each in zip(keys, arrows)}
    first = {}
    for (channel, source, target), each in list(zip(keys, arrows))[::-1]:
        if each["side"] != "receive":
            first[channel, source] = target
    size = max([int(re.search(COMM, line.text)["ranks"]) for line in lines
                if re.search(COMM, line.text)], default=0)
    for channel in {key[0] for key in keys if key[0] not in rings}:
        walk = [0]
        while len(walk) < size and (channel, walk[-1]) in first:
            walk.append(first[channel, walk[-1]])
        if sorted(walk) == list(range(size)) and first.get((channel, walk[-1])) == 0:
            rings[channel] = tuple(walk)
    trees = {}
    for line in lines:
        if line.text.startswith("Trees"):
            for channel, *pair in re.findall(TREE, line.text):
                trees.setdefault(int(channel), {}).update([map(int, pair)])
    hosts = defaultdict(list)
    for (host, _), rank in who.items():
        hosts[host] = sorted([*hosts[host], int(rank)])
    warned = {}
    for line in lines:
        rank = who.get((line.host, line.pid))
        if line.warns:
            warned[rank and int(rank), line.text] = "once"
    network = ""
    for line in lines:
        if line.text.startswith("Using network "):
            network = line.text.removeprefix("Using network ")
    return NcclLog(network=network, hosts=dict(hosts), rings=rings, trees=trees, links=links,
                   warnings=tuple(warned),
                   entered={int(a): int(b) for a, b in re.findall(ENQUEUED, text)})
