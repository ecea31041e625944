"""transformers' Llama, and models with its names, with our tensor and context parallelism."""

import re

from torch import nn

from ranklab.basics.targets import IGNORE
from ranklab.tensor_parallel.dropout import own_random_in
from ranklab.tensor_parallel.plan import (
    TPConfig, entering, inner_column, logits, row, tensor_parallel, vocabulary,
)
from ranklab.tensor_parallel.regions import identity
from ranklab.tensor_parallel.vocabulary import vocab_parallel_loss

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}  # {ours: transformers'}


def llama_heads(module, config):
    """Split attention that has transformers' names, so that each rank has some of the heads.

    parallel_attention changes a module that holds the four linears under our names. They are then
    put back, and x enters the region before the attention module itself.
    """
    linears = nn.ModuleDict({name: getattr(module, llama_name)
                             for name, llama_name in NAMES.items()})
    linears.head_size = module.head_dim
    config.attention(linears, config.group, identity, config.leave)
    for name, llama_name in NAMES.items():
        setattr(module, llama_name, getattr(linears, name))
    if config.dropout_seed is not None:
        own_random_in(module, config.dropout_seed)
    return entering(module, config)


LLAMA_PLAN = {
    "model.embed_tokens": vocabulary,
    "model.layers.*.self_attn": llama_heads,
    "model.layers.*.mlp": entering,
    "model.layers.*.mlp.gate_proj": inner_column,
    "model.layers.*.mlp.up_proj": inner_column,
    "model.layers.*.mlp.down_proj": row,
    "lm_head": logits,
}


def parallel_llama(model, config=TPConfig()):
    """Split transformers' LlamaForCausalLM over the group; its loss shifts the labels by one.

    Models with the same names work as well: Qwen2, Mistral.
    Raises: ValueError for sequence_parallel, because Llama counts positions in the tokens it is
        given; and for a parameter in a region that is not in the plan, because each rank would
        train it separately.
    """
    if config.sequence_parallel:
        raise ValueError("transformers' Llama counts positions in the tokens that it is given: "
                         "without sequence_parallel")
    refuse_unknown(model)
    tensor_parallel(model, LLAMA_PLAN, config)
    for layer in model.model.layers:
        attention = layer.self_attn
        D = attention.head_dim
        q, k = (len(part.weight) // D for part in (attention.q_proj, attention.k_proj))
        k = q if getattr(attention.k_proj, "repeats", None) else k
        attention.num_key_value_groups = q // k
    model.loss_function = shifted_loss(config)
    return model


def refuse_unknown(model):
    """Raise ValueError for a parameter that Llama's attention and MLP do not have."""
    for name, parameter in model.named_parameters():
        inside = re.fullmatch(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(.+)", name)
        if inside and not re.fullmatch(r"([qkvo]|gate|up|down)_proj\.(weight|bias)", inside[1]):
            raise ValueError(f"{name}, {tuple(parameter.shape)}, is inside of a region, and "
                             "LLAMA_PLAN does not say what each rank has of it")


def shifted_loss(config):
    """Return LlamaForCausalLM's loss_function: (logits, labels, vocab_size) -> the mean."""

    def loss(logits, labels, vocab_size, **_):
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        mean_of = vocab_parallel_loss(vocab_size, config.group, config.cross_entropy)
        return mean_of(nn.Identity(), logits, shifted)  # Llama has called its head

    return loss


# --- context parallelism, through its attention interface -----------------------------------------

def context_llama(model, tokens):
    """Let the attention of a LlamaForCausalLM, or a similar model, use the keys of all ranks.

    tokens: a TokenShard
    Returns: forward(ids) -> logits of this rank's tokens; ids (B, T) are the tokens of all ranks.
    """
    from transformers import AttentionInterface  # here: takes seconds

    def attend(module, q, k, v, mask, scaling=None, dropout=0.0, **kwargs):
        if dropout or scaling not in (None, q.shape[-1] ** -0.5):
            raise ValueError(f"dropout={dropout} and scaling={scaling}: ours has neither")
        return tokens.attend(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("ranklab_context", attend)
    model.set_attn_implementation("ranklab_context")

    def forward(ids):
        positions = tokens.set_visible(ids.shape[1], ids.device)
        return model(ids[:, positions], position_ids=positions.expand(len(ids), -1),
                     use_cache=False).logits

    return forward
