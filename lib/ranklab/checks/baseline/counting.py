"""Checks of the formulas: each against what torch counts in a real step."""

from numbers import Real

import torch
from torch.utils.flop_counter import FlopCounterMode

from ranklab.baseline.checkpointing import checkpoint_blocks
from ranklab.baseline.memory import as_trained, ends_bytes
from ranklab.checks.exercise import Mistake
from ranklab.meter import SavedActivations, memory_of
from ranklab.models.gpt import GPT, GPTConfig, count_parameters

# Three heads, as two would be the two products of attention or two numbers for each token; and
# not as many layers in both.
TINY = GPTConfig(vocab_size=101, n_ctx=24, n_layer=3, n_head=3, n_embd=48)
WIDE = GPTConfig(vocab_size=256, n_ctx=64, n_layer=2, n_head=3, n_embd=96)


def counted_flops(config, batch, seq, backward=True):
    """What torch's counter sees. On meta tensors: on CPU ones it counts attention as nothing."""
    with torch.device("meta"):
        model, tokens = GPT(config), torch.zeros(batch, seq, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, tokens)
            if backward:
                loss.backward()
    return counter.get_total_flops()


def check_transformer_flops(transformer_flops):
    cases = [(TINY, 1, 24), (TINY, 5, 17), (WIDE, 2, 64)]
    for case in cases:
        got = _number(transformer_flops(*case, backward=False), "the FLOPs")
        right = counted_flops(*case, backward=False)
        if got != right:
            raise Mistake(f"forward of {_say(*case)}: {got:,} FLOPs; torch counts {right:,}",
                          _flops_hint(*case, got, right))
    yield "forward: equal to torch's counter, for two models and three shapes of batch"
    for case in cases:
        got, right = _number(transformer_flops(*case), "the FLOPs"), counted_flops(*case)
        if got != right:
            forward = counted_flops(*case, backward=False)
            hint = {forward: "That is the forward alone. The default is a whole step.",
                    2 * forward: "Backward costs twice the forward: each product needs one for the "
                                 "gradient of its input and one for that of its weight."}
            raise Mistake(f"step of {_say(*case)}: {got:,} FLOPs; torch counts {right:,}",
                          hint.get(got, "Forward was right: how many forwards is a backward?"))
    yield "forward and backward: equal, too"


def _number(got, what):
    if isinstance(got, bool) or not isinstance(got, Real):
        raise Mistake(f"it returned {got!r}", f"Return {what}, as a number.")
    return got


def _say(config, batch, seq):
    return f"{config.n_layer} layers, C={config.n_embd}, batch {batch} x {seq} tokens"


def _flops_hint(config, batch, seq, got, right):
    C, V, L, tokens = config.n_embd, config.vocab_size, config.n_layer, batch * seq
    attention, head = 4 * tokens * seq * C * L, 2 * tokens * C * V
    slips = {
        right / 2: "A multiply and an add are two FLOPs: an (m, k) @ (k, n) product costs 2 m k n.",
        3 * right: "That is forward and backward. With backward=False, count the forward alone.",
        right - attention: "Attention's own two products are missing: q @ k and probability @ v. "
                           "They have no weights, and grow with the square of the sequence.",
        right - attention / 2: "You count half of attention. Count the masked half too, as torch's "
                               "counter and most papers do; and there are two products, q @ k "
                               "and probability @ v.",
        (right - head) / L + head: "That is one layer: multiply by config.n_layer.",
        right + (L - 1) * head: "The head is there once, not in each layer.",
        right - head: "The head is missing: C x V for each token.",
        right + head: "Looking up an embedding multiplies nothing; only the head costs C x V.",
        right / batch: "You count one sequence: multiply by the batch.",
        right - attention + attention * config.n_ctx / seq:
            "Attention's products are as long as this batch, `seq`, not as config.n_ctx.",
        right + attention * (config.n_head - 1):
            "The heads share C: H heads of size C/H cost together what one of size C costs.",
    }  # fmt: skip
    return slips.get(got, "Go through it product by product: q, k, v, out; q @ k, probability @ v; "
                          "the MLP's two; the head.")


