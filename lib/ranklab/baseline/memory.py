"""Where the memory of a training step goes, before anything is run."""

import torch

from ranklab.meter import SavedActivations


def model_state_bytes(n, recipe="mixed"):
    """Count the bytes of n parameters' state between two steps with Adam, in a dict by category.

    recipe: "fp32": everything in float32;
        "mixed": weights and gradients in bf16, float32 master weights counted as optimizer state;
        "bf16": everything in bf16, including Adam's moments.
    Paper: ZeRO, Rajbhandari et al. 2020, section 3.1: 16 bytes a parameter
    Lab: 01
    """
    width = {"fp32": 4, "mixed": 2, "bf16": 2}[recipe]  # of a weight, and of its gradient
    moments = 2 * (2 if recipe == "bf16" else 4)  # Adam keeps a mean and a mean square
    master = 4 if recipe == "mixed" else 0
    return {"parameters": width * n, "gradients": width * n, "optimizer": (moments + master) * n}


def activation_bytes(config, batch, seq, element=4, recompute=False):
    """Count the bytes that autograd keeps for backward after GPT(config)(inputs, targets).

    Exact for dropout=0 on CPU, in one dtype of `element` bytes, each storage counted once.
    recompute: True: blocks are checkpointed, and each keeps only its input.
    Lab: 01
    """
    C, H, tokens = config.n_embd, config.n_head, batch * seq
    norms = 2 * (C + 2) * element  # the input of each, and its mean and deviation
    attention = (1 + 3 + 1) * C * element  # input; q, k, v; output
    attention += 4 * H if config.flash else H * seq * element  # float32 log-sum, or the matrix
    mlp = (1 + 4 + 4) * C * element  # input; before and after GELU
    block = C * element if recompute else norms + attention + mlp
    return tokens * config.n_layer * block + ends_bytes(config, batch, seq, element)


def ends_bytes(config, batch, seq, element=4):
    """Count the part of activation_bytes outside the blocks: token ids, last norm, head, loss.

    The log-probabilities have V numbers a token: the largest tensor if the vocabulary is large.
    """
    C, V = config.n_embd, config.vocab_size
    ids = 2 * 8  # inputs and targets, int64
    norm_and_head = (C + 2 + C) * element
    return batch * seq * (ids + norm_and_head + V * element) + element  # the last: a count


def as_trained(model, recipe="mixed"):
    """Take one Adam step with `recipe`, so that all state exists; return (model, optimizer).

    The step uses made-up gradients; for "mixed" the master weights are kept by hand.
    """
    model = model.float() if recipe == "fp32" else model.bfloat16()
    weights = list(model.parameters())
    if recipe == "mixed":
        weights = [p.detach().float().requires_grad_() for p in weights]  # the master weights
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(weights)
    optimizer.step()
    if recipe == "mixed":
        for parameter, master in zip(model.parameters(), weights):
            master.grad = None  # the gradient lives in bf16, and is widened one at a time
            parameter.grad = torch.zeros_like(parameter)
    return model, optimizer


def live_activations(model, inputs, targets):
    """Record the bytes kept for backward during one step: (list in forward, list in backward)."""
    live_bytes, handles = [0], []

    def note(*_):
        live_bytes.append(saved.live_bytes)

    for module in model.blocks.modules():
        handles.append(module.register_forward_hook(note))
        handles.append(module.register_full_backward_hook(note))
    with SavedActivations(model) as saved:
        loss = model(inputs, targets)
        note()
        forward_ends = len(live_bytes)
        loss.backward()
        note()
    for handle in handles:
        handle.remove()
    return live_bytes[:forward_ends], live_bytes[forward_ends - 1 :]
