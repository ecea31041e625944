"""The formulas, each compared with torch's counts in a real step: transformer_flops, mfu,
model_state_bytes, activation_bytes.
"""

import dataclasses
from functools import partial
from numbers import Real
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ranklab.baseline import activation_bytes, mfu, model_state_bytes, transformer_flops
from ranklab.baseline.checkpointing import checkpoint_blocks
from ranklab.baseline.memory import as_trained
from ranklab.checks.baseline.whole_batch import one_thread
from ranklab.checks.exercise import shown
from ranklab.checks.prover import Proof, Slip, Stage, Told
from ranklab.meter import SavedActivations, memory_of
from ranklab.models.gpt import GPT, GPTConfig, count_parameters

# Three heads, as two would be the two products of attention or two numbers for each token; and
# not as many layers in both.
TINY = GPTConfig(vocab_size=101, n_ctx=24, n_layer=3, n_head=3, n_embd=48)
WIDE = GPTConfig(vocab_size=256, n_ctx=64, n_layer=2, n_head=3, n_embd=96)


def counted_flops(config, batch, seq, backward=True):
    """Count the FLOPs that torch's counter sees in a forward, and in a backward.

    It runs on meta tensors, because on CPU tensors the counter counts attention as nothing.
    """
    with torch.device("meta"):
        model, tokens = GPT(config), torch.zeros(batch, seq, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, tokens)
            if backward:
                loss.backward()
    return counter.get_total_flops()


def told(number, unit, more=lambda got, due: ""):
    """Return a number with its unit, and with the remark of `more` about it."""
    def tell(got, due):
        return (f"{shown(got, 10)} {unit}, not {shown(due, 10)}{more(got, due)}"
                if isinstance(got, float) else "")

    return Told(float(number) if _is_number(number) else number, tell)


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool)


# --- transformer_flops ----------------------------------------------------------------------------

class Step(NamedTuple):
    config: GPTConfig
    batch: int
    seq: int

    def __str__(self):
        return (f"{self.config.n_layer} layers, C={self.config.n_embd}, batch {self.batch} x "
                f"{self.seq} tokens")


def _see_flops(fn, case):
    yield {"forward": told(fn(*case, backward=False), "FLOPs"),
           "forward and backward": told(fn(*case), "FLOPs")}


FORWARD = "2 * tokens * (config.n_layer * (weights + attention) + C * V)"
ATTENTION, TIMES = "2 * seq * C", "3 * forward if backward else forward"
FLOPS = Proof(
    transformer_flops,
    Stage({"forward: equal to torch's counter, for two models and three shapes of batch": (),
           "forward and backward: equal as well": ("forward and backward",)},
          _see_flops, (Step(TINY, 1, 23), Step(TINY, 5, 17), Step(WIDE, 2, 64)),
          oracle=counted_flops),
    mistakes=(
        Slip("A multiply and an add are two FLOPs: an (m, k) @ (k, n) product costs 2 m k n.",
             (FORWARD, FORWARD.removeprefix("2 * "))),
        Slip("Attention's own two products are missing: q @ k and probability @ v. They have no "
             "weights, and grow with the square of the sequence length.",
             ("(weights + attention)", "weights")),
        Slip("You count half of attention. It has two products, q @ k and probability @ v; count "
             "the masked half as well, as torch's counter and most papers do.",
             (ATTENTION, "seq * C")),
        Slip("Attention's products run over this batch's length, `seq`, not config.n_ctx.",
             (ATTENTION, "2 * config.n_ctx * C")),
        Slip("The heads share C: together, H heads of size C/H cost as much as one head of size C.",
             (ATTENTION, "2 * seq * C * config.n_head")),
        Slip("The H heads together have C numbers a token; you count only one head, C/H.",
             (ATTENTION, "2 * seq * config.head_size")),
        Slip("In attention, each token meets all `seq` tokens, in q @ k and in probability @ v.",
             (ATTENTION, "2 * C"), (ATTENTION, "2 * C * C")),
        Slip("The head is missing: C x V for each token.", (" + C * V", "")),
        Slip("Looking up an embedding multiplies nothing; only the head costs C x V.",
             ("+ C * V", "+ 2 * C * V")),
        Slip("Count the head once, not once per layer.",
             ("attention) + C * V", "attention + C * V)")),
        Slip("That is one layer: multiply by config.n_layer.", ("config.n_layer * ", "")),
        Slip("You count only one sequence: multiply by the batch size.", ("batch * seq", "seq")),
        Slip("A batch has batch * seq tokens, and each goes through every product.",
             ("batch * seq", "batch")),
        Slip("q, k, v and out are four C x C matrices, and the MLP's two are C x 4C each: 12 C^2 "
             "in all.", ("12 * C * C", "8 * C * C"), ("12 * C * C", "4 * C * C"),
             ("12 * C * C", "11 * C * C"), ("12 * C * C", "6 * C * C"),
             ("12 * C * C", "10 * C * C"), ("12 * C * C", "9 * C * C")),
        Slip("With backward=False, count only the forward pass.", (TIMES, "3 * forward")),
        Slip("That is only the forward pass. The default is a whole step.", (TIMES, "forward"),
             ("backward=True", "backward=False")),
        Slip("Backward costs twice the forward: each product needs one more for its input's "
             "gradient and one for its weight's. Forward and backward cost three forwards.",
             (TIMES, "2 * forward if backward else forward")),
        Slip("Four forwards is the cost of a step that computes each forward twice to save memory. "
             "Here forward and backward cost three.",
             (TIMES, "4 * forward if backward else forward")),
        Slip("Return the FLOPs, as a number.", ("return 3", "3")),
        Slip("Norms and embedding lookups multiply no matrices: count product by product, not from "
             "the number of parameters.",
             (FORWARD, "2 * tokens * count_parameters(config)"),
             (FORWARD, "2 * tokens * (count_parameters(config) + config.n_layer * attention)"),
             count_parameters=count_parameters),
    ), hints=(
        "List the matrix products of one block: six with weights, two without.",
        "An (m, k) @ (k, n) product costs 2 m k n. Per token, a block's weights cost 2 x 12 C^2 "
        "and attention's two products 2 x 2 seq C; the head costs 2 C V once.",
        "forward = 2 * batch * seq * (n_layer * (12 C^2 + 2 seq C) + C V); a step costs 3 times "
        "that.",
    ))


