"""A Llama as transformers has it: made without memory, filled row by row, saved for everybody."""

import json
from importlib.util import find_spec
from pathlib import Path

import torch

from ranklab.models.initialise import normal_by_name

NO_TRANSFORMERS = ("transformers is not here. After pip install -c constraints.txt -e '.[hf]' this "
                   "runs: python -m ranklab.projects.fsdp")  # fmt: skip


def is_here():
    """True when transformers is installed; nothing is imported."""
    return find_spec("transformers") is not None


def on_meta(config, recompute):
    """The model of a transformers config, whose parameters have shapes and no numbers yet."""
    from transformers import AutoModelForCausalLM  # seconds, and only here

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32,
                                                 attn_implementation="sdpa")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_buffers(model, device):
    """What is no parameter, and so comes from no shard, is there: the angles of positions."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(device)


def rows_by_name(std):
    """For fill_shards: fresh weights. A parameter is whole for a moment, the model never."""
    def rows(name, shape, first, stop):
        whole = torch.ones(shape)  # norms stay so
        if len(shape) > 1:
            normal_by_name(whole, name, std)
        return whole[first:stop]
    return rows


def rows_in(folder):
    """For fill_shards: the weights of a Hugging Face folder, of which the rows alone are read.
    error  ValueError: a file is missing or not whole; a parameter is missing or of another shape
    """
    from safetensors import SafetensorError, safe_open

    folder, index = Path(folder), Path(folder, "model.safetensors.index.json")
    where = json.loads(index.read_text())["weight_map"] if index.exists() else {}

    def rows(name, shape, first, stop):
        path = folder / where.get(name, "model.safetensors")
        try:
            with safe_open(path, "pt") as file:
                part = file.get_slice(name)
                if tuple(part.get_shape()) != tuple(shape):
                    raise ValueError(f"{path}: {name} is {tuple(part.get_shape())} in it, and "
                                     f"{tuple(shape)} by config.json")
                return part[first:stop]
        except FileNotFoundError:
            raise ValueError(f"the weights are not whole: there is no {path}") from None
        except SafetensorError as error:
            raise ValueError(f"{path} has no whole {name}: {error}") from None
    return rows


def save_pretrained(folder, model, weights, tokenizer):
    """`folder` is one that from_pretrained loads, with the weights of a full_state_dict."""
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in model.named_parameters()]  # a tied matrix is stored once
    dtype = model.config.dtype or torch.float32
    save_file({name: weights[name].to(dtype).contiguous() for name in names},
              Path(folder, "model.safetensors"), {"format": "pt"})
    model.config.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
