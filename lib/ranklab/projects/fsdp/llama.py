"""A Llama as transformers has it, made without memory, and filled when it is in shards."""

from pathlib import Path

import torch

from ranklab.data.instructions import Bytes
from ranklab.engine import device
from ranklab.fsdp.pretrained import rows_by_name, rows_in
from ranklab.projects.hugging_face import offline_transformers

PRELOAD = ("transformers.trainer", "transformers.models.llama.modeling_llama")  # for launch


def on_meta(shape, folder, recompute):
    """(the model, whose parameters have shapes and no numbers yet; its tokenizer; its rows, as
    fill_shards takes them): those of a Hugging Face folder, or of this shape, fresh.
    """
    transformers = offline_transformers()
    config, tokenizer = transformers.LlamaConfig(**shape), Bytes()
    rows = rows_by_name(config.initializer_range)
    if folder:
        config, rows = transformers.AutoConfig.from_pretrained(folder), rows_in(folder)
        if any(Path(folder).glob("tokenizer*")):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if recompute:
        model.activation_checkpointing_enable()  # by its default not a reentrant one
    return model, tokenizer, rows


def make_buffers(model):
    """The angles of positions are there: no parameter, so they come from no shard."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(device())
