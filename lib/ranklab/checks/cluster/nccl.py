"""Lab 15, NCCL: the check of nccl_environment, and all that lab 15 asks about NCCL."""

from dataclasses import replace

from ranklab.checks.beside import expect
from ranklab.checks.cluster.nccl_text import check_read_nccl_log, turning
from ranklab.checks.exercise import Exercise, Mistake, Prediction
from ranklab.checks.trial import NO_ERROR, refusal
from ranklab.cluster import nccl, nccl_log
from ranklab.cluster.nccl import Hca, Interface, Node, Topology, selected

LOOPBACK = Interface("lo", 0, "host"), Interface("docker0", 0, "host")
ETHERNET = (*LOOPBACK, Interface("eth0", 1, "management"), Interface("eth1", 25),
            Interface("eth10", 100, "storage"), Interface("eth2", 10))
COMPUTE = tuple(Hca(f"mlx5_{i}", 400) for i in (0, 1, 3, 4, 5, 6, 8, 9))
STORAGE = tuple(Hca(f"mlx5_{i}", 200, use="storage") for i in (2, 7, 10, 11))
ROCE = tuple(Hca(f"mlx5_{i}", 400, "Ethernet") for i in range(8))
FORBIDDEN = {
    "NCCL_IB_GID_INDEX": "InfiniBand has no use for it, and since 2.21 NCCL finds it.",
    "NCCL_IB_TC": "It is a choice of the network's team: set it where they said one.",
    "NCCL_CROSS_NIC": "It says how switches are wired, and that matters with two ports or more. "
                      "Where nobody said so NCCL's default, 2, tries both.",
    "NCCL_IB_HCA": "Nothing reads it where no HCA port carries the data."}
TOO_MUCH = ("NCCL's user guide has it for debugging, or NCCL finds a better value than a guess. "
            "What is not in the docstring is not set.")


def _nodes(*of, interfaces=ETHERNET, count=2):
    """Nodes with these HCAs: one after the other, or `count` alike."""
    of = of if len(of) > 1 else of * count
    return tuple(Node(f"node{i}", interfaces, hcas) for i, hcas in enumerate(of))


def _without(hcas, name, **change):
    return tuple(replace(each, **change) if each.name == name else each for each in hcas)


TWO_FAST = (*LOOPBACK, Interface("eth1", 100), Interface("eth2", 100), Interface("eth3", 25),
            Interface("eth20", 400, up=False))
MIXED = (*(Hca(f"mlx5_{i}", 100, "Ethernet") for i in range(4)), Hca("mlx5_4", 200),
         Hca("mlx5_5", 200), Hca("mlx5_6", 200))
SLOW_FIRST = Hca("mlx5_0", 100), *(Hca(f"mlx5_{i}", 400, "Ethernet") for i in (1, 2))
TWO_PORTS = (Hca("mlx5_0", 200), Hca("mlx5_0", 200, "Ethernet", 2, "storage"), Hca("mlx5_1", 200),
             Hca("mlx5_1", 200, "Ethernet", 2, "storage"))
