"""Lab 15, NCCL: the wrong network, or too much said; logs of which a part is read."""

from mutants import mutant

from ranklab.cluster.nccl import nccl_environment
from ranklab.cluster.nccl_log import read_nccl_log

WRONG = [
    mutant(nccl_environment, 'if device.up and device.use == "jobs"', "if device.up",
           says='is for storage: `use` is not "jobs"', called="storage_and_management"),
    mutant(nccl_environment, "for name, device in usable[0].items()\n"
           "                if all(name in node for node in usable)]",
           "for name, device in usable[0].items()]", says="a port is down.*mlx5_3:1.*"
           "all nodes must have what one node uses", called="one_node"),
    mutant(nccl_environment, "lambda port: (port.label, port.link)", "lambda port: port.label",
           says="InfiniBand on one node and RoCE on the other.*also selects mlx5_0:1",
           called="by_name_alone"),
    mutant(nccl_environment, '"=" + ",".join(port.label', '",".join(port.label',
           says="A name is a prefix: mlx5_1 also begins mlx5_10", called="prefixes"),
    mutant(nccl_environment, "max(by_link.values(), key=lambda ports: sum(port.gbit for port in "
           "ports))", "by_link.get('InfiniBand') or by_link['Ethernet']", says="2 ports of RoCE "
           "beside a slow one.*more Gb/s", called="always_infiniband"),
    mutant(nccl_environment, 'variables |= {"NCCL_NET": "IB", ',
           'variables |= {"NCCL_IB_GID_INDEX": "3", "NCCL_NET": "IB", ',
           says="NCCL_IB_GID_INDEX=3 is set.*since 2.21", called="gid"),
    mutant(nccl_environment, 'variables |= {"NCCL_NET": "IB", ',
           'variables |= {"NCCL_ALGO": "Ring", "NCCL_NET": "IB", ',
           says="NCCL_ALGO=Ring is set.*NCCL chooses", called="ring_forced"),
    mutant(read_nccl_log, "re.fullmatch(RING, line.text)", 're.match(RING, line.text) if "via" not '
           "in line.text else None", says="a part of the ring.*that NCCL cut", called="a_cut_list"),
    mutant(read_nccl_log, "opened.setdefault(link[:2], link[2])", "opened[link[:2]] = link[2]",
           says="8 nodes of 8.*first link that each", called="the_last_link"),
    mutant(read_nccl_log, "[int(rank)] = int(parent)", "[int(parent)] = int(rank)",
           says="trees.*Children stand on the left", called="children"),
    mutant(read_nccl_log, "int(match[1]), int(match[2]), int(match[3])", 'int(match[1]), *('
           '(int(match[2]), int(match[3])) if match["side"] != "receive" else '
           '(int(match[3]), int(match[2])))', says="It is turned round", called="receive_reversed"),
    mutant(read_nccl_log, "Using network (.*\\S)", "NET/(\\w+) : Using", says="network is 'IB', "
           "not 'Socket'.*no device was found", called="ib_that_is_not_there"),
    mutant(read_nccl_log, "tuple(dict.fromkeys(warnings))", "tuple(warnings[:1])",
           says="Every NCCL WARN in the log", called="the_first_warning"),
]
