"""nccl_environment: which devices of each node its values select, by NCCL's rules."""

from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.cluster.findings import finding
from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.cluster.nccl import Hca, Interface, Node, Topology, nccl_environment, selected

LOOPBACK = Interface("lo", 0, "host"), Interface("docker0", 0, "host")
ETHERNET = (*LOOPBACK, Interface("eth0", 1, "management"), Interface("eth1", 25),
            Interface("eth10", 100, "storage"), Interface("eth2", 10))
COMPUTE = tuple(Hca(f"mlx5_{i}", 400) for i in (0, 1, 3, 4, 5, 6, 8, 9))
STORAGE = tuple(Hca(f"mlx5_{i}", 200, use="storage") for i in (2, 7, 10, 11))
ROCE = tuple(Hca(f"mlx5_{i}", 400, "Ethernet") for i in range(8))
TWO_FAST = (*LOOPBACK, Interface("eth3", 25), Interface("eth1", 100), Interface("eth2", 100),
            Interface("eth20", 400, up=False))
MIXED = (*(Hca(f"mlx5_{i}", 100, "Ethernet") for i in range(4)),
         *(Hca(f"mlx5_{i}", 200) for i in (4, 5, 6)))
SLOW_FIRST = Hca("mlx5_0", 100), Hca("mlx5_1", 400, "Ethernet"), Hca("mlx5_2", 400, "Ethernet")
ONE_FAST = Hca("mlx5_0", 400), *(Hca(f"mlx5_{i}", 200, "Ethernet") for i in (1, 2, 3))
TWO_PORTS = tuple(Hca(f"mlx5_{i}", 200, *port) for i in (0, 1)
                  for port in (("InfiniBand", 1), ("Ethernet", 2, "storage")))
SLOW_ROCE = Hca("mlx5_0", 100, "Ethernet"), Hca("mlx5_1", 400), Hca("mlx5_2", 400)
ROCE_ON_ONE = (Hca("mlx5_0", 400, "Ethernet"), *COMPUTE[1:])


class Case(NamedTuple):
    """A topology, and the variables that must be set for it.

    interfaces  "eth1 eth2": names that NCCL_SOCKET_IFNAME must select
    hcas        the ports that NCCL_IB_HCA must select, or an NCCL_NET other than IB
    others      further variables
    """

    name: str
    topology: Topology
    interfaces: str
    hcas: tuple | str
    others: dict

    def __str__(self):
        return self.name


def nodes(*hcas, interfaces=ETHERNET):
    return tuple(Node(f"node{i}", interfaces, each) for i, each in enumerate(hcas))


def _down(devices, name):
    return tuple(replace(each, up=each.name != name) for each in devices)


RAILS, ONE_SWITCH = {"NCCL_CROSS_NIC": "0"}, {"NCCL_CROSS_NIC": "1"}
CASES = (
    Case("8 ports on rails, 4 for storage", Topology(
        nodes(COMPUTE + STORAGE, COMPUTE + STORAGE), fabric="rails"), "eth1", COMPUTE, RAILS),
    Case("a port is down on one of three nodes", Topology(
        nodes(COMPUTE, _down(COMPUTE, "mlx5_3"), COMPUTE), traffic_class=0), "eth1",
        _down(COMPUTE, "mlx5_3"), {"NCCL_IB_TC": "0"}),
    Case("RoCE, all ports on one switch", Topology(
        nodes(ROCE, ROCE), fabric="one switch", traffic_class=106), "eth1", ROCE,
        {"NCCL_IB_TC": "106"} | ONE_SWITCH),
    Case("3 ports of InfiniBand beside 4 slower ones of RoCE", Topology(nodes(MIXED, MIXED)),
         "eth1", MIXED[4:], {}),
    Case("2 ports of RoCE beside a slow one of InfiniBand", Topology(
        nodes(SLOW_FIRST, SLOW_FIRST)), "eth1", SLOW_FIRST[1:], {}),
    Case("2 ports of InfiniBand beside a slow one of RoCE", Topology(nodes(SLOW_ROCE, SLOW_ROCE)),
         "eth1", SLOW_ROCE[1:], {}),
    Case("3 ports of RoCE beside a fast one of InfiniBand", Topology(nodes(ONE_FAST, ONE_FAST)),
         "eth1", ONE_FAST[1:], {}),
    Case("cards of two ports", Topology(nodes(TWO_PORTS, TWO_PORTS), fabric="rails"), "eth1",
         TWO_PORTS[::2], RAILS),
    Case("a port is InfiniBand on one node and RoCE on the other", Topology(
        nodes(COMPUTE, ROCE_ON_ONE)), "eth1", COMPUTE[1:], {}),
    Case("one port", Topology(nodes(COMPUTE[:1], COMPUTE[:1]), fabric="rails"), "eth1",
         COMPUTE[:1], {}),
    Case("Ethernet alone, two fast interfaces", Topology(
        nodes((), (), interfaces=TWO_FAST), fabric="rails", traffic_class=106), "eth1 eth2",
        "Socket", {}),
    Case("a node has no HCAs, the last one lacks an interface", Topology((
        *nodes(COMPUTE, ()), Node("node2", _down(ETHERNET, "eth1"), COMPUTE))), "eth2", "Socket",
        {}),
    Case("a plugin", Topology(nodes(COMPUTE, COMPUTE), "AWS Libfabric", "rails", 3), "eth1",
         "AWS Libfabric", {}),
)
ALONE = Case("one node", Topology(nodes(COMPUTE), fabric="rails"), "", "", {})
APART = Case("no interface for jobs is up on both nodes", Topology((
    Node("a", (*LOOPBACK, Interface("eth0", 10))),
    Node("b", (*LOOPBACK, Interface("eno1", 10), Interface("eth0", 10, "management"))))),
    "", "", {})


