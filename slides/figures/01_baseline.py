"""The figures of the deck 01_baseline.md."""
import torch

from ranklab import baseline, hardware
from ranklab.baseline.memory import live_activations
from ranklab.baseline.roofline import block_operations, decode_operation
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.plots import baseline as plots
from ranklab.projects import baseline as project

torch.set_num_threads(1)
torch.manual_seed(0)
shape = dict(vocab_size=50304, n_ctx=1024, n_layer=24, n_head=16, n_embd=1024)
flash, plain = GPTConfig(**shape), GPTConfig(**shape, flash=False)


def hierarchy():
    return plots.hierarchy(hardware.H100), 5.75, 2.4


def _kept(config, recompute=False):
    ends = baseline.ends_bytes(config, 8, 1024, 2)
    return [baseline.activation_bytes(config, 8, 1024, 2, recompute) - ends, ends]


def activations():
    bars = {"plain attention": _kept(plain), "flash": _kept(flash),
            "flash, recomputed": _kept(flash, True)}
    return plots.activations(bars, ["24 blocks", "embedding, head, loss"],
                             "GPT-2 medium, 8 x 1024 tokens, bf16"), 5.75, 2.4


def roofline():
    operations = block_operations(flash, 8, 1024) + [decode_operation(flash, 1)]
    return plots.roofline(operations, hardware.H100), 5.9, 2.6


def comb():
    tokens = [torch.zeros(8, 64, dtype=torch.long) for _ in range(2)]
    deep = GPTConfig(n_layer=6)
    recomputed = baseline.checkpoint_blocks(GPT(deep))
    return plots.live_bytes({"all kept": live_activations(GPT(deep), *tokens),
                             "blocks recomputed": live_activations(recomputed, *tokens)}), 5.75, 2.4


def memory():
    found = project.run(steps=2, batch=4, micro_batch=4, eval_batch=8, log_every=1, progress=False)
    return plots.memory(found["memory"], "Memory of the lab's GPT, 4 sequences"), 5.75, 2.4
