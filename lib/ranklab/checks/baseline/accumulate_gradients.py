"""The check of accumulate_gradients: against one backward of the whole batch."""

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain, is_near
from ranklab.meter import SavedActivations
from ranklab.models.gpt import GPT, IGNORE, GPTConfig

TINY = GPTConfig(vocab_size=31, n_ctx=12, n_layer=1, n_head=2, n_embd=16)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}  # fmt: skip


def _batch(rows, ignored=()):
    generator = torch.Generator().manual_seed(rows)
    inputs, targets = torch.randint(TINY.vocab_size, (2, rows, TINY.n_ctx), generator=generator)
    for row, count in ignored:
        targets[row, :count] = IGNORE
    return inputs, targets


def _model():
    torch.manual_seed(7)
    model = GPT(TINY)  # its head is tied to its embedding
    model.norm.weight.requires_grad_(False)  # and this one is frozen
    return model


def _loss_sum(model, seen):
    """What the learner gets; `seen` holds the rows of each piece that it was given."""
    def loss_sum(x, y):
        if x.shape[1:] != (TINY.n_ctx,):
            raise Mistake(f"a piece has the shape {tuple(x.shape)}, of {TINY.n_ctx} tokens a row",
                          "Cut between rows: inputs.split(micro_batch). A row stays whole, as its "
                          "tokens attend to each other.")
        seen.append(len(x))
        return model(x, y, "sum")

    return loss_sum


def check_accumulate_gradients(accumulate_gradients):
    cases = (
        ("8 rows in pieces of 2", 8, 2, ()),
        ("1 piece", 4, 9, ()),
        ("9 rows in pieces of 4: the last has 1", 9, 4, ()),
        ("6 rows in pieces of 2, some targets are IGNORE", 6, 2, ((0, 11), (1, 9), (4, 3))),
        ("4 rows in pieces of 1, one has nothing but IGNORE", 4, 1, ((2, 12),)),
    )  # fmt: skip
    for case in cases:
        _compare_accumulated(accumulate_gradients, *case)
    yield "equal pieces, one piece, a ragged last piece: the gradient of the whole batch"
    yield "targets that are IGNORE, unequal in number, do not count; the mean loss is returned"
    _compare_growth(accumulate_gradients)
    yield "gradients are added to what .grad held; inputs and weights are unchanged"
    _compare_peak(accumulate_gradients)
    yield "pieces of `micro_batch` rows, each seen once; one piece at a time is in memory"


def _compare_accumulated(accumulate_gradients, case, rows, micro_batch, ignored):
    inputs, targets = _batch(rows, ignored)
    model, oracle, seen = _model(), _model(), []
    right = oracle(inputs, targets)
    right.backward()
    loss = accumulate_gradients(_loss_sum(model, seen), inputs.clone(), targets.clone(),
                                micro_batch)
    if sum(seen) < rows:
        raise Mistake(f"{case}: {sum(seen)} rows of {rows} went through loss_sum",
                      "The last piece may have fewer rows than micro_batch, and be the only one; "
                      "it was left out. inputs.split(micro_batch) gives all pieces.")
    got, hint = gradients(model), _why_off(rows, micro_batch, ignored)
    for name, grad in gradients(oracle).items():
        if grad is None:
            continue
        if got[name] is None:
            hint = "Call backward() on each loss."
        elif not got[name].isfinite().all():
            hint = ("A piece may hold no target at all: dividing by its own count gives 0/0. "
                    "Divide by the count of the whole batch.")
        explain(f"{case}: the gradient of {name}", got[name], grad,
                _slips(grad, rows, micro_batch, int((targets != IGNORE).sum())), hint)
    _compare_loss(case, loss, right.item())


