"""Lab 15, NCCL: the check of nccl_environment, and all that lab 15 asks about NCCL."""

from dataclasses import replace

from ranklab.checks.beside import expect
from ranklab.checks.cluster.nccl_text import check_read_nccl_log
from ranklab.checks.exercise import Exercise
from ranklab.checks.trial import NO_ERROR, refusal
from ranklab.cluster import nccl, nccl_log
from ranklab.cluster.nccl import Hca, Interface, Node, Topology, selected

LOOPBACK = Interface("lo", 0, "host"), Interface("docker0", 0, "host")
ETHERNET = (*LOOPBACK, Interface("eth0", 1, "management"), Interface("eth1", 25),
            Interface("eth10", 100, "storage"), Interface("eth2", 10))
COMPUTE = tuple(Hca(f"mlx5_{i}", 400) for i in (0, 1, 3, 4, 5, 6, 8, 9))
STORAGE = tuple(Hca(f"mlx5_{i}", 200, use="storage") for i in (2, 7, 10, 11))
ROCE = tuple(Hca(f"mlx5_{i}", 400, "Ethernet") for i in range(8))
TOO_MUCH = {
    "NCCL_IB_GID_INDEX": "NCCL finds it by itself, since 2.21. A number fits only one machine.",
    "NCCL_IB_TC": "The network's team chooses it, and only for InfiniBand and RoCE.",
    "NCCL_CROSS_NIC": "It says how switches are wired. If you don't know that, or a node has only "
                      "one port, leave the choice to NCCL.",
    "NCCL_IB_HCA": "Nothing reads it if no HCA port carries the data."}
NOT_ASKED = "The docstring does not list it: NCCL chooses, or it is for debugging."


def nodes(*hcas, interfaces=ETHERNET):
    return tuple(Node(f"node{i}", interfaces, each) for i, each in enumerate(hcas))


def _down(devices, name):
    return tuple(replace(each, up=each.name != name) for each in devices)


TWO_FAST = (*LOOPBACK, Interface("eth3", 25), Interface("eth1", 100), Interface("eth2", 100),
            Interface("eth20", 400, up=False))
MIXED = (*(Hca(f"mlx5_{i}", 100, "Ethernet") for i in range(4)),
         *(Hca(f"mlx5_{i}", 200) for i in (4, 5, 6)))
SLOW_FIRST = Hca("mlx5_0", 100), Hca("mlx5_1", 400, "Ethernet"), Hca("mlx5_2", 400, "Ethernet")
TWO_PORTS = tuple(Hca(f"mlx5_{i}", 200, *port) for i in (0, 1)
                  for port in (("InfiniBand", 1), ("Ethernet", 2, "storage")))
ROCE_ON_ONE = (Hca("mlx5_0", 400, "Ethernet"), *COMPUTE[1:])
CASES = {  # name: (topology, interfaces, HCAs or what is used instead, other variables)
    "8 ports on rails, 4 for storage": (Topology(
        nodes(COMPUTE + STORAGE, COMPUTE + STORAGE), fabric="rails"), "eth1", COMPUTE,
        {"NCCL_CROSS_NIC": "0"}),
    "a port is down on one of three nodes": (
        Topology(nodes(COMPUTE, _down(COMPUTE, "mlx5_3"), COMPUTE), traffic_class=0), "eth1",
        _down(COMPUTE, "mlx5_3"), {"NCCL_IB_TC": "0"}),
    "RoCE, all ports on one switch": (
        Topology(nodes(ROCE, ROCE), fabric="one switch", traffic_class=106), "eth1", ROCE,
        {"NCCL_IB_TC": "106", "NCCL_CROSS_NIC": "1"}),
    "3 ports of InfiniBand beside 4 slower ones of RoCE": (
        Topology(nodes(MIXED, MIXED)), "eth1", MIXED[4:], {}),
    "2 ports of RoCE beside a slow one of InfiniBand": (
        Topology(nodes(SLOW_FIRST, SLOW_FIRST)), "eth1", SLOW_FIRST[1:], {}),
    "cards of two ports": (Topology(nodes(TWO_PORTS, TWO_PORTS), fabric="rails"), "eth1",
                           TWO_PORTS[::2], {"NCCL_CROSS_NIC": "0"}),
    "a port is InfiniBand on one node and RoCE on the other": (
        Topology(nodes(COMPUTE, ROCE_ON_ONE)), "eth1", COMPUTE[1:], {}),
    "one port": (Topology(nodes(COMPUTE[:1], COMPUTE[:1]), fabric="rails"), "eth1", COMPUTE[:1],
                 {}),
    "Ethernet alone, two fast interfaces": (Topology(
        nodes((), (), interfaces=TWO_FAST), fabric="rails", traffic_class=106), "eth1 eth2",
        "Socket", {}),
    "a node has no HCAs, the last one lacks an interface": (Topology((
        *nodes(COMPUTE, ()), Node("node2", _down(ETHERNET, "eth1"), COMPUTE))), "eth2", "Socket",
        {}),
    "a plugin": (Topology(nodes(COMPUTE, COMPUTE), "AWS Libfabric", "rails", 3), "eth1",
                 "AWS Libfabric", {}),
}
APART = Topology((Node("a", (*LOOPBACK, Interface("eth0", 10))), Node("b", (
    *LOOPBACK, Interface("eno1", 10), Interface("eth0", 10, "management")))))


