"""The check of parallelize: a step of SGD in several layouts, beside one process."""

from functools import partial

import torch

from ranklab.basics.targets import IGNORE
from ranklab.checks.beside import expect, on_groups
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.hybrid import Hybrid, parse_layout
from ranklab.hybrid.shares import parameters_of, shares
from ranklab.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=16, n_ctx=8, n_embd=16, n_head=4, n_layer=2)
LAYOUTS = [*map(parse_layout, ("2x2x1", "1x2x2,sp,recompute", "2x1x2,zero,virtual=2",
                               "2x1x2,full,recompute", "2x2x2,sp"))]
INPUTS = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.roll(-1, 1)
TARGETS[1, 2:] = IGNORE  # rows have unequal numbers
TOKENS = ("TPConfig(hybrid.tensor.group, layout.sequence_parallel): with it each rank has its "
          "tokens where blocks begin and end.")
WEIGHTS = ("Data parallelism sees the parameters that are there when it is applied. What is cut or "
           "replaced later is never averaged, so data comes last, in place, once. And "
           "make_stages() holds on to the layers that it finds, so replace layers before it.")
PARTS = ("The pipeline keeps this rank's layers, and tensor parallelism its part of each layer, in "
         "the group hybrid.tensor.group.")
COSTS = {  # of what a rank counts, the hint
    "numbers held": PARTS,
    "numbers that get memory": "Call hybrid.materialize(model) when only this rank's part of its "
                               "layers is left: what goes later has had memory, too.",
    "passes of blocks": "With layout.recompute, and only then, call checkpoint_blocks(model, ...): "
                        "each block then runs a second time in backward.",
    "tokens in blocks": TOKENS, "calls of data.apply": WEIGHTS,
}
FAILURES = {
    "AttributeError: .* has no attribute 'place'": "hybrid.pipeline.keep_stages(model) is first.",
    "AttributeError: 'PipelineParallel' object .*":
        "hybrid.pipeline.make_stages(model) is missing, or too late.",
    "AttributeError: .* has no attribute 'replica'": "hybrid.data.apply(model) is missing.",
    r"\w+: .*\bmeta\b.*": "A model on the meta device has no numbers. Call "
        "hybrid.materialize(model) after pipeline and tensor parallelism, and before the data "
        "ranks compare theirs.",
    "AttributeError: .* no attribute 'contiguous'|.* got no gradient.*": WEIGHTS,
    "ValueError: .*is expected.*": TOKENS,
}


def _numbers(model):
    return sum(p.numel() for p in model.parameters())


def _noted(owner, name):
    """A list that gets, for each later call of the method, how many numbers its model had."""
    seen, call = [], getattr(owner, name)

    def noting(model):
        seen.append(_numbers(model))
        return call(model)

    setattr(owner, name, noting)
    return seen


def _allowed(layout, stage):
    """{cost: number} by formula; all sizes divide."""
    share = shares(CONFIG, layout)[stage]
    block, root = parameters_of(CONFIG, layout, share)
    part = share.blocks * block + root
    passes = share.blocks * len(INPUTS) // layout.dp * (1 + layout.recompute)
    tokens = passes * CONFIG.n_ctx // (layout.tp if layout.sequence_parallel else 1)
    held = part // layout.dp if layout.zero == 3 else part
    return dict(zip(COSTS, (held, part, passes, tokens, 1)))


def _trial(parallelize, ranks, layout, loss, weights):
    hybrid, where = Hybrid(layout.new_mesh(), layout, apply_by=parallelize), f"{layout}, {ranks}"
    torch.manual_seed(0)
    is_made = layout == LAYOUTS[0]  # not on the meta device, so that a wrong order may train
    with torch.device("cpu" if is_made else "meta"):
        model = GPT(CONFIG)
    model = model.to(device()) if is_made else model
    groups, tokens = [{"params": list(model.named_parameters())}], []  # tokens in each pass
    for block in model.blocks.values():
        block.norm2.register_forward_pre_hook(lambda _, x: tokens.append(x[0].shape[:2].numel()))
    given, applied = _noted(hybrid, "materialize"), _noted(hybrid.data, "apply")
    got = hybrid.apply(model)
    optimizer = hybrid.make_optimizer(partial(torch.optim.SGD, lr=1.0), groups)
    share = hybrid.forward_backward(lambda x, y: model(x, y, "sum"), *(
        x.to(device()) for x in hybrid.batch(INPUTS, TARGETS)), micro_batch=1)
    optimizer.step()
    yield partial(expect, got is model, f"{where}: a {type(got).__name__} is returned",
                  "All calls work in place: return the model itself.")
    held = _numbers(model)
    costs = held, max(given, default=held), len(tokens), sum(tokens), len(applied)
    allowed = _allowed(layout, hybrid.mesh.coordinates()["pipeline"])
    for number, (name, right) in zip(costs, allowed.items()):
        yield partial(expect, number == right, f"{where}: {number} {name}, not {right}",
                      COSTS[name])
    yield partial(explain, f"{where}: the loss", hybrid.total(share).cpu(), loss, None, PARTS)
    for name, _, _, offset, tensor in hybrid.state(model, optimizer):  # SGD has no other state
        box = tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))
        yield partial(explain, f"{where}: {name} after a step", tensor.cpu(), weights[name][box],
                      None, WEIGHTS)


def check_parallelize(parallelize):
    torch.manual_seed(0)
    model = GPT(CONFIG)
    loss = model(INPUTS, TARGETS)
    loss.backward()
    weights = {name: (p - p.grad).detach() for name, p in model.named_parameters()}
    for layout in LAYOUTS:
        on_groups(_trial, parallelize, layout, loss.detach(), weights, failures=FAILURES,
                  ranks=layout.ranks, groupings=[(tuple(range(layout.ranks)),)], timeout=30)
        yield f"{layout}: a step as in one process; each rank holds its part of the model"
