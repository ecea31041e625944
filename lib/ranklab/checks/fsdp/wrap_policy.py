"""The check of wrap_policy: the blocks fit, on several models, and how few there are."""

import torch
from torch import nn

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.checks.trial import refuses
from ranklab.fsdp.wrapping import (
    can_be_a_block, outermost, parameter_bytes, whole_bytes, wrap_policy,
)
from ranklab.models.gpt import GPT, GPTConfig

OURS = 159  # blocks that the library's policy takes in all; a test holds them together
MOST = 1.2  # times as many
# What is said.
TOO_LARGE = "Raise a ValueError if even the smallest blocks are too large."
LARGER = "Take larger blocks as long as they fit, and no block for what fits in the root."
THERE_IS = ("Some choice of blocks fits: whole_bytes() may equal most_bytes. Try every module for "
            "which can_be_a_block() is True, down to single layers: one with children may have its "
            "own parameters.")
MODULES = "Return modules inside the model: not names, and not the model itself, the root."
OUTERMOST = "No block may be inside another one: use outermost(), and return each block once."
CAN_BE = ("can_be_a_block() is False for this module: take a module around it, or modules inside "
          "it.")
ROOT = "Count the root (everything in no block) and twice the largest block: whole_bytes()."


def _stages():
    """Lists in a list; three stages have one and the same layer."""
    shared = nn.Linear(16, 16)
    return nn.ModuleDict({"norm": nn.LayerNorm(16), "stages": nn.ModuleList(nn.ModuleList(
        nn.Sequential(nn.Linear(16, 16 * width), nn.ReLU(), nn.Linear(16 * width, 16), *last)
        for width, last in ((1, ()), (2 + number, ()), (1, (shared,)))) for number in range(3))})


def models():
    """Make {name: model} on meta tensors, which take no memory."""
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
               TOO_LARGE)
    yield ("at most most_bytes are whole: on 5 models; a ValueError where even the finest blocks "
           "do not fit")
    yield "no block is inside another, or has no forward, or shares a parameter with the outside"
    expect(blocks_in_all <= MOST * OURS, f"{blocks_in_all} blocks in all, where {OURS} are enough",
           LARGER)
    yield f"your score: {blocks_in_all} blocks in all; the library's policy has {OURS}"


def limits(model):
    """Compute limits in bytes: the needs of some choices, and one byte less.

    The first limit is the need of the finest blocks; below it no choice fits.
    """
    layers = [m for m in model.modules() if m is not model and can_be_a_block(model, m)]
    needs = sorted({whole_bytes(model, outermost([m for m in layers if parameter_bytes(m) <= size]))
                    for size in (0, *map(parameter_bytes, layers))})
    some = [needs[len(needs) // 3], needs[len(needs) // 2], needs[-1]]
    return [needs[0], *some, *(need - 1 for need in some if need > needs[0])]


def _blocks(wrap_policy, where, model, most):
    """Return the policy's choice, after checking it."""
    try:
        blocks = list(wrap_policy(model, most))
    except ValueError as error:
        raise Mistake(f"{where}: ValueError({error})", THERE_IS) from None
    names = {id(module): name for name, module in model.named_modules() if module is not model}
    expect(all(id(block) in names for block in blocks), f"{where}: it returns {str(blocks)[:60]}",
           MODULES)
    expect(len(outermost(blocks)) == len(set(blocks)) == len(blocks),
           f"{where}: a block is inside another one, or appears twice", OUTERMOST)
    for block in blocks:
        is_called = type(block).forward is not nn.Module.forward
        fault = "shares a parameter with what is outside" if is_called else "is never called"
        expect(can_be_a_block(model, block), f"{where}: `{names[id(block)]}` {fault}",
               CAN_BE)
    got = whole_bytes(model, blocks)
    expect(got <= most, f"{where}: {got:,} bytes are whole with {len(blocks)} blocks",
           ROOT)
    return blocks


FREE = "[m for m in model.modules() if m is not model and can_be_a_block(model, m)]"
FITS, LAST = "if whole_bytes(model, blocks) <= most_bytes:", "    raise ValueError(f"
CHOSEN = "[m for m in free if 0 < parameter_bytes(m) <= largest]"
FOUND = "return without_needless(model, blocks, most_bytes)"
WRAP = Exercise(
    wrap_policy, check_wrap_policy, mistakes=(
        Slip(CAN_BE, (FREE, "[m for m in model.modules() if m is not model]"),
             (FREE, "[m for m in model.modules() if m is not model and type(m).forward is not "
              "nn.Module.forward]")),
        Slip(OUTERMOST, (f"outermost({CHOSEN})", CHOSEN)),
        Slip(ROOT, (FITS, "if 2 * max(map(parameter_bytes, blocks), default=0) <= most_bytes:")),
        Slip(THERE_IS, (FITS, FITS.replace("<=", "<")),
             (FREE, "[m for m in model.children() if can_be_a_block(model, m)]"),
             (FREE, "[m for m in model.modules() if not list(m.children()) and can_be_a_block("
              "model, m)]", FOUND, "return blocks")),
        Slip(TOO_LARGE, (LAST, f"    return outermost(free)\n{LAST}"),
             (LAST, "    if most_bytes >= 2 * max(p.nbytes for p in model.parameters()):\n        "
              f"return outermost([m for m in free if not list(m.children())])\n{LAST}")),
        Slip(LARGER, ("reverse=True", "reverse=False")),
        Slip(MODULES, (FOUND, "return [name for name, m in model.named_modules() if m in blocks]"),
             (FOUND, "return [*blocks, model]")),
    ), hints=(
        "What would be whole with no block at all? With each layer as a block? What is between?",
        "Let no block be larger than some size, and take the largest modules within that size that "
        "can be blocks. Try all sizes, from the largest down, until whole_bytes() is small enough.",
        "For each size, take the modules with can_be_a_block() and parameter_bytes() <= size, "
        "except those inside another of them. The first size that fits wins. Finally, drop the "
        "blocks that fit in the root as well, the smallest first.",
    ))