CASES = {  # name: (topology, interfaces, ports, other variables)
    "8 ports of 400 Gb/s on rails, 4 for storage": (
        Topology(_nodes(COMPUTE + STORAGE), fabric="rails"), ["eth1"],
        [each.label for each in COMPUTE], {"NCCL_CROSS_NIC": "0"}),
    "the same, and nobody said how switches are wired": (
        Topology(_nodes(COMPUTE + STORAGE)), ["eth1"], [each.label for each in COMPUTE], {}),
    "a port is down on one of three nodes": (
        Topology(_nodes(COMPUTE, _without(COMPUTE, "mlx5_3", up=False), COMPUTE)), ["eth1"],
        [each.label for each in COMPUTE if each.name != "mlx5_3"], {}),
    "RoCE, NCCL 2.20": (
        Topology(_nodes(ROCE), (2, 20), fabric="one switch", gid_index=5, traffic_class=106),
        ["eth1"], [each.label for each in ROCE], {
            "NCCL_IB_GID_INDEX": "5", "NCCL_IB_TC": "106", "NCCL_CROSS_NIC": "1"}),
    "RoCE, NCCL 2.21": (Topology(_nodes(ROCE), (2, 21)), ["eth1"],
                        [each.label for each in ROCE], {}),
    "InfiniBand, NCCL 2.20, a traffic class": (
        Topology(_nodes(COMPUTE), (2, 20), traffic_class=0), ["eth1"],
        [each.label for each in COMPUTE], {"NCCL_IB_TC": "0"}),
    "3 ports of InfiniBand beside 4 of RoCE": (
        Topology(_nodes(MIXED)), ["eth1"], ["mlx5_4:1", "mlx5_5:1", "mlx5_6:1"], {}),
    "2 ports of RoCE beside a slow one of InfiniBand": (
        Topology(_nodes(SLOW_FIRST), (2, 18)), ["eth1"], ["mlx5_1:1", "mlx5_2:1"],
        {"NCCL_IB_GID_INDEX": "3"}),
    "cards of two ports": (Topology(_nodes(TWO_PORTS), fabric="rails"), ["eth1"],
                           ["mlx5_0:1", "mlx5_1:1"], {"NCCL_CROSS_NIC": "0"}),
    "one port": (Topology(_nodes(COMPUTE[:1]), fabric="rails"), ["eth1"], ["mlx5_0:1"], {}),
    "Ethernet alone": (Topology(_nodes(()), fabric="rails", traffic_class=106), ["eth1"], [], {}),
    "two fast interfaces": (Topology(_nodes((), interfaces=TWO_FAST)), ["eth1", "eth2"], [], {}),
    "a node without HCAs": (Topology(_nodes(COMPUTE, (), COMPUTE)), ["eth1"], [], {}),
    "an interface is down on the last node": (
        Topology((*_nodes(()), Node("node2", tuple(_without(ETHERNET, "eth1", up=False))))),
        ["eth2"], [], {}),
    "a plugin": (Topology(_nodes(COMPUTE), plugin="AWS Libfabric", fabric="rails",
                          traffic_class=3), ["eth1"], [], {}),
}
NONE = Topology((Node("a", (*LOOPBACK, Interface("eth0", 10))), Node("b", (
    *LOOPBACK, Interface("eno1", 10), Interface("eth0", 10, "management")))))


def check_nccl_environment(nccl_environment):
    alone = nccl_environment(Topology(_nodes(COMPUTE, count=1), fabric="rails"))
    _is_text("one node", alone)
    _nothing_else("one node", alone, {})
    yield "one node needs nothing"
    for name, (topology, interfaces, ports, others) in CASES.items():
        found = nccl_environment(topology)
        _is_text(name, found)
        network = "IB" if ports else topology.plugin or "Socket"
        given = found.get("NCCL_NET", "")
        expect(given.lower() == network.lower(), f"{name}: NCCL_NET is {given!r}, not {network!r}",
               "Without it NCCL takes the best that a node has: where a driver or a plugin is "
               "missing it falls back to TCP and says nothing; nodes that differ hang.")
        _selects(name, topology, "NCCL_SOCKET_IFNAME", found, "interfaces", interfaces)
        gloo = [each for each in found.get("GLOO_SOCKET_IFNAME", "").split(",") if each]
        expect(gloo and set(gloo) <= set(interfaces), f"{name}: GLOO_SOCKET_IFNAME is "
               f"{found.get('GLOO_SOCKET_IFNAME')!r}; it is a name of {interfaces}", "Gloo takes "
               "plain names: no prefix, no =.")
        if ports:
            _selects(name, topology, "NCCL_IB_HCA", found, "hcas", ports)
        for variable, value in others.items():
            expect(found.get(variable) == value, f"{name}: {variable} is {found.get(variable)!r}, "
                   f"not {value!r}", FORBIDDEN[variable] + " Here it is needed.")
        _nothing_else(name, found, {"NCCL_NET", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
                                    *others, *(["NCCL_IB_HCA"] if ports else [])})
        yield f"{name}: {network}, {len(ports)} ports, {', '.join(interfaces)}"
    expect(refusal(nccl_environment, NONE) != NO_ERROR, "no interface for jobs is up on both "
           "nodes: no ValueError", "Names differ, or one of them is for management.")
    yield "a ValueError where nodes have no interface in common"


def _is_text(name, found):
    expect(isinstance(found, dict), f"{name}: {found!r:.60} is returned", "Return a dict; of one "
           "node an empty one.")
    for variable, value in found.items():
        expect(isinstance(value, str), f"{name}: {variable} is {value!r}, a {type(value).__name__}",
               "The environment holds text: '0', and no variable where there is nothing to say.")


def _nothing_else(name, found, wanted):
    for variable in found.keys() - set(wanted) - {"NCCL_DEBUG"}:
        raise Mistake(f"{name}: {variable}={found[variable]} is set, and must not be",
                      FORBIDDEN.get(variable, TOO_MUCH) if wanted else "In one node NCCL finds "
                      "NVLink and PCIe by itself.")


