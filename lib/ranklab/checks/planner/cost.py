"""cost_per_token: compared with the FLOPs of a token by hand."""

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
    args = MODELS[case.model], case.sequence, find_node(case.node), case.mfu, case.price
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
        Slip("The price is for an hour, and the speed for a second: divide by 3600.",
             ("price / 3600 /", "price /")),
        Slip("An hour has 3,600 seconds.", ("price / 3600 /", "price / 60 /")),
        Slip("Only a part of the peak is the model's own FLOPs: multiply the peak by the MFU.",
             (SPEED, SPEED.removeprefix("mfu * "))),
        Slip("The MFU is a part of the peak: multiply the peak by it, do not divide.",
             (SPEED, SPEED.replace("mfu * machine.peak_flops", "machine.peak_flops / mfu"))),
        Slip("6 FLOPs for each of all parameters: but an embedding is only looked up, a token "
             "meets only some experts, and attention has FLOPs without parameters. "
             "model.flops_per_token(sequence) has all.",
             (FLOPS, "(6 * model.parameters)")),
        Slip("Attention's FLOPs grow with the sequence: model.flops_per_token(sequence) includes "
             "them.", (FLOPS, "(6 * model.active)"), (FLOPS, "model.flops_per_token(0)")),
        Slip("An embedding is only looked up, and a token meets only some experts: "
             "model.flops_per_token(sequence).",
             (FLOPS, "(6 * model.parameters + 12 * model.layers * sequence * model.width)")),
        Slip("This MFU counts attention in full: causal=False, the default.",
             (FLOPS, "model.flops_per_token(sequence, causal=True)")),
        Slip("MFU counts each forward once: no forwards=2.",
             (FLOPS, "model.flops_per_token(sequence, forwards=2)")),
        Slip("Backward counts, too: three times the FLOPs of the forward.",
             (FLOPS, "(model.flops_per_token(sequence) / 3)"), (FLOPS, "(2 * model.active)")),
        Slip("The sequence is an argument.", (FLOPS, "model.flops_per_token(2048)")),
        Slip("All heads of a token have model.width numbers, which need not be model.hidden: "
             "model.flops_per_token(sequence).",
             (FLOPS, "(6 * model.active + 12 * model.layers * sequence * model.hidden)")),
        Slip("MFU is a part of peak_flops, not of the best matrix product.",
             (SPEED, SPEED.replace("machine.peak_flops", "machine.bf16"))),
        Slip("Price and peak are those of one GPU: do not multiply by those of a node.",
             (SPEED, f"machine.node * {SPEED}"),
             ("price / 3600 /", "machine.node * price / 3600 /")),
        Slip("These are tokens for a dollar. Dollars of a token: turn it round.",
             ("price / 3600 / tokens_per_second", "3600 * tokens_per_second / price")),
        Slip("These are tokens of a second: divide dollars of a second by them.",
             ("price / 3600 / tokens_per_second", "tokens_per_second")),
        Slip("Return dollars of one token, not of a million.",
             ("price / 3600 /", "1e6 * price / 3600 /")),
        Slip("Return the dollars.", ("return price / 3600 / tokens_per_second",
                                     "price / 3600 / tokens_per_second")),
        Slip("Refuse an MFU of 0, below it or above 1 by a ValueError, before you divide.",
             (CHECK, ""), (RANGE, "0 <= mfu <= 1"), (RANGE, "mfu > 0"), (RANGE, "mfu <= 1"),
             (RANGE, "0 < mfu <= 100")),
        Slip("An MFU of 1 is possible: refuse only what is above it.", (RANGE, "0 < mfu < 1")),
    ), hints=(
        "How many dollars does a second cost, and how many tokens does a second bring?",
        "mfu * machine.peak_flops FLOPs of each second are the model's own.",
        "price / 3600 / (mfu * machine.peak_flops / model.flops_per_token(sequence))",
    ))
