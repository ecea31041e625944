"""parallelize: all kinds of parallelism on one model, in the order in which they must come."""

import functools

from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.tensor_parallel.plan import How, parallel_gpt


def parallelize(model, hybrid):
    """`model`, a GPT, in place: what of it is on this rank, and how it talks to the others.

    Each step sees what the one before has left:
    1. pipeline: the rank keeps its layers; what it does not have need not be split
    2. tensor: of each layer it keeps its part; norms see its tokens
    3. checkpointing: each block computes its activations again, messages of 2 included
    4. stages: blocks that belong to one stage run together
    5. data: the gradients, or the optimizer's state, of what is left after 1 and 2
    lab  12
    """
    layout = hybrid.layout
    hybrid.pipeline.keep_mine(model)
    parallel_gpt(model, How(hybrid.tensor.group, layout.sequence_parallel))
    if layout.recompute:
        checkpoint_blocks(model, functools.partial(checkpoint, use_reentrant=False))
    hybrid.pipeline.make_stages(model)
    hybrid.data.apply(model)
    return model
