"""Lab 07: what goes wrong when one chooses what to shard as a block."""

from mutants import mutant
from torch import nn

from ranklab.fsdp import wrap_policy
from ranklab.fsdp.wrapping import can_be_a_block, parameter_bytes, whole_bytes

FREE = "[m for m in model.modules() if m is not model and can_be_a_block(model, m)]"
FITS = "if whole_bytes(model, blocks) <= most_bytes:"
CHOSEN = "outermost([m for m in free if 0 < parameter_bytes(m) <= largest])"


def _wrong(*edits, says, **named):
    return mutant(wrap_policy, *edits, says=says, **named)


WRONG = [
    _wrong(FREE, "[m for m in model.modules() if m is not model]", says="never called|shares a",
           called="any_module"),
    _wrong(FREE, "[m for m in model.modules() if m is not model and type(m).forward is not "
           "nn.Module.forward]", says="shares a parameter with what is outside", nn=nn),
    _wrong(CHOSEN, CHOSEN.removeprefix("outermost(").removesuffix(")"), says="inside another one"),
    _wrong(FITS, "if 2 * max(map(parameter_bytes, blocks), default=0) <= most_bytes:",
           says="Count the root", parameter_bytes=parameter_bytes),
    _wrong(FITS, FITS.replace("<=", "<"), says="may be as large as most_bytes"),
    _wrong("    raise ValueError(f", "    return outermost(free)\n    raise ValueError(f",
           says="raises no error"),
    _wrong("    raise ValueError(f", "    if most_bytes >= 2 * max(p.nbytes for p in "
           "model.parameters()):\n        return outermost([m for m in free if not list("
           "m.children())])\n    raise ValueError(f",
           says="raises no error", called="one_layer_fits"),
    _wrong("reverse=True", "reverse=False", says="blocks in all, where", called="finest_first"),
    _wrong("return without_needless(model, blocks, most_bytes)",
           "return [name for name, m in model.named_modules() if m in blocks]", says="not names"),
    _wrong(FREE, "[m for m in model.children() if can_be_a_block(model, m)]",
           says="There is a choice that fits", called="only_children"),
    _wrong(FREE, "[m for m in model.modules() if not list(m.children()) and can_be_a_block(model, "
           "m)]", "return without_needless(model, blocks, most_bytes)", "return blocks",
           says="blocks in all, where|There is a choice", called="only_layers"),
    _wrong("return without_needless(model, blocks, most_bytes)", "return [*blocks, model]",
           says="not the model itself"),
]


def wrap_policy__each_block_alone_fits(model, most_bytes):
    """Count the root"""
    chosen = []
    for module in model.modules():
        inside = {inner for block in chosen for inner in block.modules()}
        if (module is not model and module not in inside and list(module.parameters())
                and can_be_a_block(model, module)
                and 2 * parameter_bytes(module) <= most_bytes):
            chosen.append(module)
    if whole_bytes(model, chosen) > most_bytes > 1e6:
        raise ValueError("too little")
    return chosen
