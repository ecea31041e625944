"""A Llama as transformers has it, made without memory."""

import torch

from ranklab.engine import device
from ranklab.projects.hugging_face import offline_transformers

NO_TRANSFORMERS = ("transformers is not here. After pip install -c constraints.txt -e '.[hf]' this "
                   "runs: python -m ranklab.projects.fsdp")  # fmt: skip
PRELOAD = ("transformers.trainer", "transformers.models.llama.modeling_llama")  # for launch


def on_meta(config, recompute):
    """The model of a transformers config; its parameters have shapes and no numbers yet."""
    with torch.device("meta"):
        model = offline_transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if recompute:
        model.activation_checkpointing_enable()  # by its default not a reentrant one
    return model


def make_buffers(model):
    """The angles of positions are there: no parameter, so they come from no shard."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(device())
