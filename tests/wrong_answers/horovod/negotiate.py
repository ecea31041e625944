import torch.distributed as dist
from mutants import mutant

from ranklab.horovod import negotiate as answer

START = "rank, R ="
FORGET = "                del table[name]\n"
WRONG = [
    mutant(answer, "complete = []", "complete, table = [], {}",
           says="Names of an earlier round are forgotten"),
    mutant(answer, "table[name] == R:", "name not in complete:",
           says="names that not all ranks have yet"),
    mutant(answer, FORGET, "", says="must leave the table"),
    mutant(answer, "table[name] == R", "table[name] >= R", FORGET, "",
           says="told a name twice, .*must leave the table"),
    mutant(answer, "[None] * R if rank == 0 else None", "[None] * R",
           "gather_object(ready, lists, group=group, group_dst=0)",
           "all_gather_object(lists, ready, group=group)",
           says="gather_object, not all_gather_object"),
    mutant(answer, "return answer[0]", "return [name for name in ready if name in answer[0]] + "
           "[name for name in answer[0] if name not in ready]",
           says="in another order than the first rank"),
    mutant(answer, "return answer[0]", "return complete", says="fills the list that it is given"),
    mutant(answer, START, f"group = None\n    {START}", says="Pass `group` on"),
    mutant(answer, "group_src=0", "src=0", says="counts inside the group: group_src"),
    mutant(answer, "lists or ()", "lists if dist.get_rank() == 0 else ()",
           says="need not be rank 0 of the job"),
    mutant(answer, "complete = []", "complete, table = [], TABLE", TABLE={},
           says="counted in another table"),
    mutant(answer, START, f"if not ready:\n        return []\n    {START}",
           says="takes no part in a round"),
]


def negotiate__says_it_again_and_again(ready, table, group=None):
    """Send `ready` only"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    waiting = table.get("waiting", []) + ready
    lists = [None] * R if rank == 0 else None
    dist.gather_object(waiting, lists, group=group, group_dst=0)
    told = [[name for name in waiting if all(name in one for one in lists or ())]]
    dist.broadcast_object_list(told, group=group, group_src=0)
    table["waiting"] = [name for name in waiting if name not in told[0]]
    return told[0]
