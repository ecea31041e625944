"""The check of parallelize: a step of SGD in several layouts, beside one process."""

import functools

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import hinted, is_near, on_ranks, rank_name
from ranklab.engine import device
from ranklab.hybrid import Hybrid, Layout
from ranklab.models.gpt import GPT, IGNORE, GPTConfig

CONFIG = GPTConfig(vocab_size=16, n_ctx=8, n_embd=16, n_head=4, n_layer=2)
LAYOUTS = (Layout(2, 2, 1), Layout(1, 2, 2, sequence_parallel=True, recompute=True),
           Layout(2, 1, 2, zero=1), Layout(2, 1, 2, zero=3, recompute=True), Layout(2, 2, 2))
HINTS = {
    "passes of a block": "With layout.recompute, and only then, checkpoint_blocks(model, ...): each "
                         "block is computed a second time in backward.",
    "tokens in a block": "How(hybrid.tensor.group, layout.sequence_parallel): with it each rank "
                         "has its tokens where blocks begin and end.",
    "numbers that get memory": "hybrid.give_memory(model) comes when only this rank's layers, and "
                               "of them its part, are left: what goes later has had memory, too.",
    "numbers held": "The pipeline keeps this rank's layers, tensor parallelism its part of each, "
                    "in the group hybrid.tensor.group; data parallelism comes last.",
}
WEIGHTS = ("Data parallelism sees the parameters that are there when it is applied: what is cut "
           "or replaced later is never averaged. It comes last.")
FAILURES = {
    "'PipelineParallel' object has no attribute 'pl": "hybrid.pipeline.keep_mine(model) is first.",
    "'PipelineParallel' object has no attribute": "hybrid.pipeline.make_stages(model) is missing, "
                                                  "or comes too late.",
    "object has no attribute 'replica'": "hybrid.data.apply(model) is missing.",
    "object has no attribute 'rows'": "hybrid.data.apply(model) is missing.",
    "meta": "A model made on the meta device has no numbers: hybrid.give_memory(model) comes after "
            "pipeline and tensor parallelism, and before the data ranks compare theirs.",
    "got no gradient": WEIGHTS,
    "is expected": HINTS["tokens in a block"],
    "returned": "The parts work in place: return the model itself.",
}


def _targets():
    """Rows with unequal numbers of targets."""
    targets = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(1))
    targets[1, 2:] = IGNORE
    return targets.to(device())


def _trial(parallelize, layout):
    """(what is wrong, hint) after a step of SGD, or None; a look comes when all has been sent."""
    torch.manual_seed(0)
    hybrid, given, passes = Hybrid(layout.new_mesh(), layout, apply_by=parallelize), [], []
    with torch.device("cpu" if layout == LAYOUTS[0] else "meta"):
        model = GPT(CONFIG)
    if layout == LAYOUTS[0]:
        model.to(device())
    groups, give = [{"params": list(model.named_parameters())}], hybrid.give_memory
    for block in model.blocks.values():
        block.norm2.register_forward_pre_hook(lambda _, x: passes.append(x[0].shape[:2].numel()))
    hybrid.give_memory = lambda model: (given.append(_numbers(model)), give(model))
    if (got := hybrid.apply(model)) is not model:
        raise TypeError(f"a {type(got).__name__} is returned, not the model")
    optimizer = hybrid.make_optimizer(functools.partial(torch.optim.SGD, lr=1.0), groups)
    inputs, targets = hybrid.batch(_targets().clamp(min=0), _targets())
    share = hybrid.forward_backward(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    norm = hybrid.grad_norm([p for group in optimizer.param_groups for p in group["params"]])
    optimizer.step()
    costs = {"numbers held": _numbers(model), "numbers that get memory": max(given, default=0),
             "passes of a block": len(passes), "tokens in a block": sum(passes)}
    return _look(layout, costs, hybrid.mesh.coordinates()["pipeline"], hybrid.total(share), norm,
                 hybrid.state(model, optimizer))


def _numbers(model):
    return sum(p.numel() for p in model.parameters())


def _allowed(layout, stage):
    """The costs by formula, where all sizes divide."""
    C, blocks, ends = CONFIG.n_embd, CONFIG.n_layer // layout.pp, stage in (0, layout.pp - 1)
    part = blocks * (12 * C * C // layout.tp + 2 * C) + ends * CONFIG.vocab_size * C // layout.tp
    part += C * (stage == layout.pp - 1)
    passes = blocks * 4 // layout.dp * (1 + layout.recompute)
    return {"numbers held": part // layout.dp if layout.zero == 3 else part,
            "numbers that get memory": part, "passes of a block": passes,
            "tokens in a block": passes * 8 // (layout.tp if layout.sequence_parallel else 1)}


def _look(layout, costs, stage, loss, norm, pieces):
    for name, number in _allowed(layout, stage).items():
        if costs[name] != number and (costs[name] or not name.endswith("memory")):
            return f"{costs[name]} {name}, not {number}", HINTS[name]
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device())
    right = model(_targets().clamp(min=0), _targets())
    right.backward()
    whole = {name: p.detach() - p.grad for name, p in model.named_parameters()}
    if not is_near(loss, right.detach()):
        return f"the loss is {loss.item():.6g}, not {right.item():.6g}", WEIGHTS
    for name, kind, _, offset, tensor in pieces:
        box = tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))
        if kind == "weight" and not is_near(tensor, whole[name][box]):
            return f"{name} after a step differs from one process", WEIGHTS
    right = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if not is_near(norm, right):
        return f"the gradients' norm is {norm.item():.6g}, not {right.item():.6g}", WEIGHTS


def check_parallelize(parallelize):
    for layout in LAYOUTS:
        with hinted(FAILURES):
            seen = on_ranks(_trial, parallelize, layout, ranks=layout.ranks, timeout=30)
        for rank, found in enumerate(seen):
            if found:
                raise Mistake(f"{layout}, {rank_name(rank, layout.ranks)}: {found[0]}", found[1])
        yield f"{layout}: a step as in one process; each rank holds its part of the model"