def _selects(name, topology, variable, found, kind, wanted):
    """On each node `variable` selects the `wanted` devices of those that are up, and no other."""
    expect(found.get(variable), f"{name}: {variable} is not set; it is to select "
           f"{', '.join(wanted)}", "NCCL's own choice may be another network, or not the same on "
           "each node.")
    for node in topology.nodes:
        devices = {getattr(each, "label", each.name): each for each in getattr(node, kind)}
        taken = selected(found[variable], [label for label, each in devices.items() if each.up])
        for label in taken:
            expect(label in wanted, f"{name}: {variable}={found[variable]} also selects {label} "
                   f"on {node.host}", _why(devices, label, found[variable], wanted))
        lacks = [label for label in wanted if label not in taken]
        expect(not lacks, f"{name}: {variable}={found[variable]} does not select "
               f"{', '.join(lacks)} on {node.host}", "One = stands before the whole list, names "
               "are separated by commas. All that are common and fastest carry data.")


def _why(devices, label, value, wanted):
    device, names = devices[label], {each.partition(":")[0] for each in wanted}
    links = {devices[each].link for each in wanted if isinstance(devices.get(each), Hca)}
    if device.name in names:
        return "Name the port, too: mlx5_0:1. The other port belongs to another network."
    if "=" not in value and any(device.name.startswith(each) for each in names):
        return f"A name is a prefix: {value} is also the beginning of {device.name}. Put = before."
    if device.use != "jobs":
        return f"It is for {device.use}: `use` is not \"jobs\"."
    if links and device.link not in links:
        return "InfiniBand and RoCE can't talk to each other: take the link with more Gb/s."
    return ("It is slower than others, of another link, or not up on every node: what one node "
            "uses all must have.")


NCCL = (
    Exercise(nccl.nccl_environment, check_nccl_environment, hints=(
        "First what all nodes have in common: usable by jobs, up, the same name. Then the fastest.",
        "For each node a dict {name: device} of those that are up and for jobs; common are the "
        "names of the first that are in all others. Ports have name and number, and are grouped by "
        "their link.",
        'names = [each.name for each in interfaces if each.gbit == fastest]; {"NCCL_NET": '
        'topology.plugin or "Socket", "NCCL_SOCKET_IFNAME": "=" + ",".join(names), '
        '"GLOO_SOCKET_IFNAME": names[0]}',
    )),
    Exercise(nccl_log.read_nccl_log, check_read_nccl_log, hints=(
        "Each rank says its own part: go through all lines, and put together what belongs to a "
        "channel.",
        "A dict of (host, pid) -> rank, one of (channel, from, to) -> transport, and one of "
        "(channel, rank) -> the first rank it opens a link to. Ring lists that are cut do not "
        "match RING as a whole.",
        "ring = [0]; while (after := opened.get((channel, ring[-1]))) not in (None, *ring): "
        "ring.append(after)",
    )),
)
PREDICTIONS_OF_NCCL = (
    Prediction(
        "cluster_fallback_times_slower", solution="8 * 400 / 25", unit="times", tolerance=0,
        answer=lambda: (nccl.node_bandwidth(Topology(_nodes(COMPUTE)), {"NCCL_NET": "IB"})
                        / nccl.node_bandwidth(Topology(_nodes(())), {
                            "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth1"})),
        hint="How many Gb/s leave a node by all its cards, and how many by the interface?",
        mistakes={16.0: "a node has eight of the cards, and the traffic of all its GPUs shares the "
                  "one interface", 1 / 128: "the other way round", 1024.0: "both are in bits: no "
                  "factor of 8 is left"},
        why="A node sends 400 GB/s, or 3.1 GB/s. And nothing fails: the run is slow.",
    ),
    Prediction(
        "cluster_links_between_nodes", solution="4 * 2", unit="links", tolerance=0,
        answer=lambda: float(sum(source // 8 != target // 8 for ring in turning(16, 8, 4).values()
                                 for source, target in zip(ring, ring[1:] + ring[:1]))),
        hint="How often does one ring leave a node?",
        mistakes={2.0: "that is one ring: there are four", 4.0: "a ring that goes to the other "
                  "node comes back", 64.0: "all links; most stay in their node", 16.0: "a "
                  "link is one, though both of its ends print it"},
        why="Of 4 x 16 links 8 cross, two for each ring: a ring runs through all GPUs of a node "
            "before it leaves.",
    ),
)
