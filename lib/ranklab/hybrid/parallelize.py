"""parallelize: all kinds of parallelism on one model, in the order in which they must come."""

import functools

from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.tensor_parallel.plan import TPConfig, parallel_gpt


def parallelize(model, hybrid):
    """`model`, a GPT, in place: what of it is on this rank, and how it talks to the others.

    Each step sees what the one before has left:
    1. pipeline: the rank keeps its layers; what it does not have need not be split
    2. tensor: of each layer it keeps its part; norms see its tokens
    3. memory: a model on the meta device gets weights, and never more of them than stay here
    4. checkpointing: each block computes its activations again, messages of 2 included
    5. stages: blocks that belong to one stage run together
    6. data: the gradients, the optimizer's state or all three of what is left after 1 and 2
    lab  12
    """
    layout = hybrid.layout
    hybrid.pipeline.keep_stages(model)
    parallel_gpt(model, TPConfig(hybrid.tensor.group, layout.sequence_parallel))
    hybrid.materialize(model)
    if layout.recompute:
        checkpoint_blocks(model, functools.partial(checkpoint, use_reentrant=False))
    hybrid.pipeline.make_stages(model)
    hybrid.data.apply(model)
    return model