def _slips(grad, rows, micro_batch, count):
    slips = {f"{count} times too large": (
        count * grad, "These are the gradients of the sum. Divide by the number of targets that "
        "count.")}
    pieces = -(-rows // micro_batch)
    for name, number in (("the rows of a piece", micro_batch), ("the rows of the batch", rows),
                         ("the number of pieces", pieces), ("the tokens of a row", TINY.n_ctx)):
        slips[f"that of the sum, divided by {name}"] = (
            count / number * grad, f"You divide by {name}. Divide by the number of targets that "
            "count, in the whole batch.")
    slips[f"{pieces} times too large"] = (
        pieces * grad, "Each piece gives the gradient of its own mean, and backward() adds them "
        "up: divide each by the count of the whole batch, not of the piece.")
    return slips


def _why_off(rows, micro_batch, ignored):
    if ignored:
        return ("Pieces hold different numbers of targets that count. Divide each piece's sum by "
                "the count over the whole batch of targets that are not IGNORE.")
    if rows % micro_batch:
        return ("The mean of the pieces' means gives the short last piece too much weight. Divide "
                "every piece's sum by the count of the whole batch.")
    return ("Is .grad set back to zero between two pieces, or only the last piece used? backward() "
            "adds to .grad; that is what you want here.")


def _compare_loss(case, loss, right):
    if loss is None:
        raise Mistake(f"{case}: it returned None", "Return the mean loss of the whole batch.")
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        raise Mistake(f"{case}: the loss it returned still holds its graph",
                      "Add up loss.detach(), or the graph of every piece stays in memory.")
    if abs(float(loss) - right) > 1e-4:
        raise Mistake(f"{case}: it returned {float(loss):.4f}; the mean loss is {right:.4f}",
                      "Return the sum of the pieces' losses, each divided by the count of the "
                      "whole batch.")


def _compare_growth(accumulate_gradients):
    inputs, targets = _batch(4, ((1, 5),))
    model, x, y = _model(), inputs.clone(), targets.clone()
    before = [p.detach().clone() for p in model.parameters()]
    accumulate_gradients(_loss_sum(model, []), x, y, 2)
    once = gradients(model)
    if not (torch.equal(x, inputs) and torch.equal(y, targets)):
        raise Mistake("inputs or targets have changed", "Split them; do not write into them.")
    accumulate_gradients(_loss_sum(model, []), x, y, 2)
    for name, grad in gradients(model).items():
        if grad is not None and not is_near(grad, 2 * once[name]):
            raise Mistake("a second call did not add to the gradients of the first",
                          "Setting .grad back to zero is the caller's business, not yours.")
    if any(not torch.equal(p, old) for p, old in zip(model.parameters(), before)):
        raise Mistake("the weights have changed", "Only .grad may change; the step comes later.")


def _compare_peak(accumulate_gradients):
    (inputs, targets), model, rows = _batch(9), _model(), []
    with SavedActivations(model) as saved:
        model(inputs[:4], targets[:4])
    one_piece = saved.bytes
    with SavedActivations(model) as saved:
        accumulate_gradients(_loss_sum(model, rows), inputs, targets, 4)
    if sorted(rows) != [1, 4, 4]:  # in any order
        hint = ("split(n) makes pieces of n rows, the last may have fewer; chunk(n) makes n "
                "pieces. Smaller pieces keep a GPU less busy, larger ones need more memory.")
        if sum(rows) > 9:
            hint = ("Each row goes through loss_sum once: the loss that gives the gradient is also "
                    "a part of the mean that you return.")
        raise Mistake(f"9 rows with micro_batch=4: loss_sum got pieces of {rows} rows; right is "
                      "[4, 4, 1], in any order", hint)
    if saved.peak_bytes > 1.5 * one_piece:
        raise Mistake(f"{saved.peak_bytes:,} bytes of activations at once; one piece keeps "
                      f"{one_piece:,}",
                      "Call backward() on each piece before the next forward: it frees what the "
                      "piece kept (not with retain_graph=True). One backward at the end saves no "
                      "memory at all.")
