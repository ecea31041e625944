"""Lab 15: logs of which a part is read."""

from mutants import mutant

from ranklab.cluster.nccl_log import read_nccl_log

WRONG = [
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
