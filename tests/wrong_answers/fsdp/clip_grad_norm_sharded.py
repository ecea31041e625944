"""Lab 07: what goes wrong when gradients are clipped in shards."""

from mutants import mutant

from ranklab.fsdp import clip_grad_norm_sharded

ADD = "    dist.all_reduce(square, group=group)\n"
SQUARES = "norm.to(square).square()"
FACTOR = "(max_norm / (norm + 1e-6)).clamp(max=1.0)"
NORMS = "torch._foreach_norm(gradients, 2, torch.float64) if gradients else ()"


def _wrong(*edits, says, **named):
    return mutant(clip_grad_norm_sharded, *edits, says=says, **named)


WRONG = [
    _wrong(ADD, "", says="this rank's own"),
    _wrong(SQUARES, "norm.to(square)", "square.sqrt().float()", "square.float()",
           says="Squares add up"),
    _wrong(ADD, "    square = square.sqrt()\n" + ADD, "norm = square.sqrt()", "norm = square",
           says="the root comes last", called="root_before_the_sum"),
    _wrong("group=group)", "op=dist.ReduceOp.AVG, group=group)", says="no mean"),
    _wrong("(square, group=group)", "(square)", says="Pass `group` on"),
    _wrong(SQUARES, f"{SQUARES}.nan_to_num(0, 0, 0)", says="all ranks must know"),
    _wrong(SQUARES, f"{SQUARES}.nan_to_num(nan=0, posinf=float('inf'))", says="infinite or NaN"),
    _wrong(ADD, f"    own = square.sqrt()\n{ADD}", "    factor =", "    if own <= max_norm:\n"
           "        return norm\n    factor =", says="by the norm of all", called="own_decides"),
    _wrong("[p.grad for", "[p.detach() for", says="of all gradients", called="the_parameters"),
    _wrong(FACTOR, "max_norm / (norm + 1e-6)", says=r"clamp\(max=1.0\)"),
    _wrong(FACTOR, "torch.as_tensor(max_norm / norm.item()).clamp(max=1.0)",
           says="float division by zero"),
    _wrong(NORMS, "[g.norm() for g in gradients]", says="compute in float32",
           called="in_the_gradients_type"),
    _wrong("gradient *= factor", "gradient = gradient * factor", says="in place"),
    _wrong("    return norm", "    return norm * factor", says="Return the norm before"),
    _wrong(ADD, "    if not gradients:\n        return square\n" + ADD,
           says="A rank may have no gradient: its square is 0"),
    _wrong("if p.grad is not None", "", says="has no gradient|NoneType|A rank may have",
           called="none_is_no_gradient"),
    _wrong("    for norm in", "    for p in parameters:\n        assert p is not None\n"
           "    gradients = [p.grad for p in parameters if p.grad is not None]\n    for norm in",
           says="this rank's own|one walk|not 0|as before|norm on|is 0", called="walks_twice"),
    _wrong("        square += norm.to(square).square()\n" + ADD, "        part = norm.square()\n"
           "        dist.all_reduce(part, group=group)\n        square += part\n",
           says="all-reduce of a number|the one all-reduce"),
]