# --- mfu ------------------------------------------------------------------------------------------

class Speed(NamedTuple):
    config: GPTConfig
    tokens_per_second: float
    peak_flops: float
    devices: int

    def __str__(self):
        return (f"{self.tokens_per_second:g} tokens/s on {self.devices} device"
                + "s" * (self.devices > 1) + f" of {self.peak_flops:g} FLOP/s")


def _see_mfu(fn, case):
    args = case if case.devices > 1 else case[:-1]  # one device is the default
    yield {"the fraction": told(fn(*args), "of the peak")}


def by_torchs_flops(config, tokens_per_second, peak_flops, devices=1):
    seconds = config.n_ctx / tokens_per_second  # for one sequence
    return counted_flops(config, 1, config.n_ctx) / seconds / (peak_flops * devices)


PER_TOKEN = "transformer_flops(config, 1, config.n_ctx) / config.n_ctx"
MFU = Proof(
    mfu,
    Stage("right for one device and for eight, from the FLOPs that torch counts", _see_mfu,
          (Speed(WIDE, 1e6, 1e13, 1), Speed(TINY, 3e7, 312e12, 8)), oracle=by_torchs_flops),
    mistakes=(
        Slip("Return a fraction, not a percentage.", ("return ", "return 100 * ")),
        Slip("You count the forward twice. MFU counts it once, and the backward as two more, even "
             "where a step computes the forward again to save memory.",
             ("return ", "return 4 / 3 * ")),
        Slip("The peak of all devices together is devices x peak_flops, and tokens_per_second "
             "already counts all devices.", ("(peak_flops * devices)", "peak_flops")),
        Slip("`/ peak_flops * devices` multiplies by devices. Divide by both: / (peak_flops * "
             "devices).", ("(peak_flops * devices)", "peak_flops * devices")),
        Slip("Training is forward and backward, which cost three forwards.",
             ("n_ctx) /", "n_ctx, backward=False) /")),
        Slip("transformer_flops already counts backward: do not multiply by 3 again.",
             ("return ", "return 3 * ")),
        Slip("Use the FLOPs per token, not per sequence of n_ctx tokens.", (" / config.n_ctx", "")),
        Slip("Sequences have n_ctx tokens, and in attention each meets all the others: "
             "transformer_flops of a single token counts almost no attention.",
             (PER_TOKEN, "transformer_flops(config, 1, 1)")),
        Slip("6 N leaves attention out. Use transformer_flops, which counts it.",
             (PER_TOKEN, "6 * count_parameters(config)"), count_parameters=count_parameters),
        Slip("The fraction is upside down: divide what the model needs by what the devices could "
             "do.",
             ("return ", "return 1 / (", "devices)", "devices))")),
        Slip("Return the fraction, as a number.", ("return ", "")),
    ), hints=(
        "How many FLOPs does a token cost, and how many could the devices do in that time?",
        "transformer_flops(config, 1, config.n_ctx) is for n_ctx tokens.",
        "flops_per_token * tokens_per_second / (peak_flops * devices)",
    ))


