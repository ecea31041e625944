"""Lab 01's checks: counting FLOPs and bytes, accumulating, recomputing, scaling.

    counting.py              formulas against what torch counts
    accumulate_gradients.py  a big batch in pieces against the batch in one piece
    checkpointed.py          checkpointed layers against plain ones
    frugal_gradients.py      the smallest peak for a given step
    scale_loss.py            loss scaling against torch.amp.GradScaler
    numbers.py               the predictions
"""

from ranklab import baseline
from ranklab.checks.baseline.accumulate_gradients import check_accumulate_gradients
from ranklab.checks.baseline.checkpointed import check_checkpointed
from ranklab.checks.baseline.counting import (
    check_activation_bytes,
    check_mfu,
    check_model_state_bytes,
    check_transformer_flops,
)
from ranklab.checks.baseline.frugal_gradients import check_frugal_gradients
from ranklab.checks.baseline.numbers import PREDICTIONS
from ranklab.checks.baseline.scale_loss import check_scale_loss
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(baseline.transformer_flops, check_transformer_flops, hints=(
        "List the matrix products of one block: six with weights, two without.",
        "An (m, k) @ (k, n) product costs 2 m k n. Per token, weights cost 2 x 12 C^2, and "
        "attention's two products 2 x 2 seq C; the head costs 2 C V once.",
        "forward = 2 * batch * seq * (n_layer * (12 C^2 + 2 seq C) + C V); a step is 3 of it.")),
    Exercise(baseline.mfu, check_mfu, hints=(
        "How many FLOPs does a token cost, and how many could the devices do in that time?",
        "transformer_flops(config, 1, config.n_ctx) is for n_ctx tokens.",
        "flops_per_token * tokens_per_second / (peak_flops * devices)")),
    Exercise(baseline.model_state_bytes, check_model_state_bytes, hints=(
        "Four things live as long as the run: weights, gradients, Adam's two moments, and perhaps "
        "a master copy of the weights.",
        "mixed: 2 + 2 bytes in bf16, and 4 + 4 + 4 in float32 with the optimizer.",
        '"fp32": 4, 4, 8; "mixed": 2, 2, 12; "bf16": 2, 2, 4 bytes a parameter.')),
    Exercise(baseline.activation_bytes, check_activation_bytes, hints=(
        "A linear layer keeps its input. GELU keeps its input. Which of them share one tensor?",
        "In units of C numbers a token: the norms 2, attention 1 + 3 + 1, the MLP 1 + 4 + 4. Then "
        "2 numbers for each norm, and the log-sums or the matrix of attention.",
        "block = (16 C + 4) * element + (4 H if flash else H * seq * element); recompute: "
        "C * element. Times tokens and layers, plus ends_bytes(...).")),
    Exercise(baseline.accumulate_gradients, check_accumulate_gradients, hints=(
        "backward() adds to .grad. What must each piece's loss be divided by, so that the sum of "
        "gradients is the gradient of the mean?",
        "Divide all pieces by the same number: how many targets of the whole batch are not "
        "IGNORE.",
        "for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)): loss = "
        "loss_sum(x, y) / count; loss.backward(); add up loss.detach().")),
    Exercise(baseline.checkpointed, check_checkpointed, hints=(
        "backward gets the gradients of the outputs. What has to exist again before it can use "
        "them?",
        "Detach the inputs, run function on them with autograd on and the old random state, then "
        "torch.autograd.backward.",
        "leaves = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]; outputs "
        "= function(*leaves) inside torch.enable_grad() and random_replayed(ctx.random); "
        "torch.autograd.backward(outputs, gradients); return tuple(x.grad for x in leaves).")),
    Exercise(baseline.frugal_gradients, check_frugal_gradients, hints=(
        "Three things are large in a plain step: the activations of all rows, the activations of "
        "all blocks, and the logits. Each has a cure: one row at a time, blocks that run again, "
        "the loss in pieces.",
        "One row at a time, through accumulate_gradients or a loop of your own. Blocks: "
        "checkpoint_blocks, or call them without autograd and keep their inputs. The loss: model."
        "loss(model.head, hidden, targets, \"sum\") for some tokens at a time.",
        "For each row, under torch.no_grad(): hidden = [model.token(x)], and block(hidden[-1]) for "
        "each block. Then the loss of 16 tokens at a time, / count, backward() at once, on "
        "h.detach().requires_grad_(); h.grad is what goes on. Then from the last block to the "
        "first: h = hidden.pop().requires_grad_(); block(h).backward(gradient); gradient = h.grad. "
        "At the end model.token(x).backward(gradient), if model.token.weight.requires_grad.")),
    Exercise(baseline.scale_loss, check_scale_loss, hints=(
        "Three things can happen: a gradient overflows; a clean step; the last of `interval` clean "
        "steps.",
        "Overflow: no step, half the scale, clean_steps 0. Clean: divide the gradients by the "
        "scale, step, count; after `interval` in a row double the scale and count from 0.",
        "if not all(g.isfinite().all() for g in gradients): return "
        "state._replace(scale=state.scale / 2, clean_steps=0)")),
)  # fmt: skip
