"""What a layout holds, by formulas: Memory of the first rank at the peak of a step.

The formulas describe the course's own trainer. Weights, gradients and Adam's moments are float32.
Autocast copies each matrix in each forward of a stage, and backward needs the copy. So without
recompute each micro-batch that waits for its backward keeps its own copies. With recompute the
copies exist only while a stage runs forward.
"""

from ranklab.expert_parallel.layer import MoEConfig
from ranklab.hybrid.shares import (
    actions_of, hidden_bytes, mlp_numbers, parameters_of, shares, vocabulary_rows,
)
from ranklab.meter import Memory


def layout_memory(job, layout):
    """Return the peak Memory of the course's trainer on the first rank: the largest of moments().
    States are exact except for a few bytes for each tensor; the total is within a few percent of
    the dry run's.

    Gradients count twice: new ones from autograd, and the buckets in which they will be sent. If no
    backward has run yet when most micro-batches wait (GPipe, one micro-batch), there are no new
    gradients, so the rank holds less than this. With experts and zero=3 it is up to 11% less.
    """
    return max(moments(job, layout).values(), key=lambda memory: memory.total)


def moments(job, layout):
    """Return {moment: Memory}: the moments at which the first rank may hold most."""
    job = job.on_a_rank(layout)
    config, share = job.config, shares(job.config, layout)[0]
    x, V, C = job.tokens * config.n_embd, vocabulary_rows(config, layout), config.n_embd
    tp, e, recompute = layout.tp, job.width, layout.recompute
    hidden = hidden_bytes(job, layout)
    copies, activations = block_bytes(job, layout)
    per_block = hidden if recompute else activations + copies  # until its backward
    waiting = in_flight(job, layout, share, per_block)
    gradient = 2 * sum(mlp_numbers(config, layout))  # of one matrix of two: the MLP's, or experts'
    casts = 6 * x if e == 2 else 0  # of inputs and outputs, together with the originals
    message = 16 * C * C // tp + 2 * gradient if layout.zero == 3 else 0  # a block's, in flight
    expert_copies = 2 * mlp_numbers(config, layout)[1] if e == 2 else 0
    rows = 8 * config.top_k * x if isinstance(config, MoEConfig) else 0  # experts' gradients
    rerun = activations + max(copies + gradient, copies + casts, copies + rows, message)
    peaks = {
        "a block runs backward": rerun if recompute else hidden + max(gradient, message, rows),
        "a block runs forward": 0 if recompute else hidden + 2 * e * x,
        "the loss runs backward": share.head * 12 * V * job.tokens,  # the logits; float32, thrice
        # In a stage's forward autocast makes one copy of each matrix and keeps it, but it keeps
        # none of experts.
        "a stage runs forward": recompute * (max(share.stages.values()) * (copies - expert_copies)
                                             + expert_copies + hidden
                                             + 2 * e * x + 4 * e * x // tp),
    }
    return {name: states(job, layout, share, waiting + n) for name, n in peaks.items()}


def states(job, layout, share, activations):
    """Return the Memory of a rank with this Share and so many bytes of activations."""
    config, dp = job.config, layout.dp * layout.cp
    block, root = parameters_of(config, layout, share)
    n = 4 * (share.blocks * block + root)
    tables = 8 * config.n_ctx * config.head_size * share.blocks  # of rotary positions
    if layout.zero == 3:  # whole: a block, its gradients, the next block, all that is in no block
        return Memory(n // dp, n // dp, 2 * n // dp, tables, 4 * (root + 3 * block), 0, activations)
    return Memory(n, n, 2 * n // (dp if layout.zero else 1), tables, 0, n, activations)


def block_bytes(job, layout):
    """Return (bytes of autocast's copies of a block's matrices, bytes of all other tensors that the
    block keeps for its backward).
    """
    config, tp = job.config, layout.tp
    x, e = job.tokens * config.n_embd, job.width
    norms = 8 * (x + 2 * job.tokens)  # inputs of two norms, and their mean and deviation
    norms //= tp if layout.sequence_parallel else 1
    # In float32 q, k and v have one input; autocast casts it for each of them.
    inputs = 4 * x if e == 4 else 6 * x
    attention = 4 * x * e + 4 * job.tokens * config.n_head  # q, k, v, output; log-sums
    copies = 0 if e == 4 else 2 * (4 * config.n_embd**2 // tp + sum(mlp_numbers(config, layout)))
    return copies, norms + inputs + attention // tp + mlp_bytes(job, layout)


def mlp_bytes(job, layout):
    """Return the bytes that a block's MLP or its experts keep, if all experts have equally many
    tokens.

    With experts the router keeps x. Each row is kept as its expert's input, as its output, and, in
    float32, as a term of the sum. Probabilities and indices are left out.
    """
    config, e, x = job.config, job.width, job.tokens * job.config.n_embd
    middle = 2 * e * job.tokens * config.mlp_width // layout.tp  # between the two matrices
    if not isinstance(config, MoEConfig):
        return e * x + middle
    shared = e * x if config.shared_width else 0
    return 4 * x + (2 * e + 4) * config.top_k * x + shared + middle


def in_flight(job, layout, share, per_block):
    """Return the bytes that wait for backward at the schedule's peak, with outputs in flight.

    per_block  bytes that wait in each block
    """
    x = hidden_bytes(job, layout)
    C, V = job.config.n_embd, vocabulary_rows(job.config, layout)
    head = 2 * x + 4 * V * job.tokens + (2 * V * C if job.width == 2 else 0)  # including the loss
    pieces, P = job.micro_batches(layout), layout.pp
    stage_bytes = {stage: blocks * per_block + x for stage, blocks in share.stages.items()}
    if share.head:
        stage_bytes[max(stage_bytes)] += head
    enough = pieces if layout.schedule == "gpipe" else min(pieces, 2 * P)  # to fill the pipeline
    waiting = peak = 0
    for action in actions_of(P, layout.virtual, layout.schedule, enough)[0]:
        waiting += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * stage_bytes[action.stage]
        peak = max(peak, waiting)
    # Messages live on until they are waited for.
    messages = min(P, enough - P) * x if P > 1 and layout.schedule != "gpipe" and enough > P else 0
    return peak + messages + 16 * pieces * job.tokens