# --- model_state_bytes ----------------------------------------------------------------------------

class State(NamedTuple):
    n: int
    recipe: str

    def __str__(self):
        return f"n={self.n}"


KEYS = "parameters", "gradients", "optimizer"


def _names_of(recipe):
    return (f"what it returns for {recipe}", *(f"the size of {key} in {recipe}" for key in KEYS))


def _see_state(fn, case):
    sizes = fn(*case)
    is_right = isinstance(sizes, dict) and {*sizes} == {*KEYS}
    result, *names = _names_of(case.recipe)
    yield {result: "a dict with these keys" if is_right else sizes,
           **(dict(zip(names, (told(sizes[key], "bytes") for key in KEYS))) if is_right else {})}


def bytes_after_a_step(n, recipe):
    """Count the bytes that a real Adam step leaves."""
    model, optimizer = as_trained(nn.Linear(n, 1, bias=False), recipe)
    memory = memory_of(model, optimizer)
    # Adam also counts its steps: 4 bytes a tensor, and there is one.
    return dict(zip(KEYS, (memory.parameters, memory.gradients, memory.optimizer_state - 4)))


WEIGHTS, GRADIENTS = '"parameters": width * n', '"gradients": width * n'
OPTIMIZER = '"optimizer": (moments + master) * n'
MASTER, MOMENTS = '4 if recipe == "mixed" else 0', '2 * (2 if recipe == "bf16" else 4)'
STATE = Proof(
    model_state_bytes,
    Stage({f"{recipe}: {each} bytes a parameter, as counted after a real Adam step":
           _names_of(recipe) for recipe, each in (("bf16", 8), ("mixed", 16), ("fp32", 16))},
          _see_state, tuple(State(n, recipe) for recipe in ("bf16", "mixed", "fp32")
                            for n in (1000, 7)), oracle=bytes_after_a_step),
    mistakes=(
        Slip("A weight takes 4 bytes in float32 and 2 in bf16, and so does its gradient.",
             ('"fp32": 4', '"fp32": 2'), ('"mixed": 2', '"mixed": 4'), ('"bf16": 2', '"bf16": 4')),
        Slip("A gradient is as wide as its weight: 2 bytes in bf16, 4 in float32.",
             (GRADIENTS, '"gradients": 4 * n'), (GRADIENTS, '"gradients": 2 * n'),
             (GRADIENTS, '"gradients": (2 if recipe == "bf16" else 4) * n')),
        Slip("Adam keeps two numbers for each parameter, a mean and a mean square.",
             (MOMENTS, MOMENTS.removeprefix("2 * "))),
        Slip("In mixed, the optimizer holds 12 bytes a parameter: both moments and the master "
             "weights are float32, because a bf16 weight is too coarse for small steps.",
             ("moments + master", "moments"), (MOMENTS, '2 * (4 if recipe == "fp32" else 2)')),
        Slip("In the bf16 recipe everything is bf16: two moments of 2 bytes each, and no master "
             "weights.",
             (MOMENTS, "2 * 4"), (MASTER, '0 if recipe == "fp32" else 4')),
        Slip("In fp32 the weights are float32 already: only mixed precision has master weights.",
             (MASTER, "4"), (MASTER, '0 if recipe == "bf16" else 4')),
        Slip("A master weight is float32, 4 bytes.", (MASTER, MASTER.replace("4 if", "2 if"))),
        Slip("The float32 master weights belong to the optimizer, not to the parameters.",
             (WEIGHTS, '"parameters": (width + master) * n', "(moments + master)", "moments"),
             (WEIGHTS, '"parameters": (width + master) * n')),
        Slip("These are bits; a byte has 8.", (WEIGHTS, '"parameters": 8 * width * n'),
             (WEIGHTS, '"parameters": 8 * width * n', GRADIENTS, '"gradients": 8 * width * n',
              OPTIMIZER, '"optimizer": 8 * (moments + master) * n')),
        Slip("That is for one parameter: multiply by n.",
             (WEIGHTS, '"parameters": width'), (GRADIENTS, '"gradients": width'),
             (OPTIMIZER, '"optimizer": moments + master'),
             (WEIGHTS, '"parameters": width', GRADIENTS, '"gradients": width',
              OPTIMIZER, '"optimizer": moments + master')),
        Slip("These are GB; return bytes.",
             ("    width =", "    n = n / 1e9\n    width =")),
        Slip(f"Return a dict with the keys {', '.join(KEYS)}.", ("return {", "return 16 * n or {"),
             ("return {", "{"), ('"optimizer"', '"adam"'),
             ("master) * n}", "master) * n}.values()")),
    ), hints=(
        "Four things live as long as the run: weights, gradients, Adam's two moments, and perhaps "
        "a master copy of the weights.",
        "mixed: 2 + 2 bytes in bf16, plus 4 + 4 + 4 in float32 for the optimizer.",
        '"fp32": 4, 4, 8; "mixed": 2, 2, 12; "bf16": 2, 2, 4 bytes a parameter.',
    ))