def check_mfu(mfu):
    for config, speed, peak, devices in ((WIDE, 1e6, 1e13, 1), (TINY, 3e7, 312e12, 8)):
        flops = counted_flops(config, 1, config.n_ctx) / config.n_ctx
        right = flops * speed / peak / devices
        got = _number(mfu(config, speed, peak, devices), "the fraction")
        slips = {100 * right: "A fraction is wanted, not per cent.",
                 right * devices: "The peak of all devices together is devices x peak_flops, and "
                                  "tokens_per_second is of all of them already.",
                 right * 4 / 3: "What is computed twice to save memory does not count as work.",
                 right * devices**2: "`/ peak_flops * devices` multiplies by devices. Divide by "
                                     "both: / (peak_flops * devices).",
                 right / 3: "Training is forward and backward: three forwards.",
                 right * config.n_ctx: "FLOPs per token, not per sequence of n_ctx tokens.",
                 6 * count_parameters(config) * speed / peak / devices:
                     "6 N leaves attention out. Use transformer_flops, which counts it."}
        if not _close(got, right):
            hint = next((h for value, h in slips.items() if _close(got, value)),
                        "FLOPs per token x tokens per second / peak FLOP/s.")
            raise Mistake(f"{speed:g} tokens/s on {devices} devices of {peak:g} FLOP/s: "
                          f"{got:.6g}; right is {right:.6g}", hint)  # fmt: skip
    yield "right for one device and for eight, from the FLOPs that torch counts"


def _close(a, b):
    return abs(a - b) <= 1e-9 * abs(b)


STATE_HINTS = {
    "parameters": "A weight takes 4 bytes in float32 and 2 in bf16.",
    "gradients": "A gradient is as wide as its weight: 2 bytes in bf16, 4 in float32.",
    "optimizer": "Adam keeps two numbers for each parameter, a mean and a mean square: in float32, "
                 "except for the recipe bf16. And mixed precision keeps float32 master weights, "
                 "4 bytes more: a bf16 weight is too coarse to add small steps to.",
}


def check_model_state_bytes(model_state_bytes):
    for recipe in ("fp32", "mixed", "bf16"):
        model, optimizer = as_trained(GPT(TINY), recipe)
        memory, n = memory_of(model, optimizer), count_parameters(TINY)
        steps = 4 * len(list(model.parameters()))  # Adam also counts its steps: 4 bytes a tensor
        right = {"parameters": memory.parameters, "gradients": memory.gradients,
                 "optimizer": memory.optimizer_state - steps}
        got = model_state_bytes(n, recipe)
        if not isinstance(got, dict) or set(got) != set(right):
            raise Mistake(f"it returned {got}", f"Return a dict with the keys {', '.join(right)}.")
        for name, wanted in right.items():
            if got[name] != wanted:
                what = (f"{recipe}, {name}: {got[name] / n:g} bytes a parameter; "
                        f"counted after a step: {wanted / n:g}")
                hint = STATE_HINTS[name]
                if got[name] * n == wanted:
                    hint = "That is for one parameter: multiply by n."
                elif got[name] == 8 * wanted:
                    hint = "These are bits; a byte has 8. " + hint
                if name == "parameters" and got[name] == wanted + 4 * n:
                    hint = "The float32 master weights belong to the optimizer."
                raise Mistake(what, hint)
        each = sum(right.values()) // n
        yield f"{recipe}: {each} bytes a parameter, as counted after a real Adam step"


def counted_activations(config, batch, seq, dtype, recompute=False):
    model = GPT(config).to(dtype)
    model = checkpoint_blocks(model) if recompute else model
    inputs, targets = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
    with SavedActivations(model) as saved:
        model(inputs, targets)
    return saved.bytes


def check_activation_bytes(activation_bytes):
    for flash in (True, False):
        for batch, seq, dtype in ((2, 24, torch.float32), (3, 17, torch.float32),
                                  (2, 20, torch.bfloat16)):
            _compare_activations(activation_bytes, flash, batch, seq, dtype)
        kind = "flash attention" if flash else "plain attention"
        yield f"{kind}: every byte that autograd saves; three shapes, float32 and bf16"
    for flash in (True, False):
        for batch, seq, dtype in ((2, 20, torch.float32), (3, 17, torch.bfloat16)):
            _compare_recomputed(activation_bytes, flash, batch, seq, dtype)
    yield "recompute=True: a block keeps its input and nothing else; the ends keep all they did"


def _compare_recomputed(activation_bytes, flash, batch, seq, dtype):
    configs, e = [_layers(TINY, n, flash) for n in (3, 4)], dtype.itemsize
    right = [counted_activations(c, batch, seq, dtype, recompute=True) for c in configs]
    got = [_number(activation_bytes(c, batch, seq, e, recompute=True), "the bytes")
           for c in configs]
    case = f"recompute=True, batch {batch} x {seq}, {e} bytes a number"
    if got[1] - got[0] != right[1] - right[0]:
        raise Mistake(f"{case}: a block keeps {got[1] - got[0]:,} bytes; counted "
                      f"{right[1] - right[0]:,}",
                      "A checkpointed block keeps one tensor, its input, of C numbers a token, of "
                      "`element` bytes each; it computes all others again.")
    if got[1] != right[1]:
        raise Mistake(f"{case}, 4 layers: {got[1]:,} bytes; counted {right[1]:,}",
                      "The blocks are right. Embedding, head and loss are not checkpointed: add "
                      "ends_bytes(config, batch, seq, element) here too, and nothing else.")


