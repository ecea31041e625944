"""nccl_environment: the settings by which NCCL finds a cluster's networks (lab 15).

Source: NCCL's user guide, "Environment Variables", and its source, v2.28.9.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Interface:
    """An IP interface of a node.

    use  "jobs": jobs may use it; "storage", "management": jobs may not; "host": it does not leave
         the node (loopback, a bridge for containers)
    """

    name: str
    gbit: float
    use: str = "jobs"
    up: bool = True


@dataclass(frozen=True)
class Hca:
    """A port of a card for RDMA, a host channel adapter.

    link  "InfiniBand", or "Ethernet" if it speaks RoCE
    up    its state is ACTIVE; NCCL uses no others
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
    """The nodes of a job, and the network team's facts about the network.

    plugin         name of the network plugin that all nodes have, such as EC2's "AWS Libfabric" for
                   EFA; "": none
    fabric         "rails": port i of all nodes is on switch i, with slow links between switches;
                   "one switch": all ports of a node are on the same switch; "": not known
    traffic_class  the class that the switches reserve for this traffic; None: not known
    """

    nodes: tuple[Node, ...]
    plugin: str = ""
    fabric: str = ""
    traffic_class: int | None = None


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
    def common(kind, key):
        usable = [{key(device): device for device in getattr(node, kind)
                   if device.up and device.use == "jobs"} for node in topology.nodes]
        return [device for name, device in usable[0].items()
                if all(name in node for node in usable)]

    if len(topology.nodes) == 1:
        return {}
    interfaces = common("interfaces", lambda interface: interface.name)
    if not interfaces:
        raise ValueError(f"no interface for jobs is up on all {len(topology.nodes)} nodes")
    fastest = max(interface.gbit for interface in interfaces)
    names = [interface.name for interface in interfaces if interface.gbit == fastest]
    variables = {"NCCL_NET": topology.plugin or "Socket", "GLOO_SOCKET_IFNAME": names[0],
                 "NCCL_SOCKET_IFNAME": "=" + ",".join(names)}
    by_link = {}
    for port in common("hcas", lambda port: (port.label, port.link)):
        by_link.setdefault(port.link, []).append(port)
    if not by_link or topology.plugin:
        return variables
    ports = max(by_link.values(), key=lambda ports: sum(port.gbit for port in ports))
    variables |= {"NCCL_NET": "IB", "NCCL_IB_HCA": "=" + ",".join(port.label for port in ports)}
    if topology.traffic_class is not None:
        variables["NCCL_IB_TC"] = str(topology.traffic_class)
    if topology.fabric and len(ports) > 1:
        variables["NCCL_CROSS_NIC"] = str(["rails", "one switch"].index(topology.fabric))
    return variables


# --- what NCCL makes of a value -------------------------------------------------------------------

def selected(value, devices):
    """Return the `devices` that NCCL uses, for a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA.

    A value is a list of prefixes. After "=" it is a list of whole names, after "^" of names to
    exclude. Each may have a port after ":"; in new versions also a rail and a plane, which do not
    affect the selection.
    devices: names, "eth0", or names and ports, "mlx5_0:1"
    Source: parseStringList and matchIfList in NCCL's src/misc/utils.cc
    """
    outside = value.removeprefix("^")
    whole = outside.removeprefix("=")
    entries = [(entry.split(":") + [""])[:2] for entry in whole.split(",") if entry]

    def fits(device):
        name, _, port = device.partition(":")
        return any((name == entry if whole != outside else name.startswith(entry))
                   and ("" in (port, entry_port) or port == entry_port)
                   for entry, entry_port in entries)

    return [device for device in devices if not entries or fits(device) == (outside == value)]


def node_bandwidth(topology, environment):
    """Return the bytes/s that the network of the slowest node can carry.

    All devices that `environment` selects count. Without NCCL_IB_HCA all ports that are up count,
    including those for storage, because NCCL would use them.
    """
    by_rdma = environment.get("NCCL_NET", "IB") == "IB"
    variable, kind = (("NCCL_IB_HCA", "hcas") if by_rdma else ("NCCL_SOCKET_IFNAME", "interfaces"))
    totals = []
    for node in topology.nodes:
        speeds = {getattr(device, "label", device.name): device.gbit
                  for device in getattr(node, kind) if device.up}
        totals.append(sum(speeds[name] for name in selected(environment.get(variable, ""), speeds)))
    return min(totals) * 1e9 / 8
