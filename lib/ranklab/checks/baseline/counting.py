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


def _number(got, what):
    if isinstance(got, bool) or not isinstance(got, Real):
        raise Mistake(f"it returned {got!r}", f"Return {what}, as a number.")
    return got


def _compare(case, got, counted, unit, mistakes, hint):
    """Returns when `got` is what was counted; mistakes: {wrong number: hint about it}."""
    if not _close(got, counted):
        hint = next((h for wrong, h in mistakes.items() if _close(got, wrong)), hint)
        raise Mistake(f"{case} {got:,.10g} {unit}; counted {counted:,.10g}", hint)


def _close(a, b):
    return abs(a - b) <= 1e-9 * abs(b)


def check_transformer_flops(transformer_flops):
    cases = [(TINY, 1, 24), (TINY, 5, 17), (WIDE, 2, 64)]
    for case in cases:
        got = _number(transformer_flops(*case, backward=False), "the FLOPs")
        right = counted_flops(*case, backward=False)
        _compare(f"forward of {_say(*case)}:", got, right, "FLOPs", _flops_slips(*case, right),
                 "Go through it product by product: q, k, v, out; q @ k, probability @ v; the "
                 "MLP's two; the head.")
    yield "forward: equal to torch's counter, for two models and three shapes of batch"
    for case in cases:
        got, right = _number(transformer_flops(*case), "the FLOPs"), counted_flops(*case)
        forward = counted_flops(*case, backward=False)
        mistakes = {forward: "That is forward alone. The default is a whole step.",
                 2 * forward: "Backward costs twice the forward: each product needs one for the "
                              "gradient of its input and one for that of its weight."}
        _compare(f"step of {_say(*case)}:", got, right, "FLOPs", mistakes,
                 "Forward was right: how many forwards is a backward?")
    yield "forward and backward: equal too"


def _say(config, batch, seq):
    return f"{config.n_layer} layers, C={config.n_embd}, batch {batch} x {seq} tokens"


def _flops_slips(config, batch, seq, right):
    C, V, L, tokens = config.n_embd, config.vocab_size, config.n_layer, batch * seq
    attention, head = 4 * tokens * seq * C * L, 2 * tokens * C * V
    return {
        right / 2: "A multiply and an add are two FLOPs: an (m, k) @ (k, n) product costs 2 m k n.",
        3 * right: "That is forward and backward. With backward=False, count only forward.",
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
            "The heads share C: together, H heads of size C/H cost as much as one head of size C.",
    }  # fmt: skip


def check_mfu(mfu):
    for config, speed, peak, devices in ((WIDE, 1e6, 1e13, 1), (TINY, 3e7, 312e12, 8)):
        flops = counted_flops(config, 1, config.n_ctx) / config.n_ctx
        right = flops * speed / peak / devices
        mistakes = {
            100 * right: "Return a fraction, not per cent.",
            right * devices: "The peak of all devices together is devices x peak_flops, and "
                             "tokens_per_second already counts all devices.",
            right * 4 / 3: "If you compute something twice to save memory, count it once.",
            right * devices**2: "`/ peak_flops * devices` multiplies by devices. Divide by both: "
                                "/ (peak_flops * devices).",
            right / 3: "Training is forward and backward: three forwards.",
            right * config.n_ctx: "FLOPs per token, not per sequence of n_ctx tokens.",
            6 * count_parameters(config) * speed / peak / devices:
                "6 N leaves attention out. Use transformer_flops, which counts it.",
        }  # fmt: skip
        got = _number(mfu(config, speed, peak, devices), "the fraction")
        _compare(f"{speed:g} tokens/s on {devices} devices of {peak:g} FLOP/s:", got, right,
                 "of the peak", mistakes, "FLOPs per token x tokens per second / peak FLOP/s.")
    yield "right for one device and for eight, from the FLOPs that torch counts"


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
        for name, counted in right.items():
            each = counted / n
            mistakes = {each / n: "That is for one parameter: multiply by n.",
                     8 * each: f"These are bits; a byte has 8. {STATE_HINTS[name]}"}
            if name == "parameters":
                mistakes[each + 4] = "The float32 master weights belong to the optimizer."
            _compare(f"{recipe}, {name}:", got[name] / n, each, "bytes a parameter", mistakes,
                     STATE_HINTS[name])
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
            _compare_activations(activation_bytes, flash, batch, seq, dtype, recompute=True)
    yield "recompute=True: a block keeps only its input; the ends keep the same as before"


