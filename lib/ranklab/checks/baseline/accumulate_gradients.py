"""The check of accumulate_gradients: against one backward of the whole batch."""

from functools import partial

import torch

from ranklab.checks.baseline.whole_batch import batch, compare_step
from ranklab.checks.beside import expect
from ranklab.meter import SavedActivations
from ranklab.models.gpt import GPT, GPTConfig

TINY = GPTConfig(vocab_size=31, n_ctx=12, n_layer=1, n_head=2, n_embd=16)
EQUAL = "Is .grad set back to zero between two pieces, or is only the last piece used?"
RAGGED = ("The mean of the pieces' means gives the short last piece too much weight. Divide every "
          "piece's sum by the count of the whole batch.")
DIVIDE = "Divide by the number of targets that count, in the whole batch."
UNEQUAL = ("Pieces hold different numbers of targets that are not IGNORE. Divide each piece's sum "
           "by the count of the whole batch.")
CASES = (  # rows, micro_batch, IGNOREd targets of each row, hint
    ("8 rows in pieces of 2", 8, 2, (), EQUAL),
    ("1 piece", 4, 9, (), EQUAL),
    ("9 rows in pieces of 4: the last has 1", 9, 4, (), RAGGED),
    ("6 rows in pieces of 2, some targets are IGNORE", 6, 2, (11, 9, 0, 0, 3), UNEQUAL),
    ("4 rows in pieces of 1, one has nothing but IGNORE", 4, 1, (0, 0, 12), UNEQUAL),
)
PIECES = {  # what the rows that loss_sum was given, less all rows, say
    -1: "The last piece was left out. It may have fewer rows than the others, and it may be the "
        "only one.",
    0: "split(n) makes pieces of n rows, the last may have fewer; chunk(n) makes n pieces.",
    1: "Each row goes through loss_sum once, for its gradient and for the mean.",
}


def _model():
    torch.manual_seed(7)
    model = GPT(TINY)  # its head is tied to its embedding
    model.norm.weight.requires_grad_(False)  # and this one is frozen
    return model


def check_accumulate_gradients(accumulate_gradients):
    for case, rows, micro_batch, ignored, hint in CASES:
        step = partial(_step, accumulate_gradients, case, micro_batch)
        compare_step(case, step, _model, *batch(TINY, rows, TINY.n_ctx, ignored),
                     partial(_slips, rows, micro_batch), partial(_why_off, hint))
    yield "equal pieces, one piece, a ragged last piece: the gradient of the whole batch"
    yield "targets that are IGNORE, unequal in number, do not count; the mean loss is returned"
    yield "gradients are added to what .grad held; inputs and weights are unchanged"
    _compare_peak(partial(_step, accumulate_gradients, "9 rows", 4))
    yield "pieces of `micro_batch` rows, each seen once; one piece at a time is in memory"


def _step(accumulate_gradients, case, micro_batch, model, inputs, targets):
    seen = []

    def loss_sum(x, y):
        expect(x.shape[1:] == (TINY.n_ctx,), f"a piece has the shape {tuple(x.shape)}, of "
               f"{TINY.n_ctx} tokens a row", "Cut between rows: inputs.split(micro_batch).")
        seen.append(len(x))
        return model(x, y, "sum")

    loss = accumulate_gradients(loss_sum, inputs, targets, micro_batch)
    right, rows = [len(x) for x in inputs.split(micro_batch)], len(inputs)
    expect(sorted(seen) == sorted(right), f"{case}: loss_sum got pieces of {seen} rows; right is "
           f"{right}, in any order", PIECES[(sum(seen) > rows) - (sum(seen) < rows)])
    return loss


def _slips(rows, micro_batch, grad, count):
    pieces = -(-rows // micro_batch)
    divisors = {"the rows of a piece": micro_batch, "the rows of the batch": rows,
                "the number of pieces": pieces, "the tokens of a row": TINY.n_ctx}
    return {
        f"{count} times too large": (
            count * grad, f"These are the gradients of the sum. {DIVIDE}"),
        **{f"that of the sum, divided by {name}": (
            count / number * grad, f"You divide by {name}. {DIVIDE}")
           for name, number in divisors.items()},
        f"{pieces} times too large": (
            pieces * grad, "Each piece gives the gradient of its own mean: divide each by the "
            "count of the whole batch, not of the piece."),
    }


def _why_off(hint, got):
    if got is None:
        return "Call backward() on each loss."
    return hint if got.isfinite().all() else f"A piece may hold no target: that is 0/0. {DIVIDE}"


def _compare_peak(step):
    inputs, targets, model = *batch(TINY, 9, TINY.n_ctx), _model()
    with SavedActivations(model) as one_piece:
        model(inputs[:4], targets[:4])
    with SavedActivations(model) as saved:
        step(model, inputs, targets)
    expect(saved.peak_bytes <= 1.5 * one_piece.bytes, f"{saved.peak_bytes:,} bytes of activations "
           f"at once; one piece keeps {one_piece.bytes:,}", "Call backward() on each piece before "
           "the next forward: it frees what the piece kept (not with retain_graph=True).")
