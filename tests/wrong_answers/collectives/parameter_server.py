"""Lab 02, parameter_server: mistakes that a good student would really make."""

from mutants import mutant

from ranklab.collectives import parameter_server, ring_all_reduce

ASK = "dist.send(total, group=group, group_dst=server)"
COLLECT = "dist.recv(buffer, group=group, group_src=worker)"
ANSWER = "dist.send(total, group=group, group_dst=worker)"

WRONG = [
    mutant(parameter_server, "    rank, R =", "    server = 0\n    rank, R =",
           says="whichever that is"),
    mutant(parameter_server, "    rank, R =", "    group = None\n    rank, R =",
           says="Pass `group` on"),
    mutant(parameter_server, "total += buffer\n        for worker in workers:",
           "total += buffer", says="Receive from all workers first"),
    mutant(parameter_server, "dist.recv(total, group=group, group_src=server)", "pass", ANSWER,
           "pass", says="must send the sum back"),
    mutant(parameter_server, "server and total.numel()", "server", "elif total.numel()", "else",
           says="an empty x is sent"),
    mutant(parameter_server, ASK, "for part in total.view(-1).tensor_split(2):\n"
           "            dist.send(part, group=group, group_dst=server)",
           COLLECT, "for part in buffer.view(-1).tensor_split(2):\n"
           "                dist.recv(part, group=group, group_src=worker)",
           says="Send one message in each step"),
    mutant(parameter_server, "memory_format=torch.contiguous_format", "",
           says=r"x\.contiguous\(\)"),
    # Its ranks don't sleep, so the hang is seen after 10 s only.
    mutant(parameter_server, ANSWER, ANSWER.replace("dist.send", "handle = dist.isend"),
           says="never waited for|Keep the handle"),
]


def parameter_server__a_ring_instead(x, server=0, group=None):
    """A worker sends its x once"""
    return ring_all_reduce(x, group)
