"""What a layout holds, by formulas: Memory of the first rank at the worst moment of a step.

The formulas describe the course's own trainer. Weights, gradients and Adam's moments are float32.
Autocast copies each matrix in each forward of a stage, and backward needs the copy. So without
recompute each micro-batch that waits for its backward keeps copies of its own. With recompute the
copies exist only while a stage runs forward.
"""

from ranklab.expert_parallel.layer import MoEConfig
from ranklab.hybrid.shares import (
    actions_of, hidden_bytes, mlp_numbers, parameters_of, shares, vocabulary_rows,
)
from ranklab.meter import Memory


def layout_memory(job, layout):
    """The Memory of the course's trainer on the first rank, at the largest of all moments(). States
    are exact but for a few bytes for each tensor; the total is within a few percent of the dry
    run's.

    Gradients count twice: fresh from autograd, and in the buckets in which they will travel. If no
    backward has run yet when most micro-batches wait (GPipe, one micro-batch), there are no fresh
    gradients, so the rank holds less than this. With experts and zero=3 it is up to 11% less.
    """
    return max(moments(job, layout).values(), key=lambda memory: memory.total)


def moments(job, layout):
    """{moment: Memory}: the moments at which the first rank may hold most."""
    job = job.on_a_rank(layout)
    config, share = job.config, shares(job.config, layout)[0]
    x, V, C = job.tokens * config.n_embd, vocabulary_rows(config, layout), config.n_embd
    tp, e, again = layout.tp, job.width, layout.recompute
    outside = hidden_bytes(job, layout)
    copies, inside = block_bytes(job, layout)
    kept = outside if again else inside + copies  # of a block, for backward
    waiting = in_flight(job, layout, share, kept)
    gradient = 2 * sum(mlp_numbers(config, layout))  # of one matrix of two: the MLP's, or experts'
    casts = 6 * x if e == 2 else 0  # of inputs and outputs, together with what was cast
    message = 16 * C * C // tp + 2 * gradient if layout.zero == 3 else 0  # a block's, on their way
    of_experts = 2 * mlp_numbers(config, layout)[1] if e == 2 else 0
    rows = 8 * config.top_k * x if isinstance(config, MoEConfig) else 0  # their gradients
    runs_again = inside + max(copies + gradient, copies + casts, copies + rows, message)
    found = {
        "a block runs backward": runs_again if again else outside + max(gradient, message, rows),
        "a block runs forward": 0 if again else outside + 2 * e * x,
        "the loss runs backward": share.head * 12 * V * job.tokens,  # the logits; float32, thrice
        # In a stage's forward autocast makes one copy of each matrix and keeps it, but it keeps
        # none of experts.
        "a stage runs forward": again * (max(share.stages.values()) * (copies - of_experts)
                                         + of_experts + outside
                                         + 2 * e * x + 4 * e * x // tp),
    }
    return {name: states(job, layout, share, waiting + n) for name, n in found.items()}


def states(job, layout, share, activations):
    """The Memory of a rank with this Share."""
    config, dp = job.config, layout.dp * layout.cp
    block, root = parameters_of(config, layout, share)
    n = 4 * (share.blocks * block + root)
    tables = 8 * config.n_ctx * config.head_size * share.blocks  # of rotary positions
    if layout.zero == 3:  # whole: a block, its gradients, the next block, and what is in no block
        return Memory(n // dp, n // dp, 2 * n // dp, tables, 4 * (root + 3 * block), 0, activations)
    return Memory(n, n, 2 * n // (dp if layout.zero else 1), tables, 0, n, activations)


def block_bytes(job, layout):
    """(autocast's copies of a block's matrices, everything else it keeps for its backward)"""
    config, tp = job.config, layout.tp
    x, e = job.tokens * config.n_embd, job.width
    outside = 8 * (x + 2 * job.tokens)  # inputs of two norms, and their mean and deviation
    # In float32 q, k and v have one input; autocast casts it for each of them.
    entering = 4 * x if e == 4 else 6 * x
    inside = 4 * x * e + 4 * job.tokens * config.n_head  # q, k, v, output; log-sums
    in_mlp = mlp_bytes(job, layout)
    copies = 0 if e == 4 else 2 * (4 * config.n_embd**2 // tp + sum(mlp_numbers(config, layout)))
    outside //= tp if layout.sequence_parallel else 1
    return copies, outside + entering + inside // tp + in_mlp


def mlp_bytes(job, layout):
    """Bytes that a block's MLP or its experts keep, if all experts have equally many tokens.

    With experts the router keeps x. Each row is kept as it goes into its expert, as it comes back,
    and, in float32, as it is added up. Probabilities and places are left out.
    """
    config, e, x = job.config, job.width, job.tokens * job.config.n_embd
    between = 2 * e * job.tokens * config.mlp_width // layout.tp
    if not isinstance(config, MoEConfig):
        return e * x + between
    shared = e * x if config.shared_width else 0
    return 4 * x + (2 * e + 4) * config.top_k * x + shared + between


def in_flight(job, layout, share, kept):
    """Bytes that wait for backward at the schedule's worst moment, with outputs on their way."""
    x = hidden_bytes(job, layout)
    C, V = job.config.n_embd, vocabulary_rows(job.config, layout)
    last = 2 * x + 4 * V * job.tokens + (2 * V * C if job.width == 2 else 0)  # head and loss
    pieces, P = job.micro_batches(layout), layout.pp
    of_stage = {stage: blocks * kept + x for stage, blocks in share.stages.items()}
    if share.head:
        of_stage[max(of_stage)] += last
    enough = pieces if layout.schedule == "gpipe" else min(pieces, 2 * P)  # to fill the pipeline
    held = most = 0
    for action in actions_of(P, layout.virtual, layout.schedule, enough)[0]:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * of_stage[action.stage]
        most = max(most, held)
    # Messages live on until they are waited for.
    sent = min(P, enough - P) * x if P > 1 and layout.schedule != "gpipe" and enough > P else 0
    return most + sent + 16 * pieces * job.tokens
