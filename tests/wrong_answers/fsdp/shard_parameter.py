"""Lab 07: what goes wrong when the rows are shared out."""

from mutants import mutant

from ranklab.fsdp import shard_parameter

ROWS = "first, stop = rows_of(len(parameter), dist.get_world_size(group), dist.get_rank(group))"
RANK, RANKS = "dist.get_rank(group)", "dist.get_world_size(group)"
TAKE = "parameter.detach()[first:stop].clone()"
FLOOR = f"each = len(parameter) // {RANKS}; first, stop = each * {RANK}, each * ({RANK} + 1)"
REST = f"{FLOOR}\n    if {RANK} == {RANKS} - 1:\n        stop = len(parameter)"

WRONG = [
    mutant(shard_parameter, ROWS, FLOOR, says="Rows are left over: round up"),
    mutant(shard_parameter, ROWS, REST, says="Rows are left over: round up",
           called="the_last_rank_has_the_rest"),
    mutant(shard_parameter, ROWS, "", TAKE, f"parameter.detach().tensor_split({RANKS})[{RANK}]"
           ".clone()", says="as tensor_split cuts"),
    mutant(shard_parameter, ROWS, "", TAKE, f"parameter.detach()[{RANK}::{RANKS}].clone()",
           says="one after the other"),
    mutant(shard_parameter, ROWS, "", TAKE, f"parameter.detach().chunk({RANKS})[{RANK}].clone()",
           says="list index out of range|tuple index out of range"),
    mutant(shard_parameter, TAKE, TAKE.replace(".clone()", ""), says="It is a view of it"),
    mutant(shard_parameter, TAKE, TAKE.replace(".detach()", ""), says="has a graph"),
    mutant(shard_parameter, RANK, "dist.get_rank()", RANKS, "dist.get_world_size()",
           says="Hand `group` on"),
    mutant(shard_parameter, "if parameter.dim() == 0", "if False", says="is no error|len"),
    mutant(shard_parameter, "    return", "    stop = first + -(-len(parameter) // "
           f"{RANKS})\n    return", TAKE, "torch.nn.functional.pad(parameter.detach().flatten(1) "
           "if parameter.dim() > 1 else parameter.detach()[:, None], (0, 0, 0, stop))[first:stop]"
           ".reshape(-1, *parameter.shape[1:]).clone()", says="Padding is for messages|of shape"),
]