def check_nccl_environment(nccl_environment):
    alone = nccl_environment(Topology(nodes(COMPUTE), fabric="rails"))
    expect(isinstance(alone, dict) and not alone.keys() - {"NCCL_DEBUG"}, f"one node: {alone!r:.60}"
           " is returned", "Return an empty dict: in a node NCCL finds NVLink and PCIe itself.")
    yield "one node needs nothing"
    for name, (topology, interfaces, hcas, others) in CASES.items():
        _fits(name, nccl_environment(topology), topology, interfaces.split(), hcas, others)
        yield name
    expect(refusal(nccl_environment, APART) != NO_ERROR, "no interface for jobs is up on both "
           "nodes: no ValueError", "The names differ, or one of them is for management.")
    yield "a ValueError where nodes have no interface in common"


def _fits(name, found, topology, interfaces, hcas, others):
    network, ports = (hcas, []) if isinstance(hcas, str) else (
        "IB", [each.label for each in hcas if each.up])
    for variable, value in found.items():
        expect(isinstance(value, str), f"{name}: {variable} is {value!r}, a {type(value).__name__}",
               "The environment holds text, such as '0', and no variable without need.")
    given = found.get("NCCL_NET", "")
    expect(given.lower() == network.lower(), f"{name}: NCCL_NET is {given!r}, not {network!r}",
           "" if given else "Without it NCCL takes what a node has, and quietly falls back to TCP.")
    _selects(name, topology, "NCCL_SOCKET_IFNAME", found, "interfaces", interfaces)
    gloo = found.get("GLOO_SOCKET_IFNAME", "")
    expect(gloo and {*gloo.split(",")} <= {*interfaces}, f"{name}: GLOO_SOCKET_IFNAME is "
           f"{gloo!r}; it should have names of {interfaces}", "Gloo takes plain names, without =.")
    if ports:
        _selects(name, topology, "NCCL_IB_HCA", found, "hcas", ports)
    for variable, value in others.items():
        expect(found.get(variable) == value, f"{name}: {variable} is {found.get(variable)!r}, "
               f"not {value!r}", "See its line in the docstring.")
    known = {"NCCL_NET", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", *others}
    more = sorted(found.keys() - known - ({"NCCL_IB_HCA"} if ports else set()))
    hint = TOO_MUCH.get(next(iter(more), ""), NOT_ASKED)
    is_wiring = more[:1] == ["NCCL_CROSS_NIC"]  # that hint is about InfiniBand and RoCE
    expect(not more, f"{name}: {', '.join(f'{each}={found[each]}' for each in more)} is set, and "
           "must not be", "" if is_wiring and not ports else hint)


def _selects(name, topology, variable, found, kind, wanted):
    """On each node `variable` selects the `wanted` devices of those that are up, and no other."""
    value = found.get(variable)
    expect(value, f"{name}: {variable} is not set; it is to select {', '.join(wanted)}",
           "NCCL's own choice may be another network.")
    for node in topology.nodes:
        devices = {getattr(each, "label", each.name): each for each in getattr(node, kind)}
        taken = selected(value, [label for label, each in devices.items() if each.up])
        for label in taken:
            expect(label in wanted, f"{name}: {variable}={value} also selects {label} on "
                   f"{node.host}", _why(devices, label, value, wanted))
        lacks = [label for label in wanted if label not in taken]
        expect(not lacks, f"{name}: {variable}={value} does not select {', '.join(lacks)} on "
               f"{node.host}", "Write one = before the whole list, and commas between names. All "
               "wanted devices carry data.")


def _why(devices, label, value, wanted):
    device, names = devices[label], {each.partition(":")[0] for each in wanted}
    links = {devices[each].link for each in wanted if isinstance(devices.get(each), Hca)}
    if device.name in names:
        return "Name the port, too: mlx5_0:1. The other port belongs to another network."
    if "=" not in value and (short := [each for each in names if device.name.startswith(each)]):
        return f"A name is a prefix: {short[0]} also begins {device.name}. Put = before the list."
    if device.use != "jobs":
        return f"It is for {device.use}: `use` is not \"jobs\"."
    if links and device.link not in links:
        return "InfiniBand and RoCE can't talk to each other: take the link with more Gb/s."
    return "It is slower than others, or not up everywhere: all nodes must have what one node uses."


NCCL = (
    Exercise(nccl.nccl_environment, check_nccl_environment, hints=(
        "First find what all nodes share: usable by jobs, up, the same name. Then the fastest.",
        "Make a dict {name: device} for each node, of the devices that are up and for jobs. Common "
        "are the names of the first node that all others have. Group ports by their link.",
        'names = [each.name for each in interfaces if each.gbit == fastest]; {"NCCL_NET": '
        'topology.plugin or "Socket", "NCCL_SOCKET_IFNAME": "=" + ",".join(names), '
        '"GLOO_SOCKET_IFNAME": names[0]}')),
    Exercise(nccl_log.read_nccl_log, check_read_nccl_log, hints=(
        "Each rank prints its own part. Go through all lines, and put together what belongs to a "
        "channel.",
        "A dict of (host, pid) -> rank, one of (channel, from, to) -> transport, and one of "
        "(channel, rank) -> the first rank it opens a link to. A ring list that is "
        "cut does not match RING as a whole.",
        "ring = [0]; while (after := opened.get((channel, ring[-1]))) not in (None, *ring): "
        "ring.append(after)")),
)