def _see(fn, case):
    variables, interfaces = fn(case.topology), case.interfaces.split()
    yield {"what is returned": type(variables).__name__}
    yield {"what is no text": [f"{name}={value!r}" for name, value in variables.items()
                               if not isinstance(value, str)]}
    network, ports = (case.hcas, []) if isinstance(case.hcas, str) else (
        "IB", [each.label for each in case.hcas if each.up])
    gloo = str(variables.get("GLOO_SOCKET_IFNAME"))
    looked_at = {
        "NCCL_NET": Must(str(variables.get("NCCL_NET")).lower(), network.lower()),
        "NCCL_SOCKET_IFNAME": _selection(case.topology, variables.get("NCCL_SOCKET_IFNAME"),
                                         "interfaces", interfaces),
        "GLOO_SOCKET_IFNAME": finding(
            "right" if {*gloo.split(",")} <= {*interfaces} else gloo,
            f"{gloo!r}; it should have names of {interfaces}")}
    if ports:
        looked_at["NCCL_IB_HCA"] = _selection(
            case.topology, variables.get("NCCL_IB_HCA"), "hcas", ports)
    looked_at |= {name: Must(variables.get(name), value) for name, value in case.others.items()}
    yield looked_at | {"what else is set": [
        f"{name}={value}" for name, value in sorted(variables.items())
        if name not in looked_at and name != "NCCL_DEBUG"]}


def _selection(topology, value, kind, labels):
    """Return what is wrong with the devices that `value` selects among those that are up."""
    if not value:
        return finding("not set", f"not set; it should select {', '.join(labels)}")
    more, less = [], []
    for node in topology.nodes:
        up = [getattr(each, "label", each.name) for each in getattr(node, kind) if each.up]
        selection = selected(str(value), up)
        more += [f"{label} on {node.host}" for label in selection if label not in labels]
        less += [f"{label} on {node.host}" for label in labels if label not in selection]
    also, lacks = f"which also selects {', '.join(more)}", f"which lacks {', '.join(less)}"
    return finding(f"{value.count('=')} =, more: {more}, less: {less}" if more or less else "right",
                   f"{value!r}, {' and '.join([also] * bool(more) + [lacks] * bool(less))}")


def _see_alone(fn, case):
    variables = fn(case.topology)
    yield {"what is returned": type(variables).__name__}
    yield {"what is set": sorted(variables.keys() - {"NCCL_DEBUG"})}