def _layers(config, n, flash):
    fields = {**vars(config), "n_layer": n, "flash": flash}
    return GPTConfig(**fields)


def _compare_activations(activation_bytes, flash, batch, seq, dtype):
    e, tokens, C, H = dtype.itemsize, batch * seq, TINY.n_embd, TINY.n_head
    one, two = _layers(TINY, 1, flash), _layers(TINY, 2, flash)
    right1, right2 = (counted_activations(c, batch, seq, dtype) for c in (one, two))
    got1, got2 = (_number(activation_bytes(c, batch, seq, e), "the bytes") for c in (one, two))
    case = f"{'flash' if flash else 'plain'}, batch {batch} x {seq}, {e} bytes a number"
    block, wanted = (got2 - got1) / tokens, (right2 - right1) / tokens
    if block != wanted:
        factor = wanted / block if block else 0
        forgotten = {0: "Two layers keep as much as one: multiply by config.n_layer.",
                     tokens: "That is one token: multiply by batch * seq.",
                     batch: "That is one sequence: multiply by the batch."}
        raise Mistake(f"{case}: a block keeps {block:g} bytes a token; counted {wanted:g}",
                      forgotten.get(factor) or _ends_in_blocks(block - wanted, batch, seq, e)
                      or _block_hint(block - wanted, C, H, seq, e, flash))
    if got1 != right1:
        hint = ("The blocks are right. Add ends_bytes(config, batch, seq, element) once, for what "
                "lies before the first block and after the last.")
        if got1 - right1 == ends_bytes(one, batch, seq, 4) - ends_bytes(one, batch, seq, e):
            hint = "Give ends_bytes your `element` too: without it, it counts 4 bytes a number."
        raise Mistake(f"{case}, 1 layer: {got1:,} bytes; counted {right1:,}", hint)


def _ends_in_blocks(excess, batch, seq, e):
    if round(excess * batch * seq) == ends_bytes(TINY, batch, seq, e):
        return "Add ends_bytes(...) once, after multiplying by the layers, not in each layer."
    return ""


def _block_hint(excess, C, H, seq, e, flash):
    width, matrix, stats, log_sum = C * e, H * seq * e, 4 * e, 4 * H
    slips = {
        width: "The attention output is one tensor: the attention kernel and `out` share it.",
        2 * width: "q, k and v read the same input, and autograd keeps it once.",
        -3 * width: "The attention kernel keeps q, k and v for its backward: 3 C a token.",
        -4 * width: "GELU keeps its input, 4 C wide, and `down` keeps GELU's output, 4 C more.",
        -2 * width: "Each of the two norms keeps its own input for backward, C wide.",
        -stats: "A norm also keeps a mean and a deviation for each token: 2 numbers, two norms.",
        -stats / 2: "There are two norms, and each keeps 2 numbers for a token besides its input.",
        -width - stats / 2: "A block has two norms, and each keeps its input and 2 numbers.",
    }
    if flash:
        slips[matrix] = "Flash attention never stores its (T, T) matrix: it has log-sums instead."
        slips[-log_sum] = "Flash attention keeps one float32 log-sum for each head and token."
        slips[matrix - log_sum] = ("config.flash is True here: log-sums, and no (T, T) matrix. Are "
                                   "the two branches swapped?")
        slips[H * e - log_sum] = "The log-sums are float32, 4 bytes each, in a bf16 model too."
    else:
        slips[matrix] = "softmax needs its output only; the scores before it are not kept."
        slips[matrix - log_sum] = slips[matrix]
        slips[-matrix] = "Plain attention keeps its (T, T) matrix for each head: H x seq a token."
        slips[log_sum - matrix] = slips[-matrix]
        longest = H * TINY.n_ctx * e
        slips[longest - matrix] = "The (T, T) matrix is as long as this batch, not config.n_ctx."
    few = "too few" if excess < 0 else "too many"
    return slips.get(excess, f"That is {abs(excess) / width:.3g} x C numbers {few}. Go through the "
                             "table above, line by line.")
