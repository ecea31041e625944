"""The GPU memory of a Llama under FSDP, by a formula. Nothing is run."""

from typing import NamedTuple

from ranklab.meter import Memory


class Step(NamedTuple):
    """The settings of a step on each rank."""

    micro_batch: int = 1
    n_ctx: int = 1024
    pieces: int = 1  # micro-batches in a step
    precision: str = "bf16"
    recompute: bool = True
    offload: bool = False

    @property
    def width(self):
        """The bytes of a number in the compute type."""
        return 2 if self.precision == "bf16" else 4

    def __str__(self):
        times = f"{self.pieces} times " if self.pieces > 1 else ""
        return ", ".join([
            f"{times}{self.micro_batch} x {self.n_ctx} tokens on each", self.precision,
            *(name for name in ("recompute", "offload") if getattr(self, name))])


def predicted_memory(config, ranks, **fields):
    """Predict the peak Memory of one GPU: the largest of all moments().

    config: a dict, in the form of transformers.LlamaConfig.
    fields: fields of Step.
    """
    return max(moments(config, ranks, Step(**fields)).values(), key=lambda memory: memory.total)


def moments(config, ranks, step):
    """Predict {moment: Memory of one GPU} for the moments at which a step may hold most.

    Rows, their gradients and Adam's moments are float32; with offload they are on the CPU.
    Parameters and gradients that are whole for a while count as gathered, messages as activations.
    """
    L, block, head, root = parameters_of(config)
    n = root + L * block
    at_loss, kept_bytes, input_bytes, inner_bytes, flowing = activations_of(config, step)
    down = config["hidden_size"] * config["intermediate_size"]  # the first gradient of a block

    def memory(whole, gradients, finished, message, activations):
        """Make a Memory from counts (activations: bytes); `finished` blocks have gradients."""
        arrived = 0 if step.offload else n if step.pieces > 1 else finished * block
        rows = 0 if step.offload else 4 * n / ranks
        return Memory(*map(int, (rows, 4 * arrived / ranks, 2 * rows, 0, step.width * (
            whole + gradients), 0, activations + 4 * message)))

    memories = {"the loss is taken": memory(root, 0, 0, 0, L * kept_bytes + at_loss)}
    for finished in range(L):
        # The next block is being gathered, from a copy of its rows.
        next_block = block + block / ranks if finished < L - 1 else 0
        whole = root + block + next_block
        activations = (L - finished - 1) * kept_bytes + input_bytes
        # The previous block is being reduced, in a message; its rows may have arrived already.
        extra = (block + (step.offload or step.pieces > 1) * block / ranks) if finished else 0
        memories[f"block {L - finished}'s backward runs"] = memory(
            whole, head + down, finished, extra, activations + inner_bytes + flowing)
        # A message is made from float32 copies, which are in memory as well.
        memories[f"block {L - finished}'s gradients leave"] = memory(
            whole, head + block, finished, 2 * block, activations)
    memories["the root's gradients leave"] = memory(root, root, L, 2 * root, 0)
    return memories


def widths_of(config):
    """Return (C, F, V, the width of keys and values) of a config."""
    C, heads = config["hidden_size"], config["num_attention_heads"]
    kv = C // heads * config.get("num_key_value_heads", heads)
    return C, config["intermediate_size"], config["vocab_size"], kv


def parameters_of(config):
    """Count (blocks, parameters of a block, of head and last norm, of all modules outside blocks).
    """
    C, F, V, kv = widths_of(config)
    block = 2 * C * C + 2 * C * kv + 3 * C * F + 2 * C  # q and o; k and v; the MLP; two norms
    root = V * C + C + (0 if config.get("tie_word_embeddings") else V * C)
    return config["num_hidden_layers"], block, V * C + C, root


def activations_of(config, step):
    """Predict the bytes of activations on one rank.

    Returns: [at the loss, of a block until its backward, of its input with recomputation, of
        everything inside the block, of the gradients in its MLP].
    """
    C, F, V, kv = widths_of(config)
    width, tokens = step.width, step.micro_batch * step.n_ctx
    norm = (4 + 2 * width) * C  # of a token: its input in float32; normed; times the weight
    at_loss = norm + 3 * 4 * V  # log-probabilities, and two gradients, in float32
    inner_bytes = 2 * norm + 2 * width * (C + kv + 2 * F)  # q, k, v and the output; four of the MLP
    input_bytes, flowing = width * C * step.recompute, width * (C + 2 * F)
    kept_bytes = input_bytes or inner_bytes
    return [tokens * size for size in (at_loss, kept_bytes, input_bytes, inner_bytes, flowing)]


def predicted_costs(numbers, config, ranks):
    """Predict [bytes of parameters, of gradients, of the optimizer, sent in a step] of each rank.

    Rows, gradients and Adam's two moments are in float32. For each micro-batch parameters are
    gathered, the blocks' parameters twice, and gradients reduced; with hybrid sharding, gradients
    are also summed over the copies.
    numbers: of parameters: in the model, and in each of its blocks
    config: has batch, micro_batch, precision and shard_ranks (0 means all ranks)
    """
    model, *blocks = numbers
    S = config.shard_ranks or ranks
    copies, pieces = ranks // S, -(-config.batch // (ranks * config.micro_batch))
    gathered = (2 if config.precision == "bf16" else 4) * (model + sum(blocks))
    shard_bytes = (S - 1) / S * (gathered + 4 * model)
    copy_bytes = 2 * (copies - 1) / copies * 4 * model / S
    return [*(size * model / S for size in (4, 4, 8)), pieces * (shard_bytes + copy_bytes)]
