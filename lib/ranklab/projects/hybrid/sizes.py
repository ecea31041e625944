"""Three large GPTs on A100s of 80 GB, eight in a node, each with a layout; and what others ran."""

from dataclasses import replace

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

PUBLISHED = {  # name -> (Job, Layout, GB of a GPU), as GPTs: 12 C^2 numbers in a block, a tied head
    # BigScience's tr11-176B-ml.slurm; a GPU held 60 GB (bigscience.notion.site, "176B Model")
    "BLOOM 176B": (Job(shape(70, 14336, 112, 250880), 2048, 2),
                   Layout(8, 4, 12, zero=1, recompute=True), 80),
    # arXiv 2210.02414, 2.3: blocks computed again, fp16. ZeRO-1 is our guess: without any, states
    # alone would take 20 bytes x 4.1e9 = 82 GB
    "GLM-130B": (Job(shape(70, 12288, 96, 150528), 4224, 1, "fp16"),
                 Layout(24, 4, 8, zero=1, recompute=True), 40),
    # arXiv 2407.21783, table 4 and 3.3.2: FSDP shards gradients, too, which a Layout can't say
    "Llama 3 405B": (Job(replace(shape(126, 16384, 128, 128256), n_ctx=8192), 2048),
                     Layout(64, 8, 16, sequence_parallel=True, zero=1), 80),
}
