"""Lab 01: layers that are computed again, but not as the first time."""

from mutants import mutant

from ranklab.baseline import checkpointed

KEPT = "[x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]"
BACKWARD = "torch.autograd.backward(outputs, gradients)"
GRAD = "torch.autograd.grad(outputs, leaves, gradients)"
RETURN = "tuple(x.grad for x in leaves)"

WRONG = [mutant(checkpointed, *edits, says=says) for *edits, says in (
    ("Recompute.apply(*inputs)", "function(*inputs)", "keep the inputs only"),
    ("outputs = function", "function(*leaves); outputs = function", "twice is right"),
    (", random_replayed(ctx.random)", "", "drops other numbers"),
    ("with torch.enable_grad(), random_replayed(ctx.random):",
     "set_random_state(ctx.random)\n            with torch.enable_grad():",
     "put the random state back"),
    ("torch.enable_grad(), ", "", "inside torch.enable_grad"),
    (KEPT, "ctx.saved_tensors", "detach them first"),
    (KEPT, KEPT.replace("x.requires_grad)", ")"), "can't require a gradient"),
    (BACKWARD, f"return {GRAD}", "can't be asked for it"),
    (BACKWARD, f"found = iter({GRAD.replace('leaves', '[x for x in leaves if x.requires_grad]')})",
     RETURN, "tuple(next(found) if x.requires_grad else None for x in leaves)",
     "weights inside function are not among its inputs"),
    (BACKWARD, BACKWARD.replace("gradients", "torch.ones_like(outputs)"),
     "gradients that backward receives, not ones"),
    (BACKWARD, "outputs.backward(*gradients)", "function may return a tuple"),
    (RETURN, "leaves[0].grad", "one gradient for each input"),
    (RETURN, "(leaves[0].grad, *[None] * (len(leaves) - 1))", "gradients of all inputs"),
)]  # fmt: skip
