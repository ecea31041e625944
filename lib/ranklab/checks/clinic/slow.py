"""The checks of clinic/slow.py: right beside one process, and what is sent and worked through."""

import argparse
import contextlib
import inspect
import re
from collections import Counter
from functools import partial

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ranklab.checks.beside import GROUPINGS, expect, on_groups
from ranklab.checks.clinic.causes import cause_of
from ranklab.checks.exercise import Exercise
from ranklab.checks.trial import explain, on_ranks
from ranklab.clinic import slow
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig

# --- train_large_batch ----------------------------------------------------------------------------

LARGE = {"micro_batches": 6, "accumulate": 4}, {"micro_batches": 3, "accumulate": 1, "seed": 1}
LAST = ("The first turn has 6 micro-batches and accumulate=4: its last step has two. All ranks' "
        "gradients must come together before each step.")


def _flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _told(found):
    """What a program returns, as tensors."""
    return {"losses": torch.tensor(found["losses"]), "weights": _flat(found["weights"].values())}


def _as_alone(ranks, call, alone, hint):
    """Looks at both turns. (beside.py counts handles, and torch's DDP waits for its own in C++.)"""
    for turn, right in enumerate(alone):
        found = {name: value.cpu() for name, value in call(turn).items()}
        for name, value in right.items():
            yield partial(explain, f"{ranks}: {name}", found[name], value, None, hint)


def _trained(config, seed, batches):
    """(model, losses) of one process; a batch is [(x, y), ...], and its loss a mean over tokens."""
    torch.manual_seed(seed)
    model, losses = GPT(config), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for pairs in batches:
        tokens = sum(int((y >= 0).sum()) for _, y in pairs)
        loss = sum(model(x, y, "sum") for x, y in pairs) / tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, torch.tensor(losses)


def _large_alone(ranks, micro_batches, accumulate, seed=0):
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    size = 2 * 32 * ranks  # of all ranks' windows in a micro-batch
    batches = [text[size * first:size * min(first + accumulate, micro_batches) + 1]
               for first in range(0, micro_batches, accumulate)]
    pairs = [[(batch[:-1].view(-1, 32), batch[1:].view(-1, 32))] for batch in batches]
    model, losses = _trained(GPTConfig(n_ctx=32, n_layer=1, n_embd=32), seed, pairs)
    return {"weights": _flat(model.parameters()), "losses": losses}


def _large_trial(program, ranks):
    alone, seen = [_large_alone(ranks.size, **settings) for settings in LARGE], []

    def call(turn):
        with Traffic() as traffic:
            found = program(**LARGE[turn], **ranks.keywords)
        sizes = [weight.nbytes for weight in found["weights"].values()]
        seen.append((len(found["losses"]), sizes, [op.payload_bytes for op in traffic.ops
                                                   if op.name not in ("broadcast", "barrier")]))
        return _told(found)

    yield from _as_alone(ranks, call, alone, LAST)
    yield lambda: [_sends_once(str(ranks), *each) for each in seen] and None


def _sends_once(where, steps, sizes, sent):
    """One gradient in a step, and the loss; by as many calls as there are parameters at most."""
    wanted = steps * (sum(sizes) + 64)
    expect(sum(sent) <= wanted, f"{where} sends {sum(sent):,} bytes in {steps} steps; the gradients"
           f" of {steps} steps are {steps * sum(sizes):,}", "They go out with every micro-batch. "
           "Add up on each rank, and send once before the optimizer's step.")
    most = steps * (len(sizes) + 1)
    expect(len(sent) <= most, f"{where} makes {len(sent)} calls in {steps} steps; {most} are "
           "enough", "Something is still sent with every micro-batch: all ranks wait for each "
           "other there, however small it is.")


def check_train_large_batch(program):
    on_groups(_large_trial, program, timeout=20)
    yield "losses and weights are those of one process, on 1, 2, 3 and 4 ranks, also where the " \
        "last step is shorter"
    yield "a step sends one gradient and one loss, however many micro-batches it has"


# --- train_on_functions ---------------------------------------------------------------------------

# Each makes 12 piles in a step: they can be shared out fairly over 1, 3 and 4 ranks.
FUNCTIONS = ({"steps": 1, "batch": 24, "longest": 512},
             {"steps": 1, "batch": 12, "longest": 300, "micro": 1, "seed": 1})
FAIR = 1.25  # of a fair share; no rank has more, in training or in evaluation
WHOLE = "All functions count, to their `longest` byte, and each token alike."
LONG = ("What a rank has to do is its tokens, padding included. Share out those, in training and "
        "in evaluation, and keep neighbours in length together.")


