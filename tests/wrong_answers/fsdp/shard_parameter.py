"""Lab 07: what goes wrong when the rows are shared out."""

from mutants import mutant

from ranklab.fsdp import shard_parameter

RANK, RANKS = "dist.get_rank(group)", "dist.get_world_size(group)"
UP, DOWN = "-(-len(parameter) // R)", "len(parameter) // R"
BEYOND = "  # the last ones may lie beyond the end"
TAKE = "parameter.detach()[first:stop].clone()"

WRONG = [
    mutant(shard_parameter, UP, DOWN, says="Rows are left over: round up"),
    mutant(shard_parameter, UP, DOWN, BEYOND, "\n    stop = len(parameter) if rank == R - 1 else "
           "stop", says="Rows are left over: round up", called="the_last_rank_has_the_rest"),
    mutant(shard_parameter, TAKE, "parameter.detach().tensor_split(R)[rank].clone()",
           says="as tensor_split cuts"),
    mutant(shard_parameter, TAKE, "parameter.detach()[rank::R].clone()",
           says="one after the other"),
    mutant(shard_parameter, TAKE, "parameter.detach().chunk(R)[rank].clone()",
           says="tuple index out of range"),
    mutant(shard_parameter, TAKE, TAKE.replace(".clone()", ""), says="It is a view of it"),
    mutant(shard_parameter, TAKE, "parameter.detach().clone()[first:stop]", says="First cut, then"),
    mutant(shard_parameter, "parameter.detach()[", "parameter.requires_grad_(False)[",
           says="requires_grad stay", called="freezes"),
    mutant(shard_parameter, TAKE, "parameter.detach().view(-1).view(parameter.shape)[first:stop]"
           ".clone()", says="need not be contiguous"),
    mutant(shard_parameter, f"return {TAKE}", f"rows = {TAKE}\n    rows.grad = parameter.grad"
           "[first:stop]\n    return rows", says="Only numbers are copied"),
    mutant(shard_parameter, f"return {TAKE}", f"rows = {TAKE}\n    parameter.grad = None\n    "
           "return rows", says="stay: the caller", called="drops_the_gradient"),
    mutant(shard_parameter, f"return {TAKE}", f"rows = {TAKE}\n    parameter.data.zero_()\n    "
           "return rows", says="the parameter is changed"),
    mutant(shard_parameter, TAKE, TAKE.replace(".detach()", ""), says="has a graph"),
    mutant(shard_parameter, RANK, "dist.get_rank()", RANKS, "dist.get_world_size()",
           says="Pass `group` on"),
    mutant(shard_parameter, "if parameter.dim() == 0", "if False", says="is no error|len"),
    mutant(shard_parameter, TAKE, "torch.nn.functional.pad(parameter.detach().flatten(1) "
           "if parameter.dim() > 1 else parameter.detach()[:, None], (0, 0, 0, stop))[first:stop]"
           ".reshape(-1, *parameter.shape[1:]).clone()", says="Padding is for messages|of shape"),
]