# --- activation_bytes -----------------------------------------------------------------------------

class Kept(NamedTuple):
    """A forward at two depths: a block keeps the difference, and the ends keep the rest."""

    batch: int
    seq: int
    dtype: torch.dtype
    flash: bool
    recompute: bool = False

    def __str__(self):
        return ("recompute=True, " * self.recompute + ("flash" if self.flash else "plain")
                + f", batch {self.batch} x {self.seq}, {self.dtype.itemsize} bytes a number")


@one_thread()
def counted_activations(config, batch, seq, element=4, recompute=False):
    """Count what autograd saves, each storage once."""
    model = GPT(config).to({2: torch.bfloat16, 4: torch.float32}[element])
    model = checkpoint_blocks(model) if recompute else model
    inputs, targets = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
    with SavedActivations(model) as saved:
        model(inputs, targets)
    return saved.bytes


def _see_activations(fn, case):
    element = case.dtype.itemsize
    keywords = {"recompute": True} if case.recompute else {}  # False is the default
    shallow, deep = (fn(dataclasses.replace(TINY, n_layer=n, flash=case.flash), case.batch,
                        case.seq, element, **keywords) for n in (3, 4))
    of_block = None
    if _is_number(shallow) and _is_number(deep):
        of_block = (deep - shallow) / (case.batch * case.seq)
    yield {"what a block keeps": told(of_block, "bytes a token",
                                      partial(_in_widths, TINY.n_embd * element)),
           "what 4 layers and the ends keep": told(deep, "bytes")}


def _in_widths(width, got, due):
    excess = (got - due) / width
    return f": {abs(excess):.3g} x C numbers too {'few' if excess < 0 else 'many'}"


def _kept(name, *cases):
    return Stage(name, _see_activations, tuple(Kept(*each) for each in cases),
                 oracle=counted_activations)


