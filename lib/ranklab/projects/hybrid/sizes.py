"""Three large GPTs, each with a layout for its GPUs: A100s of 80 GB, eight in a node."""

from ranklab.hybrid import Job, Layout
from ranklab.models.gpt import GPTConfig


def shape(n_layer, n_embd, n_head, vocab_size=50304):
    """The vocabularies are padded, so that eight tensor ranks divide them."""
    return GPTConfig(vocab_size, 2048, n_layer, n_head, n_embd, rotary_base=10000.0)


SIZES = {
    "10b": (Job(shape(32, 5120, 40), 512), Layout(1, 8, 1, True, recompute=True)),
    "100b": (Job(shape(80, 10240, 80), 1024), Layout(1, 8, 8, True, virtual=2, recompute=True)),
    "130b": (Job(shape(70, 12288, 96, 150528), 2048), Layout(1, 8, 16, True)),
}