USABLE, EVERYWHERE = 'if device.up and device.use == "jobs"', "all(name in node for node in usable)"
FASTEST, JOINED = "if interface.gbit == fastest]", '"=" + ",".join(names)'
PORTS, SPEED = '"=" + ",".join(port.label for port in ports)', "sum(port.gbit for port in ports)"
BEST, IB = f"max(by_link.values(), key=lambda ports: {SPEED})", '"NCCL_NET": "IB", '
DEFAULT, NO_IB = '"NCCL_NET": topology.plugin or "Socket", ', "not by_link or topology.plugin:\n"
GLOO, CLASS = '"GLOO_SOCKET_IFNAME": names[0]', "str(topology.traffic_class)"
WIRED = "topology.fabric and len(ports) > 1"
WIRES = '["rails", "one switch"].index(topology.fabric)'
WITH_CLASS, UNLESS_IB = "    if topology.traffic_class is not None:", f"    if {NO_IB}"
NCCL_ENVIRONMENT = Proof(
    nccl_environment,
    Stage("one node needs nothing", _see_alone, (ALONE,),
          note="Return an empty dict: within a node, NCCL finds NVLink and PCIe by itself."),
    Stage(f"{len(CASES)} clusters: InfiniBand, RoCE, Ethernet, a plugin; ports that are down, for "
          "storage or not on all nodes", _see, CASES),
    Stage("a ValueError where nodes have no interface in common", _see_alone, (APART,)),
    mistakes=(
        Slip("Within a node, NCCL finds NVLink and PCIe by itself: for one node return an empty "
             "dict.",
             ("if len(topology.nodes) == 1:", "if False:")),
        Slip("Some networks are not for jobs: look at `use`.", (USABLE, "if device.up")),
        Slip("NCCL can't use what is down: look at `up`.", (USABLE, 'if device.use == "jobs"')),
        Slip("Select only what all nodes have: the variables are the same on every node.",
             (f"\n                if {EVERYWHERE}]", "]"),
             (EVERYWHERE, "any(name in node for node in usable)"),
             (EVERYWHERE, "name in usable[-1]"),
             (EVERYWHERE, EVERYWHERE.replace("usable", "usable[:2]"))),
        Slip("A port that is InfiniBand on one node and RoCE on another is not common: the link "
             "must be the same as well.",
             ("lambda port: (port.label, port.link)", "lambda port: port.label"),
             ("lambda port: (port.label, port.link)", "lambda port: port.name")),
        Slip("A name is matched as a prefix: mlx5_1 also selects mlx5_10. Put = before the list.",
             (PORTS, PORTS.removeprefix('"=" + '))),
        Slip("A name is matched as a prefix: eth1 also selects eth10. Put = before the list.",
             (JOINED, JOINED.removeprefix('"=" + '))),
        Slip("Names are matched as prefixes: eth1 also selects eth10, and mlx5_1 selects mlx5_10. "
             "Put = before both lists.", (PORTS, PORTS.removeprefix('"=" + '), JOINED,
                        JOINED.removeprefix('"=" + '))),
        Slip("Put one = before the whole list, not before each name.",
             (JOINED, '",".join("=" + name for name in names)'),
             (PORTS, '",".join("=" + port.label for port in ports)'),
             (JOINED, '",".join("=" + name for name in names)',
              PORTS, '",".join("=" + port.label for port in ports)')),
        Slip("Sockets use every interface that you name: name only the fastest ones.",
             (FASTEST, "]")),
        Slip("All of the fastest interfaces carry data: name all of them, not just one.",
             (JOINED, '"=" + names[0]')),
        Slip("Choose the fastest interface, wherever it is in the list.",
             (FASTEST, "][:1]"), ("fastest = max(", "fastest = min(")),
        Slip("Gloo takes plain names, without =.", (GLOO, '"GLOO_SOCKET_IFNAME": "=" + names[0]'),
             (GLOO, f'"GLOO_SOCKET_IFNAME": {JOINED}')),
        Slip("Gloo has its own variable: GLOO_SOCKET_IFNAME.", (f"{GLOO},\n", "\n")),
        Slip("NCCL bootstraps over an IP interface even if HCA ports carry the data: set "
             "NCCL_SOCKET_IFNAME.",
             (WITH_CLASS, f'    del variables["NCCL_SOCKET_IFNAME"]\n{WITH_CLASS}')),
        Slip("Always set NCCL_NET, to the plugin's name, IB or Socket. If it is unset, NCCL takes "
             "whatever a node has; an empty name fits no network.",
             (DEFAULT, ""), (DEFAULT, "", IB, ""), (DEFAULT, '"NCCL_NET": topology.plugin, ')),
        Slip("Without a plugin, NCCL_NET is IB if all nodes have a port in common.", (IB, "")),
        Slip("RoCE counts as IB as well: NCCL has one network for all HCA ports.",
             (IB, '"NCCL_NET": "IB" if ports[0].link == "InfiniBand" else "RoCE", '),
             (IB, '"NCCL_NET": "IB" if ports[0].link == "InfiniBand" else "Socket", ')),
        Slip("NCCL_NET is the plugin's name, if there is one.", (DEFAULT, '"NCCL_NET": "Socket", '),
             (NO_IB, "not by_link:\n")),
        Slip("NCCL_NET is the plugin's name, if there is one; without a plugin IB, if all nodes "
             "have a port in common; otherwise Socket.", (DEFAULT, '"NCCL_NET": "IB", ')),
        Slip("The plugin's name is topology.plugin.",
             (DEFAULT, '"NCCL_NET": "OFI" if topology.plugin else "Socket", ')),
        Slip("Nothing reads NCCL_IB_HCA if no HCA port carries the data.",
             (UNLESS_IB, '    if topology.plugin:\n        variables["NCCL_IB_HCA"] = "=" + '
              f'",".join(port.label for port in sum(by_link.values(), []))\n{UNLESS_IB}')),
        Slip("Take the link with more Gb/s, whether it is InfiniBand or RoCE.",
             (BEST, "by_link.get('InfiniBand') or by_link['Ethernet']"),
             (BEST, "by_link.get('Ethernet') or by_link['InfiniBand']"),
             (BEST, "next(iter(by_link.values()))")),
        Slip("Take the link with more Gb/s, not the one with more ports.", (SPEED, "len(ports)")),
        Slip("Compare the Gb/s of all ports together, not of just one.", (SPEED, "ports[0].gbit")),
        Slip("InfiniBand and RoCE can't talk to each other: select the ports of only one link.",
             (BEST, "sum(by_link.values(), [])")),
        Slip("All ports of the link carry data: name all of them, not just one.",
             (PORTS, '"=" + ports[0].label')),
        Slip("Include the port number, as in mlx5_0:1: the other port of the card belongs to "
             "another network.", (PORTS, PORTS.replace("label", "name"))),
        Slip("Since 2.21, NCCL finds the GID index by itself. A fixed NCCL_IB_GID_INDEX fits only "
             "one machine.",
             (IB, f'"NCCL_IB_GID_INDEX": "3", {IB}')),
        Slip("NCCL chooses the algorithm by itself.", (IB, f'"NCCL_ALGO": "Ring", {IB}')),
        Slip("NCCL_IB_DISABLE says the same as NCCL_NET, and the docstring does not list it.",
             (DEFAULT, f'{DEFAULT}"NCCL_IB_DISABLE": "1", ', IB, f'{IB}"NCCL_IB_DISABLE": "0", '),
             (IB, f'{IB}"NCCL_IB_DISABLE": "0", ')),
        Slip("0 is a valid traffic class: test whether it is None.",
             (WITH_CLASS, "    if topology.traffic_class:")),
        Slip("Environment variables are strings: use str(...).", (CLASS, "topology.traffic_class"),
             (f"str({WIRES})", WIRES)),
        Slip("If no traffic class is known, don't set NCCL_IB_TC.",
             (WITH_CLASS, "    if True:")),
        Slip("NCCL_IB_TC is only for HCA ports, InfiniBand or RoCE.",
             (UNLESS_IB, f'{WITH_CLASS}\n        variables["NCCL_IB_TC"] = "3"\n{UNLESS_IB}')),
        Slip("If a node has only one port, leave NCCL_CROSS_NIC to NCCL.",
             (WIRED, "topology.fabric")),
        Slip("If you don't know how the switches are wired, leave NCCL_CROSS_NIC to NCCL.",
             (f"if {WIRED}", "if len(ports) > 1", WIRES,
              '{"rails": 0, "one switch": 1}.get(topology.fabric, 2)'),
             (f"if {WIRED}", "if len(ports) > 1", WIRES, '1 - (topology.fabric == "rails")'),
             (f"if {WIRED}", "if len(ports) > 1", WIRES, 'int(topology.fabric == "one switch")')),
        Slip("On rails NCCL_CROSS_NIC is 0, because other rails are behind slow links. On one "
             "switch it is 1.",
             (WIRES, '["one switch", "rails"].index(topology.fabric)')),
        Slip("NCCL_CROSS_NIC applies only to HCA ports.",
             (UNLESS_IB, '    if topology.fabric:\n        variables["NCCL_CROSS_NIC"] = "0"\n'
              f"{UNLESS_IB}"),
             (UNLESS_IB, '    if topology.fabric and not by_link:\n'
              f'        variables["NCCL_CROSS_NIC"] = "0"\n{UNLESS_IB}')),
        Slip("Without a common interface the nodes can't meet: raise a ValueError.",
             ("raise ValueError(", "return {} and ("), ("raise ValueError(", "raise KeyError(")),
    ), hints=(
        "First find the devices that all nodes share: usable by jobs, up, and with the same name. "
        "Then take the fastest.",
        "For each node, make a dict {name: device} of the devices that are up and for jobs. The "
        "common names are those of the first node that all other nodes have. Group ports by their "
        "link.",
        'names = [each.name for each in interfaces if each.gbit == fastest]; {"NCCL_NET": '
        'topology.plugin or "Socket", "NCCL_SOCKET_IFNAME": "=" + ",".join(names), '
        '"GLOO_SOCKET_IFNAME": names[0]}'))
