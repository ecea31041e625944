"""The checks of clinic/slowdowns.py: results equal to one process, bytes sent, work computed."""

import contextlib
import textwrap
from collections import Counter
from itertools import product

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ranklab.checks.clinic.runs import FOUR, GROUPS, PAIRS, RETURNED, runs
from ranklab.checks.exercise import Exercise
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.clinic import slowdowns
from ranklab.clinic.slowdowns import IN_A_ROW, SENT, SHARE

# --- train_large_batch ----------------------------------------------------------------------------

LARGE = {"micro_batches": 6, "accumulate": 4}, {"micro_batches": 3, "accumulate": 1, "seed": 1}
MEAN = "A step's loss is the mean over all ranks, and over all micro-batches of the step."
LAST = ("Compare the gradient before the optimizer's step with the one in a single process. With 6 "
        "micro-batches and accumulate=4, the second step has two.")
OFTEN = ("A step sends more than one gradient. Accumulate on each rank, and send once, before the "
         "optimizer's step.")
STILL = ("All ranks wait for each other in every call, however small it is. Is something sent "
         "with every micro-batch, or in two calls where one would do?")


def _sends_once(where, result):
    """Check that a step sends one gradient and the loss, in at most one call per parameter."""
    steps, sizes = len(result["losses"]), [weight.nbytes for weight in result["weights"].values()]
    sent = [op.payload_bytes for op in result.watched.ops
            if op.name not in ("broadcast", "barrier")]
    limit = steps * (sum(sizes) + 64)
    expect(sum(sent) <= limit, f"{where} sends {sum(sent):,} bytes in {steps} steps; the gradients"
           f" of {steps} steps are {steps * sum(sizes):,}", OFTEN)
    most = steps * (len(sizes) + 1)
    expect(len(sent) <= most, f"{where} makes {len(sent)} calls in {steps} steps; {most} are "
           "enough", STILL)


def check_train_large_batch(program):
    for run in runs(program, slowdowns.train_large_batch, *product((FOUR, GROUPS, PAIRS), LARGE),
                    one=lambda size, _: ((), {"batch": 2 * size})):
        run.equal({"the loss of step 0": run.one["losses"][0]}, hint=MEAN,
                  of=lambda result: {"the loss of step 0": result["losses"][0]})
        run.equal(run.one, hint=LAST)
        for place, result in enumerate(run.found):
            _sends_once(run.at(place), result)
    yield "losses and weights are those of one process, on 1, 2, 3 and 4 ranks, also where the " \
        "last step is shorter"
    yield "a step sends one gradient and one loss, however many micro-batches it has"


# --- train_on_functions ---------------------------------------------------------------------------

# Each makes 12 piles in a step: they can be shared out fairly over 1, 3 and 4 ranks.
FUNCTIONS = ({"steps": 1, "batch": 24, "longest": 512},
             {"steps": 1, "batch": 12, "longest": 300, "micro": 1, "seed": 1})
FAIR = 1.25  # of a fair share, in tokens or in FLOPs; no rank has more, in training or evaluation
WHOLE = "Every function counts, up to `longest` bytes, and every token counts equally."
LONG = ("Share the tokens (including padding) or the FLOPs fairly among ranks, in training and in "
        "evaluation, and keep functions of similar length together.")


@contextlib.contextmanager
def work_counted():
    """Count the work of one-layer models while the block runs, with and without gradients.

    Yields: {"tokens", "FLOPs": a Counter of {is it training?: the number}}
    """
    counted = {"tokens": Counter(), "FLOPs": Counter()}

    def count(module, args):
        if isinstance(module, torch.nn.Embedding):
            width, length, tokens = module.embedding_dim, args[0].shape[-1], args[0].numel()
            for_each = 12 * width + module.num_embeddings + 2 * length  # products, head, attention
            counted["tokens"][torch.is_grad_enabled()] += tokens
            counted["FLOPs"][torch.is_grad_enabled()] += 2 * tokens * width * for_each

    handle = register_module_forward_pre_hook(count)
    try:
        yield counted
    finally:
        handle.remove()


def check_train_on_functions(program):
    shares = []
    for run in runs(program, slowdowns.train_on_functions, *product((FOUR, GROUPS), FUNCTIONS),
                    watch=work_counted):
        run.equal(run.one, hint=WHOLE)
        for phase, is_training in (("training", True), ("evaluation", False)):
            tokens, flops = (_largest_share(run, of, is_training) for of in ("tokens", "FLOPs"))
            shares.append((min(tokens[0], flops[0]), tokens, flops, phase))
    yield "losses and weights are those of one process, on 1, 3 and 4 ranks"
    share, tokens, flops, phase = max(shares)
    expect(share <= FAIR, f"{tokens[1]} has {tokens[0]:.2f} times its fair share of the tokens in "
                          f"{phase}, and {flops[1]} has {flops[0]:.2f} times its fair share of the "
                          f"FLOPs; at most {FAIR} for one of the two is fair", LONG)
    yield "no rank has much more than its share of the work, in training and in evaluation"


def _largest_share(run, of, is_training):
    """Return (the largest excess over a fair share, its rank)."""
    fair = run.one.watched[of][is_training] / run.size
    return max((result.watched[of][is_training] / fair, run.at(place))
               for place, result in enumerate(run.found))


ADDED = "            loss += part.detach() / ranks\n"
LOSS_SENT = "        dist.all_reduce(loss, group=group)\n"
SENT_INSIDE = textwrap.indent(SENT, "    ")
SLOWDOWNS = (
    Exercise(slowdowns.train_large_batch, check_train_large_batch, mistakes=(
        Slip(OFTEN, (ADDED + SENT, SENT_INSIDE + ADDED)),
        Slip(STILL, (ADDED, "            part = part.detach()\n"
                     "            dist.all_reduce(part, group=group)\n"
                     "            loss += part / ranks\n", LOSS_SENT, "")),
        Slip(LAST, ("            dist.all_reduce(parameter.grad, group=group)\n", ""),
             (ADDED + SENT, "            if number % accumulate == accumulate - 1:\n"
              f"{textwrap.indent(SENT_INSIDE, '    ')}{ADDED}")),
        Slip(MEAN, ("model(x, y) / len(numbers)", "model(x, y)")),
    ), hints=(
        "Count the bytes that a rank sends in a step (Traffic), and the bytes of its gradient.",
        "A gradient that is accumulated on a rank need not be sent before the optimizer needs it. "
        "The same holds for a loss that is only logged.",
        "Move both all-reduces after the loop over the micro-batches; inside it, loss += "
        "part.detach() / ranks.")),
    Exercise(slowdowns.train_on_functions, check_train_on_functions, mistakes=(
        Slip(LONG, (f"for pile in {SHARE}", f"for pile in {IN_A_ROW}"),
             (f"map(loss_of, {SHARE})", f"map(loss_of, {IN_A_ROW})"),
             ("texts = sorted(texts, key=len)", "texts = list(texts)")),
        Slip(WHOLE, ("[:longest]", "[:longest // 2]")),
        Slip(RETURNED, ('"losses": losses,', "")),
    ), hints=(
        "Each rank has the same number of piles. What else must be equal?",
        "The piles are sorted by length, so piles in a row are all short or all long. Give each "
        "rank some of each kind. There are two places to change.",
        "piles[rank::2 * ranks] + piles[2 * ranks - 1 - rank::2 * ranks]: of every 2 * ranks "
        "piles, one from the short end and one from the long end.")),
)
