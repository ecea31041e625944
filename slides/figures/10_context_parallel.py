"""The figures of the deck 10_context_parallel.md."""
from ranklab.context_parallel.seconds import layer_seconds
from ranklab.context_parallel.shard import contiguous_shard, zigzag_shard
from ranklab.context_parallel.tiled import logits_memory, mlp_memory
from ranklab.formulas.context_parallel import attention_memory
from ranklab.plots import context_parallel as plots

LLAMA = {"n_head": 32, "n_kv_head": 8, "head_size": 128}  # Llama 3 8B


def uneven():
    return plots.masks({"a part in a row on each rank": contiguous_shard(8, 4)}), 7.4, 3.4


def zigzag():
    return plots.masks({"zigzag": zigzag_shard(8, 4)}), 7.4, 3.4


def length():
    lengths = [2**n for n in range(12, 21)]
    return plots.by_length(lengths, {
        "plain": [attention_memory(n, **LLAMA, keeps_scores=True) for n in lengths],
        "flash": [attention_memory(n, **LLAMA) for n in lengths],
        "flash, 8 ranks": [attention_memory(n, **LLAMA, ranks=8) for n in lengths],
    }, budget=80e9, title=""), 6.6, 2.9


def tiles():
    lengths = [2**n for n in range(12, 21)]
    whole = {"inputs of 32 layers": [32 * n * 4096 * 2 for n in lengths],
             "attention of a layer": [attention_memory(n, **LLAMA) for n in lengths],
             "MLP of a layer": [mlp_memory(n, 14336) for n in lengths],
             "logits and their gradient": [logits_memory(n, 128256) for n in lengths]}
    tiled = {"MLP of a layer": [mlp_memory(n, 14336, tile=4096) for n in lengths],
             "logits and their gradient": [logits_memory(n, 128256, tile=2048) for n in lengths]}
    return plots.held_by_length(lengths, whole, tiled, at=131_072, budget=80e9), 7.4, 3.0


def ranks():
    counts = [2, 4, 8, 16, 32, 64]
    fig = plots.by_ranks(counts, layer_seconds(131_072, **LLAMA, ranks=counts), title="")
    fig.axes[0].set_yticks([0.02, 0.05, 0.1, 0.2, 0.5])
    return fig, 6.6, 2.8
