"""Three large GPTs on A100s of 80 GB, eight in a node, each with a layout for them."""

from ranklab.hybrid import Job, Layout
from ranklab.models.gpt import GPTConfig


def shape(n_layer, n_embd, n_head, vocab_size=50304):
    """Vocabularies are padded, so that eight tensor ranks divide them."""
    return GPTConfig(vocab_size, 2048, n_layer, n_head, n_embd, rotary_base=10000.0)


SIZES = {  # name -> (Job, Layout): 8, 64 and 128 GPUs
    "10b": (Job(shape(32, 5120, 40), 512),
            Layout(2, 2, 2, sequence_parallel=True, virtual=2, zero=1)),
    "100b": (Job(shape(80, 10240, 80), 1024),
             Layout(2, 4, 8, virtual=2, zero=1, recompute=True)),
    # GLM-130B's shape
    "130b": (Job(shape(70, 12288, 96, vocab_size=150528), 2048),
             Layout(1, 8, 16, sequence_parallel=True)),
}
