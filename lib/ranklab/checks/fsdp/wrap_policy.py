"""The check of wrap_policy: blocks that fit on several models, and how few they are."""

import torch
from torch import nn

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import refuses
from ranklab.fsdp.wrapping import can_be_a_block, outermost, parameter_bytes, whole_bytes
from ranklab.models.gpt import GPT, GPTConfig

OURS = 159  # blocks that the library's policy takes in all; a test holds them together
MOST = 1.2  # times as many


def _stages():
    """Lists in a list; three stages have one and the same layer."""
    shared = nn.Linear(16, 16)
    return nn.ModuleDict({"norm": nn.LayerNorm(16), "stages": nn.ModuleList(nn.ModuleList(
        nn.Sequential(nn.Linear(16, 16 * width), nn.ReLU(), nn.Linear(16 * width, 16), *last)
        for width, last in ((1, ()), (2 + number, ()), (1, (shared,)))) for number in range(3))})


def models():
    """{name: model}; they take no memory."""
    with torch.device("meta"):
        return {
            "a GPT": GPT(GPTConfig(vocab_size=50, n_ctx=16, n_embd=20, n_head=2, n_layer=6)),
            "lists in a list, with a shared layer": _stages(),
            "layers of many sizes": nn.Sequential(*(
                nn.Linear(8, 2 + 7 * n % 30) for n in range(14)), nn.ReLU()),
            "bare parameters": nn.Sequential(*(nn.MultiheadAttention(8, 2) for _ in range(3))),
            "one very large layer": nn.Sequential(*(nn.Linear(n, 8) for n in (8, 300, 8))),
        }


def check_wrap_policy(wrap_policy):
    blocks_in_all = 0
    for name, model in models().items():
        for most in limits(model):
            blocks_in_all += len(_blocks(wrap_policy, f"{name}, most_bytes={most:,}", model, most))
        most = limits(model)[0] - 1
        expect(refuses(wrap_policy, model, most), f"{name}: most_bytes={most:,} raises no error",
               "Raise a ValueError where the finest blocks are too large.")
    yield "no more is whole than most_bytes: on 5 models; a ValueError where the finest do not fit"
    yield "no block is inside another, or has no forward, or shares a parameter with the outside"
    expect(blocks_in_all <= MOST * OURS, f"{blocks_in_all} blocks in all, where {OURS} are enough",
           "Take larger blocks as long as they fit, and none where the root has room.")
    yield f"your score: {blocks_in_all} blocks in all; the library's policy has {OURS}"


def limits(model):
    """What some choices need, from the finest blocks, below which none fits; and one byte less."""
    layers = [m for m in model.modules() if m is not model and can_be_a_block(model, m)]
    needs = sorted({whole_bytes(model, outermost([m for m in layers if parameter_bytes(m) <= size]))
                    for size in (0, *map(parameter_bytes, layers))})
    some = [needs[len(needs) // 3], needs[len(needs) // 2], needs[-1]]
    return [needs[0], *some, *(need - 1 for need in some if need > needs[0])]


def _blocks(wrap_policy, where, model, most):
    """What the policy chooses, which is right."""
    try:
        blocks = list(wrap_policy(model, most))
    except ValueError as error:
        raise Mistake(f"{where}: ValueError({error})", "There is a choice that fits: whole_bytes() "
                      "may be as large as most_bytes. Go down to single layers.") from None
    names = {id(module): name for name, module in model.named_modules() if module is not model}
    expect(all(id(block) in names for block in blocks), f"{where}: it returns {str(blocks)[:60]}",
           "Return modules inside the model: not names, and not the model itself, the root.")
    expect(len(outermost(blocks)) == len(set(blocks)) == len(blocks),
           f"{where}: a block is inside another one, or there twice", "outermost() drops these.")
    for block in blocks:
        is_called = type(block).forward is not nn.Module.forward
        what = "shares a parameter with what is outside" if is_called else "is never called"
        expect(can_be_a_block(model, block), f"{where}: `{names[id(block)]}` {what}",
               "can_be_a_block() tells. Take a larger module that holds everything it shares, or "
               "modules inside it.")
    got = whole_bytes(model, blocks)
    expect(got <= most, f"{where}: {got:,} bytes are whole with {len(blocks)} blocks",
           "Count the root, what is in no block, and twice the largest block: whole_bytes().")
    return blocks