SHAPES = (2, 24, torch.float32), (3, 17, torch.float32), (2, 20, torch.bfloat16)
CORE = "4 * H if config.flash else H * seq * element"
ENDS, BLOCK = "ends_bytes(config, batch, seq, element)", "C * element if recompute else "
NORMS, READ, MLP = "2 * (C + 2) * element", "(1 + 3 + 1)", "(1 + 4 + 4)"
ACTIVATIONS = Proof(
    activation_bytes,
    _kept("flash attention: every byte that autograd saves; three shapes, float32 and bf16",
          *((*shape, True) for shape in SHAPES)),
    _kept("plain attention: every byte that autograd saves; three shapes, float32 and bf16",
          *((*shape, False) for shape in SHAPES)),
    _kept("recompute=True: a block keeps only its input; the ends keep the same as before",
          *((batch, seq, dtype, flash, True) for flash in (True, False)
            for batch, seq, dtype in ((2, 20, torch.float32), (3, 17, torch.bfloat16)))),
    mistakes=(
        Slip("The attention output is one tensor: the attention kernel and `out` share it.",
             (READ, "(1 + 3 + 2)")),
        Slip("q, k and v read the same input, and autograd keeps it once.", (READ, "(3 + 3 + 1)")),
        Slip("The attention kernel keeps q, k and v for its backward: 3 C a token.",
             (READ, "(1 + 1)")),
        Slip("GELU keeps its input, 4 C wide, and `down` keeps GELU's output, 4 C more.",
             (MLP, "(1 + 4)")),
        Slip("C numbers a token are missing: the input of q, k and v, attention's output and the "
             "input of `up` are all kept.", (MLP, "(4 + 4)"), (READ, "(1 + 3)")),
        Slip("Each of the two norms keeps its own input for backward, C wide.",
             (NORMS, "4 * element")),
        Slip("Each of the two norms also keeps a mean and a deviation for each token: 2 numbers.",
             (NORMS, "2 * C * element")),
        Slip("Besides its input, a norm keeps 2 numbers for each token: a mean and a deviation.",
             (NORMS, "2 * (C + 1) * element")),
        Slip("A block has two norms, and each keeps its input and 2 numbers.",
             (NORMS, "(C + 2) * element")),
        Slip("Flash attention stores log-sums, not a (T, T) matrix.",
             (CORE, "H * seq * element + (4 * H if config.flash else 0)")),
        Slip("Flash attention keeps one float32 log-sum for each head and token.",
             ("4 * H if", "0 if")),
        Slip("The log-sums are float32, 4 bytes each, even in a bf16 model.",
             ("4 * H if", "element * H if")),
        Slip("There is a log-sum for each of the H heads.", ("4 * H if", "4 if")),
        Slip("config.flash is True here, so count log-sums and no (T, T) matrix. Are the two "
             "branches swapped?", ("if config.flash", "if not config.flash")),
        Slip("Plain attention keeps a (T, T) matrix for each head: H x seq a token.",
             (CORE, "4 * H"), (CORE, "4 * H if config.flash else 0")),
        Slip("There is a (T, T) matrix for each of the H heads.", ("else H * seq", "else seq")),
        Slip("The matrix has `element` bytes a number, not always 4.",
             ("else H * seq * element", "else H * seq * 4")),
        Slip("softmax needs only its output: the scores before it are not kept.",
             ("else H", "else 2 * H")),
        Slip("The (T, T) matrix has the length of this batch, not config.n_ctx.",
             ("else H * seq", "else H * config.n_ctx")),
        Slip("Your count does not grow with the number of layers: multiply by config.n_layer.",
             (" * config.n_layer", "")),
        Slip("That is one token: multiply by batch * seq.", ("tokens * config", "config")),
        Slip("That is one sequence: multiply by the batch size.",
             ("tokens * config", "seq * config")),
        Slip("The blocks are right. Add ends_bytes(config, batch, seq, element) once, for what "
             "lies before the first block and after the last.", (f" + {ENDS}", "")),
        Slip("Pass `element` to ends_bytes as well: without it, ends_bytes counts 4 bytes a "
             "number.",
             (ENDS, "ends_bytes(config, batch, seq)")),
        Slip("Add ends_bytes(...) once, after multiplying by the layers, not in each layer.",
             (ENDS, f"config.n_layer * {ENDS}")),
        Slip("A number has `element` bytes, and in bf16 that is 2, not 4.",
             ("    C, H, tokens", "    element = 4\n    C, H, tokens")),
        Slip("The embedding, head and loss are not checkpointed: add ends_bytes(config, batch, "
             "seq, element) with recompute as well.", (ENDS, f"(0 if recompute else {ENDS})")),
        Slip("A checkpointed block keeps one tensor, its input: C numbers a token, `element` bytes "
             "each. It recomputes everything else.", (BLOCK, ""),
             (BLOCK, "(C + 2) * element if recompute else "),
             (BLOCK, "C if recompute else "), (BLOCK, "4 * C if recompute else "),
             (BLOCK, "0 if recompute else "), (BLOCK, "norms if recompute else "),
             (BLOCK, "2 * C * element if recompute else ")),
        Slip("Each checkpointed block keeps its own input: multiply by config.n_layer with "
             "recompute as well.",
             ("config.n_layer * block", "(1 if recompute else config.n_layer) * block")),
        Slip("Return the bytes, as a number.", ("return tokens", "tokens")),
    ), hints=(
        "A linear layer keeps its input. GELU keeps its input. Which of them share one tensor?",
        "In units of C numbers a token, the norms keep 2, attention 1 + 3 + 1, and the MLP 1 + 4 + "
        "4. Add 2 numbers for each norm, and attention's log-sums or matrix.",
        "block = (16 C + 4) * element + (4 H if flash else H * seq * element); with recompute, C * "
        "element. Multiply by tokens and layers, and add ends_bytes(...).",
    ))
