"""parallelize: apply all kinds of parallelism to one model, in the only order that works."""

import functools

from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.tensor_parallel.plan import TPConfig, parallel_gpt


def parallelize(model, hybrid):
    """Reduce `model`, a GPT, to this rank's part, which trains with the other ranks; return it.

    Each step works on what the previous step has left:
    1. pipeline: the rank keeps only its layers, so it need not split the others
    2. tensor: it keeps its part of each layer; norms see only its tokens
    3. memory: a model on the meta device gets weights, but only those that stay on this rank
    4. checkpointing: each block recomputes its activations, and sends step 2's messages again
    5. stages: the blocks of a stage run together
    6. data: average the gradients, or shard the states, of the parameters left after 1 and 2
    Lab: 12
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
