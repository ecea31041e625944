"""Which modules to shard as separate blocks: small blocks save memory, large ones save messages."""

from collections import Counter

from torch import nn


def wrap_policy(model, most_bytes):
    """Choose few modules to shard as blocks, so that at most most_bytes are whole at any time.

    whole_bytes counts these bytes. No block is inside another. Each is called as a module, so
    that its hooks run, and shares no parameter with modules outside of it (see can_be_a_block).
    Raises: ValueError if even the smallest blocks are too large.
    Lab: 07
    """
    free = [m for m in model.modules() if m is not model and can_be_a_block(model, m)]
    for largest in sorted({0, *map(parameter_bytes, free)}, reverse=True):
        blocks = outermost([m for m in free if 0 < parameter_bytes(m) <= largest])
        if whole_bytes(model, blocks) <= most_bytes:
            return without_needless(model, blocks, most_bytes)
    smallest = whole_bytes(model, outermost([m for m in free if not list(m.children())]))
    raise ValueError(f"most_bytes={most_bytes:,} is too little: with each layer as a block, "
                     f"{smallest:,} bytes are whole")


def whole_bytes(model, blocks):
    """Count the bytes of whole parameters in memory at the worst moment of a step.

    These are the root's bytes and twice the largest block's: a block's parameters exist twice for
    a moment, in the message and in their shapes; later the next block's message is in memory as
    well.
    """
    sizes = [parameter_bytes(block) for block in blocks]
    root = parameter_bytes(model) - sum(sizes)
    return root + max([root, *(2 * size for size in sizes)])


def parameter_bytes(module):
    return sum(p.nbytes for p in module.parameters())


def can_be_a_block(model, module):
    """Return whether `module` has a forward, and shares no parameters with modules outside it.

    A ModuleList has no forward. Some layers have a forward that is never called: out_proj of
    torch's MultiheadAttention.
    """
    uses, inside = uses_of(model), uses_of(module)
    times = sum(m is module for _, m in model.named_modules(remove_duplicate=False))
    return (type(module).forward is not nn.Module.forward
            and all(uses[p] == times * inside[p] for p in module.parameters()))


def uses_of(module):
    """Return {parameter: number of its places}; a layer in two modules counts twice."""
    return Counter(p for _, owner in module.named_modules(remove_duplicate=False)
                   for p in owner._parameters.values())


def outermost(modules):
    """List those `modules` that are not inside another of them, in the same order."""
    inner = {inside for m in modules for inside in m.modules() if inside is not m}
    return [m for m in modules if m not in inner]


def without_needless(model, blocks, most_bytes):
    """Drop the blocks that fit into the root, the smallest first."""
    for block in sorted(blocks, key=parameter_bytes):
        remaining = [b for b in blocks if b is not block]
        if whole_bytes(model, remaining) <= most_bytes:
            blocks = remaining
    return blocks