@contextlib.contextmanager
def _tokens_counted():
    """Counter: is it training? -> tokens that went into the embeddings of all models."""
    counted = Counter()

    def count(module, args):
        if isinstance(module, torch.nn.Embedding):
            counted[torch.is_grad_enabled()] += args[0].numel()

    handle = register_module_forward_pre_hook(count)
    try:
        yield counted
    finally:
        handle.remove()


def _piles(texts, micro):
    texts = sorted(texts, key=len)
    piles = [torch.nn.utils.rnn.pad_sequence(texts[i:i + micro], True, -100)
             for i in range(0, len(texts), micro)]
    return [(pile[:, :-1].clamp(min=0), pile[:, 1:]) for pile in piles]


def _functions_alone(steps, batch, longest, micro=2, seed=0):
    texts = re.split(r"\n(?=(?:    )?def )", inspect.getsource(argparse))
    texts = [torch.tensor(list(text.encode()[:longest])) for text in texts]
    config = GPTConfig(n_ctx=longest, n_layer=1, n_head=1, n_embd=16)
    with _tokens_counted() as counted:
        model, losses = _trained(config, seed, [_piles(texts[batch * step:][:batch], micro)
                                                for step in range(steps)])
        with torch.no_grad():
            pairs = _piles(texts[-24:], micro)
            held_out = sum(model(x, y, "sum") for x, y in pairs) / sum((y >= 0).sum()
                                                                      for _, y in pairs)
    return {"weights": _flat(model.parameters()), "losses": losses, "held out": held_out}, counted


def _functions_trial(program, ranks, alone):
    seen = []

    def call(turn):
        with _tokens_counted() as counted:
            found = program(**FUNCTIONS[turn], **ranks.keywords)
        seen.append({what: counted[is_training] / (alone[turn][1][is_training] / ranks.size)
                     for what, is_training in (("training", True), ("evaluation", False))})
        return _told(found) | {"held out": torch.tensor(found["held_out"])}

    yield from _as_alone(ranks, call, [values for values, _ in alone], WHOLE)
    yield lambda: [(share, what, str(ranks)) for each in seen for what, share in each.items()]


def check_train_on_functions(program):
    # On a rank, because that has one thread: several wait for each other on a busy machine.
    [alone] = on_ranks(lambda: [_functions_alone(**each) for each in FUNCTIONS], ranks=1)
    notes = on_groups(_functions_trial, program, alone, groupings=GROUPINGS[:2], timeout=20)
    yield "losses and weights are those of one process, on 1, 3 and 4 ranks"
    share, what, rank = max(share for of_rank in notes for shares in of_rank for share in shares)
    expect(share <= FAIR, f"{rank} works through {share:.2f} of a fair share of the tokens in "
           f"{what}", LONG)
    yield "no rank has much more than its share of the tokens, in training and in evaluation"


EXERCISES_SLOW = (
    Exercise(slow.train_large_batch, check_train_large_batch, hints=(
        "Count the bytes that a rank sends in a step (Traffic), and those of its gradient.",
        "A gradient that is added up on a rank need not travel before the optimizer wants it. The "
        "same holds for a loss that is only logged.",
        "Move both all-reduces behind the loop over the micro-batches; inside it, "
        "loss += part.detach() / ranks.")),
    Exercise(slow.train_on_functions, check_train_on_functions, hints=(
        "Each rank has as many piles as the others. What else must be alike?",
        "The piles are sorted: neighbours are alike, and a row of them is short or long. Give each "
        "rank some of each kind. There are two places.",
        "piles[rank::2 * ranks] + piles[2 * ranks - 1 - rank::2 * ranks]: from the short end and "
        "from the long end in turn.")),
)

LARGE_CASE, FUNCTIONS_CASE = slow.SLOW
PREDICTIONS_SLOW = (
    cause_of(
        LARGE_CASE,
        "all ranks do the same work: the same windows, calls and bytes",
        "that costs calls, not bytes; and the bytes are 8 times those of a gradient",
        "that would be half of the bytes, and 8 times too many are sent",
        "the bytes of a step are 8 times those of the model's gradient",
        hint="Compare two numbers: the bytes that a rank sends in a step, and those of a gradient.",
        why="A step sends 658,464 bytes in 88 calls; one gradient and a loss are 82,308 in 11."),
    cause_of(
        FUNCTIONS_CASE,
        "another card has changed nothing, and its time goes with its tokens",
        "each rank has 8 functions in a step, in 4 piles",
        "it comes last into each all-reduce, and waits there the least",
        "its time goes into forward and backward: look at its timeline",
        hint="How long does each rank compute, and for how many tokens?",
        why="The batch is sorted by length; the last rank has its end, nearly half of all work."),
)
