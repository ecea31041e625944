"""The figures of the deck 08_tensor_parallel.md."""
from ranklab.models.gpt import GPTConfig
from ranklab.plots import tensor_parallel as plots
from ranklab.projects.tensor_parallel import links


def regions():
    return plots.regions(title=""), 6.2, 3.4


def outside():
    return plots.outside(title=""), 6.2, 2.4


def links_curves():
    shape = GPTConfig(vocab_size=128_256, n_ctx=1024, n_layer=32, n_head=32, n_embd=4096)
    ranks = (1, 2, 4, 8, 16, 32)
    return plots.curves(ranks, links.curves(shape, 8, ranks=ranks), ""), 6.2, 2.9
