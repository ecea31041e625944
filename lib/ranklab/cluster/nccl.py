"""nccl_environment: what NCCL must be told about the networks of a cluster, and no more (lab 15).

Source: NCCL's user guide, "Environment Variables", and its source, v2.28.9.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Interface:
    """An IP interface of a node.

    use  "jobs": jobs may use it; "storage", "management": they may not; "host": it does not leave
         the node (loopback, a bridge of containers)
    """

    name: str
    gbit: float
    use: str = "jobs"
    up: bool = True


@dataclass(frozen=True)
class Hca:
    """A port of a card for RDMA, a host channel adapter.

    link  "InfiniBand", or "Ethernet": then it speaks RoCE
    up    its state is ACTIVE; NCCL leaves all others out
    """

    name: str
    gbit: float
    link: str = "InfiniBand"
    port: int = 1
    use: str = "jobs"
    up: bool = True

    @property
    def label(self):
        """As NCCL writes it: "mlx5_0:1"."""
        return f"{self.name}:{self.port}"


@dataclass(frozen=True)
class Node:
    """A machine with its networks. Names may differ from node to node."""

    host: str
    interfaces: tuple[Interface, ...]
    hcas: tuple[Hca, ...] = ()


@dataclass(frozen=True)
class Topology:
    """The nodes of a job, and what the network's team says of it.

    plugin         name of the network plugin that all nodes have, as EC2's "AWS Libfabric" for EFA;
                   "": none
    fabric         "rails": port i of all nodes is on switch i, and the way between these is slow;
                   "one switch": all ports of a node are on the same; "": nobody said
    traffic_class  that the switches keep for this traffic; None: nobody said
    """

    nodes: tuple[Node, ...]
    plugin: str = ""
    fabric: str = ""
    traffic_class: int | None = None


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
    error   ValueError where nodes have no interface in common: NCCL always meets over one of them
    """
    def common(kind, key):
        usable = [{key(each): each for each in getattr(node, kind)
                   if each.up and each.use == "jobs"} for node in topology.nodes]
        return [each for name, each in usable[0].items() if all(name in node for node in usable)]

    if len(topology.nodes) == 1:
        return {}
    interfaces = common("interfaces", lambda each: each.name)
    if not interfaces:
        raise ValueError(f"no interface for jobs is up on all {len(topology.nodes)} nodes")
    fastest = max(each.gbit for each in interfaces)
    names = [each.name for each in interfaces if each.gbit == fastest]
    found = {"NCCL_NET": topology.plugin or "Socket", "GLOO_SOCKET_IFNAME": names[0],
             "NCCL_SOCKET_IFNAME": "=" + ",".join(names)}
    by_link = {}
    for port in common("hcas", lambda each: (each.label, each.link)):
        by_link.setdefault(port.link, []).append(port)
    if not by_link or topology.plugin:
        return found
    ports = max(by_link.values(), key=lambda ports: sum(port.gbit for port in ports))
    found |= {"NCCL_NET": "IB", "NCCL_IB_HCA": "=" + ",".join(port.label for port in ports)}
    if topology.traffic_class is not None:
        found["NCCL_IB_TC"] = str(topology.traffic_class)
    if topology.fabric and len(ports) > 1:
        found["NCCL_CROSS_NIC"] = str(["rails", "one switch"].index(topology.fabric))
    return found


# --- what NCCL makes of a value -------------------------------------------------------------------

def selected(value, devices):
    """Those of `devices` that NCCL takes, for a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA.

    A value is a list of prefixes, of whole names after "=", of what is left out after "^". Each may
    have a port after ":"; in new versions also a rail and a plane, which select nothing.
    devices  names, "eth0", or names and ports, "mlx5_0:1"
    source   parseStringList and matchIfList in NCCL's src/misc/utils.cc
    """
    outside = value.removeprefix("^")
    whole = outside.removeprefix("=")
    entries = [(entry.split(":") + [""])[:2] for entry in whole.split(",") if entry]

    def fits(device):
        name, _, port = device.partition(":")
        return any((name == wanted if whole != outside else name.startswith(wanted))
                   and ("" in (port, wanted_port) or port == wanted_port)
                   for wanted, wanted_port in entries)

    return [each for each in devices if not entries or fits(each) == (outside == value)]


def node_bandwidth(topology, environment):
    """Bytes/s of the slowest node's devices that `environment` selects: what its network can carry.

    Without NCCL_IB_HCA all ports that are up count, those for storage, too: NCCL would take them.
    """
    by_rdma = environment.get("NCCL_NET", "IB") == "IB"
    variable, kind = (("NCCL_IB_HCA", "hcas") if by_rdma else ("NCCL_SOCKET_IFNAME", "interfaces"))
    totals = []
    for node in topology.nodes:
        speeds = {getattr(each, "label", each.name): each.gbit
                  for each in getattr(node, kind) if each.up}
        totals.append(sum(speeds[name] for name in selected(environment.get(variable, ""), speeds)))
    return min(totals) * 1e9 / 8
