"""transformers' Llama, and models with the same names, over the ranks of a group."""

import re

from torch import nn

from ranklab.models.gpt import IGNORE
from ranklab.tensor_parallel.plan import (
    TPConfig, entering, head_norm, heads, inner_column, logits, matches, row, tensor_parallel,
    vocabulary,
)
from ranklab.tensor_parallel.vocabulary import vocab_parallel_loss

LLAMA_PLAN = {
    "model.embed_tokens": vocabulary,
    "model.layers.*.self_attn": heads("q_proj", "k_proj", "v_proj", "o_proj", "head_dim"),
    "model.layers.*.self_attn.[qk]_norm": head_norm,  # Qwen3 has them
    "model.layers.*.mlp": entering,
    "model.layers.*.mlp.gate_proj": inner_column,
    "model.layers.*.mlp.up_proj": inner_column,
    "model.layers.*.mlp.down_proj": row,
    "lm_head": logits,
}


def parallel_llama(model, how=TPConfig()):
    """transformers' LlamaForCausalLM over the group; its loss is that of the labels one place on.

    Models with the same names are split as well: Qwen2, Qwen3, Mistral.
    error  ValueError for sequence_parallel: Llama takes positions from what it has; and for a
           parameter in a region that the plan does not know: each rank would learn it by itself
    """
    if how.sequence_parallel:
        raise ValueError("transformers' Llama counts positions in the tokens that it is given: "
                         "without sequence_parallel")
    refuse_unknown(model)
    tensor_parallel(model, {pattern: style for pattern, style in LLAMA_PLAN.items()
                            if style is not head_norm or matches(model, pattern)}, how)
    for layer in model.model.layers:
        attention = layer.self_attn
        D = attention.head_dim
        q, k = (len(part.weight) // D for part in (attention.q_proj, attention.k_proj))
        k = q if getattr(attention.k_proj, "repeats", None) else k
        attention.num_key_value_groups = q // k
    model.loss_function = shifted_loss(how)
    return model


def refuse_unknown(model):
    """Raises ValueError for a parameter that Llama's regions do not have, but for norms of a head.
    """
    for name, parameter in model.named_parameters():
        inside = re.fullmatch(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(.+)", name)
        if not inside or re.fullmatch(r"([qkvo]|gate|up|down)_proj\.(weight|bias)", inside[1]):
            continue
        head_size = model.model.layers[0].self_attn.head_dim
        if inside[1] not in ("q_norm.weight", "k_norm.weight") or parameter.shape != (head_size,):
            raise ValueError(f"{name}, {tuple(parameter.shape)}, is inside of a region, and "
                             "LLAMA_PLAN does not say what each rank has of it")


def shifted_loss(how):
    """What LlamaForCausalLM's loss_function is: (logits, labels, vocab_size) -> the mean."""

    def loss(logits, labels, vocab_size, **_):
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        mean_of = vocab_parallel_loss(vocab_size, how.group, how.cross_entropy)
        return mean_of(nn.Identity(), logits, shifted)  # Llama has called its head

    return loss
