"""The check of parallelize: a step of SGD in several layouts, beside one process."""

import functools

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import explain, on_ranks, rank_name
from ranklab.engine import device
from ranklab.hybrid import Hybrid, Layout
from ranklab.models.gpt import GPT, IGNORE, GPTConfig

CONFIG = GPTConfig(vocab_size=16, n_ctx=8, n_embd=16, n_head=4, n_layer=2)
LAYOUTS = (Layout(2, 2, 1), Layout(1, 2, 2, sequence_parallel=True, recompute=True),
           Layout(2, 1, 2, zero=1, virtual=2), Layout(2, 1, 2, zero=3, recompute=True),
           Layout(2, 2, 2, sequence_parallel=True))
TOKENS = ("TPConfig(hybrid.tensor.group, layout.sequence_parallel): with it each rank has its "
          "tokens where blocks begin and end.")
WEIGHTS = ("Data parallelism sees the parameters that are there when it is applied: what is cut "
           "or replaced later is never averaged. It comes last, in place, once. And "
           "make_stages() holds the layers that it finds: what replaces layers comes before.")
HINTS = {  # of each cost
    "numbers held": "The pipeline keeps this rank's layers, tensor parallelism its part of each, "
                    "in the group hybrid.tensor.group.",
    "numbers that get memory": "hybrid.materialize(model) comes when only this rank's part of its "
                               "layers is left: what goes later has had memory, too.",
    "passes of blocks": "With layout.recompute, and only then, checkpoint_blocks(model, ...): each "
                        "block is computed a second time in backward.",
    "tokens in blocks": TOKENS, "calls of data.apply": WEIGHTS,
}
FAILURES = {
    "AttributeError: .* has no attribute 'place'": "hybrid.pipeline.keep_stages(model) is first.",
    "AttributeError: 'PipelineParallel' object .*":
        "hybrid.pipeline.make_stages(model) is missing, or too late.",
    "AttributeError: .* has no attribute 'replica'": "hybrid.data.apply(model) is missing.",
    r"\w+: .*\bmeta\b.*":
        "A model on the meta device has no numbers: hybrid.materialize(model) comes after "
            "pipeline and tensor parallelism, and before the data ranks compare theirs.",
    ".* got no gradient.*": WEIGHTS, "AttributeError: .* no attribute 'contiguous'": WEIGHTS,
    "ValueError: .*is expected.*": TOKENS,
    ".*is returned.*": "The parts work in place: return the model itself.",
}


def _batch():
    """Inputs, and targets of which rows have unequal numbers."""
    inputs = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(1))
    targets = inputs.roll(-1, 1)
    targets[1, 2:] = IGNORE
    return inputs, targets


def _trial(parallelize, layout):
    """(this rank's stage, {cost: number}, the loss, Pieces after a step of SGD)"""
    torch.manual_seed(0)
    hybrid, given, passes = Hybrid(layout.new_mesh(), layout, apply_by=parallelize), [], []
    is_made = layout == LAYOUTS[0]  # and not on the meta device
    with torch.device("cpu" if is_made else "meta"):
        model = GPT(CONFIG)
    model = model.to(device()) if is_made else model
    for block in model.blocks.values():
        block.norm2.register_forward_pre_hook(lambda _, x: passes.append(x[0].shape[:2].numel()))
    groups, give = [{"params": list(model.named_parameters())}], hybrid.materialize
    applied, apply = [], hybrid.data.apply
    hybrid.data.apply = lambda *of: (applied.append(of), apply(*of))[1]
    hybrid.materialize = lambda model: (given.append(_numbers(model)), give(model))
    if (got := hybrid.apply(model)) is not model:
        raise TypeError(f"a {type(got).__name__} is returned, not the model")
    optimizer = hybrid.make_optimizer(functools.partial(torch.optim.SGD, lr=1.0), groups)
    inputs, targets = hybrid.batch(*(x.to(device()) for x in _batch()))
    share = hybrid.forward_backward(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    optimizer.step()
    numbers = (_numbers(model), max(given, default=_numbers(model)), len(passes), sum(passes),
               len(applied))
    return (hybrid.mesh.coordinates()["pipeline"], dict(zip(HINTS, numbers)), hybrid.total(share),
            hybrid.state(model, optimizer))


def _numbers(model):
    return sum(p.numel() for p in model.parameters())


def _allowed(layout, stage):
    """The costs by formula; all sizes divide."""
    C, blocks, is_last = CONFIG.n_embd, CONFIG.n_layer // layout.pp, stage == layout.pp - 1
    part = blocks * (12 * C * C // layout.tp + 2 * C) + CONFIG.vocab_size * C // layout.tp
    part += C * is_last
    passes = blocks * 4 // layout.dp * (1 + layout.recompute)
    return (part // layout.dp if layout.zero == 3 else part, part, passes,
            passes * 8 // (layout.tp if layout.sequence_parallel else 1), 1)


def check_parallelize(parallelize):
    torch.manual_seed(0)
    model = GPT(CONFIG)
    loss = model(*_batch())
    loss.backward()
    weights = {name: (p - p.grad).detach() for name, p in model.named_parameters()}
    for layout in LAYOUTS:
        with hinted(FAILURES):
            seen = on_ranks(_trial, parallelize, layout, ranks=layout.ranks, timeout=30)
        for rank, of_rank in enumerate(seen):
            _look(f"{layout}, {rank_name(rank, layout.ranks)}", layout, *of_rank, loss, weights)
        yield f"{layout}: a step as in one process; each rank holds its part of the model"


def _look(where, layout, stage, costs, loss, pieces, right, weights):
    for (name, number), allowed in zip(costs.items(), _allowed(layout, stage)):
        if number != allowed:
            raise Mistake(f"{where}: {number} {name}, not {allowed}", HINTS[name])
    explain(f"{where}: the loss", loss, right.detach(), None, HINTS["numbers held"])
    for name, _, _, offset, tensor in pieces:  # SGD has no other state
        box = tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))
        explain(f"{where}: {name} after a step", tensor, weights[name][box], None, WEIGHTS)
