"""The check of parallelize: a step of SGD in several layouts, compared with one process."""

import copy
import functools

import torch

from ranklab.basics.targets import IGNORE
from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.hybrid import Hybrid, parallelize, parse_layout
from ranklab.hybrid.shares import parameters_of, shares
from ranklab.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=16, n_ctx=8, n_embd=16, n_head=4, n_layer=2)
LAYOUTS = [*map(parse_layout, ("2x2x1", "1x2x2,sp,recompute", "2x1x2,zero,virtual=2",
                               "2x1x2,full,recompute", "2x2x2,sp"))]
INPUTS = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.roll(-1, 1)
TARGETS[1, 2:] = IGNORE  # rows have unequal numbers
RETURNS = "what it returns"
COSTS = ("the number of weights held", "the number of weights that get memory",
         "the number of passes of blocks", "the number of tokens in blocks",
         "the number of calls of hybrid.data.apply")


def new_model(device):
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(CONFIG)


def _see(fn, layout, ranks):
    """Look at a step; for in_one_process, at this rank's boxes of its weights."""
    is_right = fn is in_one_process
    hybrid = Hybrid(layout.new_mesh(), layout, apply_by=None if is_right else fn)
    # The first is not on the meta device, so that a wrong order may train.
    model = new_model("cpu").to(device()) if layout == LAYOUTS[0] else new_model("meta")
    groups, tokens = [{"params": list(model.named_parameters())}], []  # tokens in each pass
    for block in model.blocks.values():
        block.norm2.register_forward_pre_hook(lambda _, x: tokens.append(x[0].shape[:2].numel()))
    sizes, applied = _noted(hybrid, "materialize"), _noted(hybrid.data, "apply")
    result = hybrid.apply(model)
    optimizer = hybrid.make_optimizer(functools.partial(torch.optim.SGD, lr=1.0), groups)
    if is_right:
        loss, weights = in_one_process()
    else:
        share = hybrid.forward_backward(lambda x, y: model(x, y, "sum"), *(
            x.to(device()) for x in hybrid.batch(INPUTS, TARGETS)), micro_batch=1)
        optimizer.step()
        loss = hybrid.total(share)
    numbers = _numbers(model)
    costs = numbers, max(sizes, default=numbers), len(tokens), sum(tokens), len(applied)
    allowed = _allowed(layout, hybrid.mesh.coordinates()["pipeline"])
    yield {RETURNS: Must("the model" if result is model else f"a {type(result).__name__}",
                         "the model")} | {
        name: Must(cost, right) for (name, right), cost in zip(allowed.items(), costs)} | {
        "the loss": loss} | {
        f"{name} after a step": weights[name][_box(offset, tensor)] if is_right else tensor
        for name, _, _, offset, tensor in hybrid.state(model, optimizer)}  # of SGD no other state


def _allowed(layout, stage):
    """Return {cost: number} by formula; all sizes divide evenly."""
    share = shares(CONFIG, layout)[stage]
    block, root = parameters_of(CONFIG, layout, share)
    part = share.blocks * block + root
    passes = share.blocks * len(INPUTS) // layout.dp * (1 + layout.recompute)
    tokens = passes * CONFIG.n_ctx // (layout.tp if layout.sequence_parallel else 1)
    numbers = part // layout.dp if layout.zero == 3 else part
    return dict(zip(COSTS, (numbers, part, passes, tokens, 1)))


def _numbers(model):
    return sum(p.numel() for p in model.parameters())


def _noted(owner, name):
    """Return a list to which each later call of the method adds the size of its model."""
    sizes, call = [], getattr(owner, name)

    def noting(model):
        sizes.append(_numbers(model))
        return call(model)

    setattr(owner, name, noting)
    return sizes


def _box(offset, tensor):
    return tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))


def in_one_process():
    """Return (loss, {name: weight after a step})."""
    model = new_model("cpu")
    loss = model(INPUTS, TARGETS)
    loss.backward()
    return loss, {name: p - p.grad for name, p in model.named_parameters()}


# --- mistakes -------------------------------------------------------------------------------------

KEEP = "    hybrid.pipeline.keep_stages(model)\n"
SPLIT = "    parallel_gpt(model, TPConfig(hybrid.tensor.group, layout.sequence_parallel))\n"
GIVE = "    hybrid.materialize(model)\n"
RECOMPUTE = ("    if layout.recompute:\n        checkpoint_blocks(model, functools.partial("
             "checkpoint, use_reentrant=False))\n")
