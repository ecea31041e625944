"""Context parallelism for transformers' Llama, from outside: by its attention interface."""


def context_llama(model, tokens):
    """`model`, a LlamaForCausalLM or one of its kin, whose attention meets the keys of all ranks.

    Returns forward(ids) -> logits of this rank's tokens: ids (B, T) are those of all ranks.
    tokens  a TokenShard
    """
    from transformers import AttentionInterface  # here: takes seconds

    def attend(module, q, k, v, mask, scaling=None, dropout=0.0, **kwargs):
        if dropout or scaling not in (None, q.shape[-1] ** -0.5):
            raise ValueError(f"dropout={dropout} and scaling={scaling}: ours has neither")
        return tokens.attend(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("ranklab_context", attend)
    model.set_attn_implementation("ranklab_context")

    def forward(ids):
        mine = tokens.look_at(ids.shape[1], ids.device)
        return model(ids[:, mine], position_ids=mine.expand(len(ids), -1), use_cache=False).logits

    return forward