def _compare_activations(activation_bytes, flash, batch, seq, dtype, **recompute):
    """Of two depths: the difference is what a block keeps, and the rest is what the ends keep."""
    e, tokens = dtype.itemsize, batch * seq
    configs = [GPTConfig(**{**vars(TINY), "n_layer": n, "flash": flash}) for n in (3, 4)]
    right = [counted_activations(c, batch, seq, dtype, **recompute) for c in configs]
    got = [_number(activation_bytes(c, batch, seq, e, **recompute), "the bytes") for c in configs]
    case = f"{'flash' if flash else 'plain'}, batch {batch} x {seq}, {e} bytes a number"
    block, counted = ((four - three) / tokens for three, four in (got, right))
    excess = (block - counted) / (TINY.n_embd * e)
    hints = (f"That is {abs(excess):.3g} x C numbers too {'few' if excess < 0 else 'many'}. Go "
             "through the table above, line by line.",
             "The blocks are right. Add ends_bytes(config, batch, seq, element) once, for what "
             "lies before the first block and after the last.")
    if recompute:
        case = f"recompute=True, {case}"
        hints = ("A checkpointed block keeps one tensor, its input, of C numbers a token, of "
                 "`element` bytes each; it computes all others again.",
                 "The blocks are right. Embedding, head and loss are not checkpointed: add "
                 "ends_bytes(config, batch, seq, element) here too, and nothing else.")
    mistakes = {} if recompute else _block_slips(counted, batch, seq, e, flash)
    _compare(f"{case}: a block keeps", block, counted, "bytes a token", mistakes, hints[0])
    ends, float_ends = (ends_bytes(TINY, batch, seq, width) for width in (e, 4))
    mistakes = {right[1] + float_ends - ends: "Give ends_bytes your `element` too: without it, it "
                                           "counts 4 bytes a number."}
    _compare(f"{case}, 4 layers:", got[1], right[1], "bytes", mistakes, hints[1])


def _block_slips(right, batch, seq, e, flash):
    """{wrong bytes a token of a block: hint about it}"""
    C, H = TINY.n_embd, TINY.n_head
    width, matrix, stats, log_sum = C * e, H * seq * e, 4 * e, 4 * H
    mistakes = {
        -right: "More layers keep no more: multiply by config.n_layer.",
        right / (batch * seq) - right: "That is one token: multiply by batch * seq.",
        right / batch - right: "That is one sequence: multiply by the batch.",
        ends_bytes(TINY, batch, seq, e) / (batch * seq):
            "Add ends_bytes(...) once, after multiplying by the layers, not in each layer.",
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
        mistakes[matrix] = "Flash attention stores log-sums, and no (T, T) matrix."
        mistakes[-log_sum] = "Flash attention keeps one float32 log-sum for each head and token."
        mistakes[matrix - log_sum] = ("config.flash is True here: log-sums, and no (T, T) matrix. "
                                      "Are the two branches swapped?")
        mistakes[H * e - log_sum] = "The log-sums are float32, 4 bytes each, in a bf16 model too."
    else:
        mistakes[matrix] = "softmax needs its output only; the scores before it are not kept."
        mistakes[matrix - log_sum] = mistakes[matrix]
        mistakes[-matrix] = "Plain attention keeps a (T, T) matrix for each head: H x seq a token."
        mistakes[log_sum - matrix] = mistakes[-matrix]
        longest = H * TINY.n_ctx * e
        mistakes[longest - matrix] = "The (T, T) matrix is as long as this batch, not config.n_ctx."
    return {right + excess: hint for excess, hint in mistakes.items()}