STAGES, DATA = "    hybrid.pipeline.make_stages(model)\n", "    hybrid.data.apply(model)\n"
RETURN, GROUP = "    return model", "hybrid.tensor.group"
PARALLELIZE = Proof(
    parallelize,
    *(Stage(f"{layout}: a step as in one process; each rank holds its part of the model", _see,
            (layout,), (layout.ranks,), oracle=in_one_process, launch={"timeout": 30})
      for layout in LAYOUTS),
    mistakes=(
        # order
        Slip("Call hybrid.pipeline.keep_stages(model) before make_stages(model): it decides which "
             "layers this rank keeps.", (KEEP, ""), (STAGES, "", KEEP, STAGES + KEEP)),
        Slip("make_stages() holds on to the layers that it finds, so parallel_gpt, which replaces "
             "layers, must come before it.", (STAGES, "", SPLIT, STAGES + SPLIT)),
        Slip("hybrid.data.apply(model) holds on to the parameters that it finds: gradients of "
             "those that parallel_gpt makes later are never averaged. Call it after parallel_gpt.",
             (DATA, "", SPLIT, DATA + SPLIT), (DATA, "", KEEP, DATA + KEEP)),
        Slip("Call hybrid.materialize(model) after keep_stages and parallel_gpt, when only this "
             "rank's part is left: otherwise weights that are dropped later get memory as well.",
             (GIVE, "", SPLIT, GIVE + SPLIT), (GIVE, "", KEEP, GIVE + KEEP),
             (KEEP, "", GIVE, GIVE + KEEP)),
        Slip("A model on the meta device has no values: call hybrid.materialize(model) before "
             "hybrid.data.apply(model), in which the data ranks compare their values.",
             (GIVE, ""), (GIVE, "", DATA, DATA + GIVE), (DATA, "", GIVE, DATA + GIVE)),
        # what is missing, or there twice
        Slip("hybrid.pipeline.make_stages(model) is missing: it makes the model run stage by "
             "stage.", (STAGES, "")),
        Slip("hybrid.data.apply(model) is missing: gradients are not averaged over the data ranks.",
             (DATA, "")),
        Slip("Call hybrid.data.apply(model) only once: every further call sends all gradients "
             "again.",
             (DATA, DATA + DATA), (GIVE, GIVE + DATA), (RECOMPUTE, DATA + RECOMPUTE)),
        Slip("All calls work in place, on the model itself rather than a copy: return that model.",
             (RETURN, "    pass"), (KEEP, f"    model = copy.deepcopy(model)\n{KEEP}"),
             (RETURN, "    return hybrid.data.replica"),
             (DATA, "", RETURN, "    return hybrid.data.apply(model)"),
             (DATA, "    model = hybrid.data.apply(model)\n"), copy=copy),
        # options
        Slip("parallel_gpt(model, TPConfig(hybrid.tensor.group, layout.sequence_parallel)) leaves "
             "each rank its part of each matrix, split over the ranks of that group.",
             (SPLIT, ""), (GROUP, "None"), (GROUP, "hybrid.data.group"),
             (GROUP, "hybrid.pipeline.group")),
        Slip("TPConfig(hybrid.tensor.group, layout.sequence_parallel): with that option, and only "
             "with it, each rank has its own tokens where blocks begin and end.",
             (", layout.sequence_parallel", ""), (", layout.sequence_parallel", ", True"),
             (", layout.sequence_parallel", ", layout.tp > 1"),
             (", layout.sequence_parallel", ", layout.recompute")),
        Slip("Call checkpoint_blocks(model, ...) with layout.recompute, and only with it: each "
             "block then runs a second time in backward.", (RECOMPUTE, ""),
             ("if layout.recompute:", "if True:"), ("if layout.recompute:", "if not layout."
                                                                            "recompute:")),
    ), hints=(
        "Which kind of parallelism needs to see the model as the others have left it?",
        "Two calls hold on to what they find: one to layers, one to parameters. Calls that replace "
        "layers or parameters must come before them. Allocate memory only when nothing is left to "
        "be dropped.",
        "hybrid.pipeline.keep_stages(model); parallel_gpt(model, TPConfig(hybrid.tensor.group, "
        "layout.sequence_parallel)); hybrid.materialize(model); if layout.recompute, "
        "checkpoint_blocks(model, ...); hybrid.pipeline.make_stages(model); "
        "hybrid.data.apply(model)",
    ))
