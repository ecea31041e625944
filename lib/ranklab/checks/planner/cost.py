"""cost_per_token: compared with the FLOPs of a token by hand."""

from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.checks.trial import refuses
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.cost import cost_per_token


class Case(NamedTuple):
    """A model and a GPU; price: dollars per hour."""

    model: str
    node: str
    sequence: int
    mfu: float
    price: float

    def __str__(self):
        return (f"{self.model}, {self.sequence:,} tokens, {self.node}, mfu={self.mfu}, "
                f"{self.price} $ an hour")


def _see(fn, case):
    model = replace(MODELS[case.model], windowed=0)  # by_hand is right, too, and knows no windows
    args = model, case.sequence, find_node(case.node), case.mfu, case.price
    if case.mfu == 1:
        yield {"an MFU of 1": Must("refused" if refuses(fn, *args) else "taken", "taken")}
    dollars = fn(*args)
    yield {"the cost of a million tokens in dollars": dollars if dollars is None
           else float(1e6 * dollars)}


def by_hand(model, sequence, machine, mfu, price):
    """Compute the dollars per token by hand.

    6 FLOPs for each active parameter; for attention 12 for each number of all heads and each token
    of the sequence.
    """
    if not 0 < mfu <= 1:
        raise ValueError(mfu)
    dollars = price / 3600 / (mfu * machine.peak_flops)  # of a FLOP
    return dollars * (6 * model.active + 12 * model.layers * sequence * model.width)


CASES = (
    Case("llama2-13b", "a100-dgx", 2048, 0.45, 2.0),
    Case("llama-70b", "h100-dgx", 32768, 0.4, 3.5),
    Case("mixtral-8x7b", "h100-dgx", 4096, 0.3, 6.88),
    Case("gpt2-xl", "l4-pcie", 1024, 1.0, 0.8),
    Case("gpt-oss-120b", "h100-dgx", 16384, 0.35, 2.5),  # its heads are 4,096 wide, x is 2,880
)
REFUSED = tuple(Case("llama-8b", "a100-dgx", 2048, mfu, 2.0) for mfu in (40, 1.01, -0.1, 0))
SPEED = "mfu * machine.peak_flops / model.flops_per_token(sequence)"
FLOPS = "model.flops_per_token(sequence)"
CHECK = ("    if not 0 < mfu <= 1:\n"
         "        raise ValueError(f\"mfu={mfu} must be above 0 and at most 1\")\n")
RANGE = "0 < mfu <= 1"
COST = Proof(
    cost_per_token,
    Stage("right dollars of a token, for dense models and experts", _see, CASES, oracle=by_hand),
    Stage("an MFU of 0, below it or above 1 is a ValueError", _see, REFUSED, oracle=by_hand),
    mistakes=(
        Slip("The price is per hour, but the speed is per second: divide by 3600.",
             ("price / 3600 /", "price /")),
        Slip("An hour has 3,600 seconds.", ("price / 3600 /", "price / 60 /")),
        Slip("Only a fraction of the peak goes into the model's own FLOPs: multiply the peak by "
             "the MFU.",
             (SPEED, SPEED.removeprefix("mfu * "))),
        Slip("The MFU is a fraction of the peak: multiply the peak by it instead of dividing.",
             (SPEED, SPEED.replace("mfu * machine.peak_flops", "machine.peak_flops / mfu"))),
        Slip("Not every parameter costs 6 FLOPs: embeddings are only looked up, and a token uses "
             "only some experts. Attention adds FLOPs without parameters. Use "
             "model.flops_per_token(sequence).",
             (FLOPS, "(6 * model.parameters)")),
        Slip("Attention's FLOPs grow with the sequence: model.flops_per_token(sequence) includes "
             "them.", (FLOPS, "(6 * model.active)"), (FLOPS, "model.flops_per_token(0)")),
        Slip("An embedding is only looked up, and a token uses only some experts: use "
             "model.flops_per_token(sequence).",
             (FLOPS, "(6 * model.parameters + 12 * model.layers * sequence * model.width)")),
        Slip("The MFU counts attention in full: leave `causal` at its default, False.",
             (FLOPS, "model.flops_per_token(sequence, causal=True)")),
        Slip("MFU counts each forward once: leave out forwards=2.",
             (FLOPS, "model.flops_per_token(sequence, forwards=2)")),
        Slip("Count the backward as well: forward and backward together cost three times the FLOPs "
             "of the forward.",
             (FLOPS, "(model.flops_per_token(sequence) / 3)"), (FLOPS, "(2 * model.active)")),
        Slip("The sequence length is an argument.", (FLOPS, "model.flops_per_token(2048)")),
        Slip("All heads together are model.width wide, which can differ from model.hidden: use "
             "model.flops_per_token(sequence).",
             (FLOPS, "(6 * model.active + 12 * model.layers * sequence * model.hidden)")),
        Slip("MFU is a fraction of peak_flops, not of the speed of the fastest matrix product.",
             (SPEED, SPEED.replace("machine.peak_flops", "machine.bf16"))),
        Slip("Price and peak are per GPU: do not multiply by the number of GPUs in a node.",
             (SPEED, f"machine.node * {SPEED}"),
             ("price / 3600 /", "machine.node * price / 3600 /")),
        Slip("This is tokens per dollar. Invert it to get dollars per token.",
             ("price / 3600 / tokens_per_second", "3600 * tokens_per_second / price")),
        Slip("This is tokens per second: divide the dollars per second by it.",
             ("price / 3600 / tokens_per_second", "tokens_per_second")),
        Slip("Return dollars per token, not per million tokens.",
             ("price / 3600 /", "1e6 * price / 3600 /")),
        Slip("Return the dollars.", ("return price / 3600 / tokens_per_second",
                                     "price / 3600 / tokens_per_second")),
        Slip("Raise a ValueError before dividing if the MFU is 0 or less, or above 1.",
             (CHECK, ""), (RANGE, "0 <= mfu <= 1"), (RANGE, "mfu > 0"), (RANGE, "mfu <= 1"),
             (RANGE, "0 < mfu <= 100")),
        Slip("An MFU of 1 is possible: refuse only what is above it.", (RANGE, "0 < mfu < 1")),
    ), hints=(
        "How many dollars does a second cost, and how many tokens are processed in a second?",
        "Each second, mfu * machine.peak_flops FLOPs are the model's own.",
        "price / 3600 / (mfu * machine.peak_flops / model.flops_per_token(sequence))",
    ))
