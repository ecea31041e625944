"""top_k_route, capacity and load_balance_loss: compared with plain loops over tokens."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ranklab.checks.expert_parallel.inputs import error_of
from ranklab.checks.expert_parallel.ties import UnstableSorts
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.expert_parallel import capacity, expert_slots, load_balance_loss, top_k_route

NOISE = 1e-6  # below it a gradient that is 0 is only rounded
GRADIENT = "the gradient of logits"
AFTERWARDS = "`logits` afterwards", "`chosen` afterwards", "`bias` afterwards"


def normal(shape, seed, dtype=torch.float32, plus=0):
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=random)).to(dtype) + plus


def gradient_of(logits):
    return logits.grad if logits.grad is None else logits.grad.where(logits.grad.abs() > NOISE, 0)


# --- top_k_route ----------------------------------------------------------------------------------

class Routing(NamedTuple):
    """One call; `draw` makes the logits."""

    name: str
    draw: Callable
    k: int
    renormalize: bool = True
    bias: tuple | None = None

    def __str__(self):
        return (f"{self.name}, k={self.k}, renormalize={self.renormalize}"
                + ", with a bias" * (self.bias is not None))


def _see_route(fn, case):
    logits = case.draw().requires_grad_()
    bias = None if case.bias is None else torch.tensor(case.bias)
    with UnstableSorts():
        results = fn(logits, case.k, case.renormalize, bias)
    is_pair = isinstance(results, tuple) and len(results) == 2
    chosen, weights = results if is_pair else (results, None)
    factors = normal((*logits.shape[:-1], max(case.k, 0)), 9)
    if isinstance(weights, torch.Tensor) and weights.requires_grad and (
            weights.shape == factors.shape):
        (weights * factors).sum().backward()
    yield {"chosen": chosen, "weights": weights, GRADIENT: gradient_of(logits),
           "`logits` afterwards": logits, "`bias` afterwards": bias}


def _see_refusal(fn, case):
    yield {"the error": error_of(lambda: fn(case.draw(), case.k))}


def by_python_sort(logits, k, renormalize=True, bias=None):
    """Choose by Python's sort; weigh in float64, where no probability is 0."""
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k={k}")
    P = logits.double().softmax(-1)
    scores = logits.double() if bias is None else P + bias
    rows = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
            for row in scores.flatten(0, -2).tolist()]
    chosen = torch.tensor(rows).view(*logits.shape[:-1], k)
    weights = P.gather(-1, chosen)
    return chosen, (weights / weights.sum(-1, keepdim=True) if renormalize else weights).float()


def _both(name, draw, k, bias=None):
    return tuple(Routing(name, draw, k, renormalize, bias) for renormalize in (True, False))


BIAS = 0.3, 0.0, -0.2, 0.1, 0.0, 0.4, 0.0, -0.5
PLAIN = sum((_both(f"logits {shape}", partial(normal, shape, k), k) for shape, k in (
    ((2, 5, 8), 2), ((7, 4), 1), ((3, 2, 4), 4), ((1, 9, 6), 3))), ())
EQUAL = tuple(
    Routing(f"equal logits of {E} experts", lambda E=E: torch.randint(
        3, (4, 16, E), generator=torch.Generator().manual_seed(0)).float(), 3, True, bias)
    for E in (8, 64) for bias in (None, (0.0,) * E))
LARGE = (
    Routing("logits around 200", partial(normal, (2, 4, 8), 1, plus=200), 2),
    *_both("logits that are far apart",
           lambda: torch.tensor([[200.0, 0, 50, 1], [-90, 20, 200, 21]]), 2),
    *_both("bfloat16", partial(normal, (2, 6, 8), 2, torch.bfloat16), 2),
    *_both("float64", partial(normal, (2, 6, 8), 2, torch.float64), 2))
BIASED = (
    *_both("logits (3, 7, 8)", partial(normal, (3, 7, 8), 4), 2, BIAS),
    Routing("a probability of 0 in float32 is chosen",
            lambda: torch.tensor([[0.0, 200, 201], [200, 1, 0]]), 1, True, (2.7, 0.0, -1.8)),
    *_both("bfloat16", partial(normal, (8, 64, 8), 2, torch.bfloat16), 2, BIAS))
REFUSED = tuple(Routing("8 experts", partial(normal, (2, 8), 1), k) for k in (-1, 0, 9))

CHOICE = "scores.argsort(dim=-1, descending=True, stable=True)[..., :k]"
SCORES = "logits if bias is None else logits.softmax(-1) + bias"
AMONG_K = "logits.gather(-1, chosen).softmax(-1)"
AMONG_ALL = "logits.softmax(-1).gather(-1, chosen)"
NORMAL = f"({AMONG_ALL} / {AMONG_ALL}.sum(-1, keepdim=True))"
WITH_BIAS = "(logits.softmax(-1) + (0 if bias is None else bias)).gather(-1, chosen)"
FLOAT, REFUSES = "logits = logits.float()", "if not 1 <= k <= logits.shape[-1]:"
ROUTE = Proof(
    top_k_route,
    Stage({"the k best, with weights that add up to 1, or from the softmax over all": (),
           "the weights have their gradient; `logits` stay as they are": (GRADIENT, *AFTERWARDS)},
          _see_route, PLAIN, oracle=by_python_sort),
    Stage("of equal scores the first", _see_route, EQUAL, oracle=by_python_sort,
          note=("Here many scores are equal, and the first of them wins. A sort without "
                "stable=True, or topk, can return equal scores in any order.")),
    Stage("also large logits, bfloat16 and float64", _see_route, LARGE, oracle=by_python_sort,
          through=torch.float32),
    Stage("a bias changes the choice but not the weights; it may choose a probability of 0",
          _see_route, BIASED, oracle=by_python_sort),
    Stage("k below 1 or above E is a ValueError", _see_refusal, REFUSED, oracle=by_python_sort),
    mistakes=(
        Slip("These are the worst experts: sort with descending=True.",
             ("descending=True", "descending=False")),
        Slip("The best comes first, not last.", (CHOICE, f"{CHOICE}.flip(-1)")),
        Slip("The k experts are in numerical order. The best must come first.",
             (CHOICE, f"{CHOICE}.sort(-1).values")),
        Slip("Among equal scores, the first one wins. topk and a plain argsort do not guarantee "
             "that: use argsort(descending=True, stable=True).", ("descending=True, stable=True",
                                                        "descending=True"),
             (CHOICE, "scores.topk(k).indices"),
             (CHOICE, "scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :k].neg()"
              " + logits.shape[-1] - 1")),
        Slip("The weights are float32, even for float64 logits.",
             (FLOAT, "logits = logits.float() if logits.itemsize < 4 else logits")),
        Slip("Return chosen first, then the weights.",
             (f"return chosen, {AMONG_K}", f"return {AMONG_K}, chosen"),
             (f"return chosen, {AMONG_K}", f"return {AMONG_K}, chosen",
              f"return chosen, {AMONG_ALL}", f"return {AMONG_ALL}, chosen")),
        Slip("With renormalize=True, a token's k weights add up to 1.", (AMONG_K, AMONG_ALL)),
        Slip("With renormalize=False, take the weights from the softmax over all experts, "
             "unchanged.",
             (AMONG_ALL, AMONG_K)),
        Slip("The two cases are swapped: with renormalize=True, the softmax is over the k logits.",
             ("if renormalize:", "if not renormalize:")),
        Slip("Turn logits into weights with a softmax.", (AMONG_ALL, "logits.gather(-1, chosen)"),
             (AMONG_K, AMONG_K.replace("softmax(-1)", "sigmoid()")),
             (AMONG_K, "torch.nn.functional.normalize(logits.gather(-1, chosen), p=1, dim=-1)"),
             (AMONG_ALL, AMONG_ALL.replace("softmax(-1)", "sigmoid()"))),
        Slip("This is a softmax of probabilities. Take it over the k logits.",
             (AMONG_K, f"{AMONG_ALL}.softmax(-1)")),
        Slip("Experts are the last dimension: softmax(-1), argsort(dim=-1).",
             (AMONG_K, AMONG_K.replace("softmax(-1)", "softmax(0)")),
             (AMONG_ALL, AMONG_ALL.replace("softmax(-1)", "softmax(0)")),
             (AMONG_ALL, AMONG_ALL.replace("softmax(-1)", "softmax(1)"))),
        Slip("Without a bias, choose the largest logits: in float32, several probabilities may "
             "underflow to 0.",
             (SCORES, "logits.softmax(-1) + (0 if bias is None else bias)")),
        Slip("The bias is not used: it must affect which experts are chosen.", (SCORES, "logits")),
        Slip("Add the bias to the probabilities, not to the logits.",
             (SCORES, "logits if bias is None else logits + bias"),
             (FLOAT, "logits = logits.float() + (0 if bias is None else bias)")),
        Slip("The bias affects which experts are chosen, but never their weights.",
             (AMONG_ALL, WITH_BIAS),
             (AMONG_K, f"{WITH_BIAS} / {WITH_BIAS}.sum(-1, keepdim=True)"),
             (AMONG_K, f"{WITH_BIAS} / {WITH_BIAS}.sum(-1, keepdim=True)", AMONG_ALL, WITH_BIAS)),
        Slip("The k chosen probabilities may all be 0, and 0 / 0 is nan. Take the softmax of the k "
             "logits.", (AMONG_K, NORMAL)),
        Slip("exp() of a logit of 200 is infinite in float32. softmax() subtracts the largest "
             "logit first.", (AMONG_K, "(logits.exp().gather(-1, chosen) / logits.exp().gather("
                              "-1, chosen).sum(-1, keepdim=True))"),
             (FLOAT, "logits = logits.float().exp().log()")),
        Slip("The softmax is computed in 16 bits, where sums of exp lose precision: call .float() "
             "first.",
             (FLOAT, "pass", AMONG_K, f"{AMONG_K}.float()", AMONG_ALL, f"{AMONG_ALL}.float()"),
             (AMONG_ALL, "logits.bfloat16().softmax(-1).gather(-1, chosen).float()"),
             (AMONG_K, "logits.gather(-1, chosen).bfloat16().softmax(-1).float()")),
        Slip("The weights are float32, whatever the dtype of the logits: call .float() first.",
             (FLOAT, "pass"),
             (FLOAT, f"dtype = logits.dtype\n    {FLOAT}", AMONG_K, f"{AMONG_K}.to(dtype)",
              AMONG_ALL, f"{AMONG_ALL}.to(dtype)")),
        Slip("The router learns only through the weights: compute them from `logits` with torch "
             "operations, without detach() or no_grad().", (AMONG_K, f"{AMONG_K}.detach()"),
             (AMONG_ALL, f"{AMONG_ALL}.detach()"), (FLOAT, "logits = logits.detach().float()")),
        Slip("The sum that you divide by also has a gradient: softmax() of the k logits includes "
             "both.",
             (AMONG_K, NORMAL.replace("keepdim=True)", "keepdim=True).detach()"))),
        Slip("`logits` is an argument: work on a copy.",
             (FLOAT, "logits -= logits.max(-1, keepdim=True).values\n    logits = logits.float()"),
             (FLOAT, "logits.data -= logits.data.max(-1, keepdim=True).values\n    "
              "logits = logits.float()")),
        Slip("`bias` is an argument: `bias += ...` changes it.",
             (SCORES, "logits if bias is None else bias.add_(0.001) - 0.001 + logits.softmax(-1)")),
        Slip("Raise ValueError for k below 1 or above E: a slice [..., :k] accepts any k.",
             (REFUSES, "if k > logits.shape[-1]:"), (REFUSES, "if k < 1:"), (REFUSES, "if False:"),
             (REFUSES, "if k < 0 or k > logits.shape[-1]:"), ("raise ValueError(", "assert not (")),
    ), hints=(
        "Which numbers decide the choice of experts, and which say how much each expert counts?",
        "A stable argsort of the scores chooses the experts. The weights are a softmax of the "
        "chosen logits, or a softmax of all logits, gathered at the chosen experts.",
        "scores = logits if bias is None else logits.softmax(-1) + bias; scores.argsort(dim=-1, "
        "descending=True, stable=True)[..., :k]; logits.gather(-1, chosen).softmax(-1), or the two "
        "the other way round",
    ))


# --- capacity -------------------------------------------------------------------------------------

class Crowd(NamedTuple):
    """Choices of shape (..., T, k) that favour later experts."""

    shape: tuple
    n_experts: int
    factor: float

    def __str__(self):
        T, k = self.shape[-2:]
        room = math.ceil(self.factor * T * k / self.n_experts)
        return (f"{T} tokens, k={k}, {self.n_experts} experts, factor={self.factor:g}: room for "
                f"{room}")

    def chosen(self):
        bias = torch.arange(self.n_experts) / 2
        logits = normal((*self.shape[:-1], self.n_experts), 5) + bias
        return logits.topk(self.shape[-1], dim=-1).indices


def _see_capacity(fn, case):
    chosen = case.chosen()
    result = fn(chosen, case.n_experts, case.factor)
    yield {"the result": result, "`chosen` afterwards": chosen}


def token_by_token(chosen, n_experts, factor):
    T, k = chosen.shape[-2:]
    out, room = chosen.clone(), math.ceil(factor * T * k / n_experts)
    for sequence in out.view(-1, T, k):
        counts = [0] * n_experts
        for j in range(k):
            for t in range(T):
                e = int(sequence[t, j])
                counts[e] += 1
                if counts[e] > room:
                    sequence[t, j] = -1
    return out


def _of_all_sequences(chosen, n_experts, factor):
    T, k = chosen.shape[-2:]
    out, room, counts = chosen.clone(), expert_slots(T, n_experts, k, factor), [0] * n_experts
    for sequence in out.view(-1, T, k):
        for j in range(k):
            for t in range(T):
                e = int(sequence[t, j])
                counts[e] += 1
                if counts[e] > room:
                    sequence[t, j] = -1
    return out


FIRST = "by_choice = chosen.transpose(-1, -2).flatten(-2)"
BACK = "allowed.unflatten(-1, (k, T)).transpose(-1, -2)"
HAS_ROOM = "place <= expert_slots(T, n_experts, k, factor)"
COUNTED = "choices.cumsum(-2)"
CAPACITY = Proof(
    capacity,
    Stage({"in each sequence an expert takes as many tokens as it has room for; the other choices "
           "become -1": (),
           "`chosen` stays as it is": AFTERWARDS},
          _see_capacity, tuple(Crowd(*each) for each in (
              ((3, 10, 2), 4, 0.75), ((2, 16, 2), 4, 1.0), ((2, 3, 9, 1), 4, 1.0),
              ((12, 3), 8, 0.5), ((1, 20, 2), 6, 9.0), ((2, 8, 1), 8, 0.75))),
          oracle=token_by_token),
    mistakes=(
        Slip("Places are counted token by token. All first choices must come before any second "
             "choice, whatever the token.", (FIRST, "by_choice = chosen.flatten(-2)", BACK,
                            "allowed.unflatten(-1, (T, k))")),
        Slip("Second choices queue behind all first choices: continue counting instead of "
             "restarting for each choice.",
             (COUNTED, "choices.unflatten(-2, (k, T)).cumsum(-2).flatten(-3, -2)")),
        Slip("The last tokens get the room. Earlier tokens must come first.",
             (FIRST, f"{FIRST.replace('chosen', 'chosen.flip(-2)')}", BACK, f"{BACK}.flip(-2)")),
        Slip("The last choices come first in the row. All first choices must come before all "
             "second choices.",
             (FIRST, f"{FIRST.replace('chosen', 'chosen.flip(-1)')}", BACK, f"{BACK}.flip(-1)")),
        Slip("Each expert accepts one token too few: counted from 1, the last place is `room` "
             "itself.",
             ("place <=", "place <")),
        Slip("Each expert accepts one token too many: the place of its first token is 1.",
             (HAS_ROOM, f"{HAS_ROOM} + 1"),
             ("place <=", "place - 1 <=")),
        Slip("Round up, not down: see expert_slots.",
             (HAS_ROOM, "place <= int(T * k / n_experts * factor)")),
        Slip("Round up, not to the nearest integer: see expert_slots.",
             (HAS_ROOM, "place <= round(T * k / n_experts * factor)")),
        Slip("The mean is rounded before it is multiplied. Multiply by `factor` first, then round "
             "up.", (HAS_ROOM, "place <= -(-T * k // n_experts) * factor")),
        Slip("Each token needs k places: the mean load is T k / E.",
             (HAS_ROOM, "place <= expert_slots(T, n_experts, 1, factor)")),
        Slip("There is no minimum: an expert may have room for just one token.",
             (HAS_ROOM, f"(place <= 2) | ({HAS_ROOM})")),
        Slip("`factor` is missing: the room is `factor` times the mean load.",
             (HAS_ROOM, "place <= expert_slots(T, n_experts, k, 1)")),
        Slip("Nothing is dropped: put -1 where an expert has no room.",
             (HAS_ROOM, "place > 0")),
        Slip("This is the wrong way round: choices with room stay, and the others become -1.",
             ("place <=", "place >")),
        Slip("Whole tokens are dropped. A token must keep its other choices.",
             (BACK, f"(each := {BACK}).where((each >= 0).all(-1, keepdim=True), -1)")),
        Slip("A choice that has no room becomes -1.", (", -1)\n", ", n_experts)\n"),
             (", -1)\n", ", 0)\n")),
        Slip("All sequences are counted together. Count each one separately: otherwise what is "
             "dropped depends on which rows a rank has.", _of_all_sequences),
        Slip("Undo the flattening: unflatten(-1, (k, T)), then transpose.",
             (BACK, "allowed.unflatten(-1, (T, k))")),
        Slip("`chosen` is an argument: work on a copy.", (BACK, f"chosen.copy_({BACK})")),
    ), hints=(
        "Each token has a numbered place in its expert's queue. How many tokens are ahead of this "
        "one?",
        "Put all first choices in a row, then all second choices. A cumsum of that row's one-hot "
        "matrix counts, for each expert, how many have come so far.",
        "row = chosen.transpose(-1, -2).flatten(-2); place = one_hot(row, n_experts).cumsum(-2)"
        ".gather(-1, row[..., None])[..., 0]; row.where(place <= room, -1), and back again",
    ))


# --- load_balance_loss ----------------------------------------------------------------------------

class Loads(NamedTuple):
    """One call; `draw` makes (logits, chosen)."""

    name: str
    draw: Callable

    def __str__(self):
        return self.name


def _the_best(shape, k, dtype, n_chosen):
    """Return the k best among the first `n_chosen` experts."""
    logits = normal(shape, k, dtype)
    return logits, logits[..., :n_chosen].topk(k).indices


def _any(shape, k, dtype, n_chosen):
    """Return choices that are not the k best, as when a bias decides."""
    random = torch.Generator().manual_seed(3)
    scores = torch.rand(*shape[:-1], n_chosen, generator=random)
    return normal(shape, k, dtype), scores.argsort(-1)[..., :k]


def _even():
    return torch.zeros(2, 8, 4), torch.arange(8).view(1, 8, 1).expand(2, 8, 1) % 4


def _one_has_all():
    return torch.tensor([50.0, 0, 0, 0]).repeat(1, 8, 1), torch.zeros(1, 8, 1).long()


def _see_loss(fn, case):
    logits, chosen = case.draw()
    logits.requires_grad_()
    loss = fn(logits, chosen)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.sum().backward()
    yield {"the loss": loss, GRADIENT: gradient_of(logits), "`logits` afterwards": logits,
           "`chosen` afterwards": chosen}


def expert_by_expert(logits, chosen):
    """Compute the loss expert by expert, in float64."""
    (T, E), k, P = logits.shape[-2:], chosen.shape[-1], logits.double().softmax(-1)
    terms = [(chosen == e).sum((-2, -1)) / (T * k) * P[..., e].mean(-1) for e in range(E)]
    return (E * sum(terms)).float()


CASES = tuple(
    Loads(f"logits {shape}, k={k}, {str(dtype)[6:]}, chosen are {name}"
          + "; no token chooses the last expert" * but_last,
          partial(draw, shape, k, dtype, shape[-1] - but_last))
    for shape, k, dtype, but_last in (
        ((3, 8, 4), 2, torch.float32, False), ((2, 2, 5, 6), 1, torch.float32, True),
        ((7, 4), 3, torch.float32, False), ((2, 16, 8), 2, torch.bfloat16, False),
        ((2, 12, 6), 2, torch.float32, True))
    for name, draw in (("the k best", _the_best), ("any experts", _any)))
COUNTS = "torch.nn.functional.one_hot(chosen.flatten(-2), E).sum(-2)"
PART = "counts / chosen[..., 0].shape[-1] / chosen.shape[-1]"
MEAN = "logits.float().softmax(-1).mean(-2)"
LOSS = f"E * (part * {MEAN}).sum(-1)"
LOAD_BALANCE = Proof(
    load_balance_loss,
    Stage({"E times the sum of f_e P_e, for each sequence": (),
           "the gradient of P; arguments stay as they are": (GRADIENT, *AFTERWARDS)},
          _see_loss, CASES, oracle=expert_by_expert),
    Stage("even loads give 1, one expert for all tokens gives E", _see_loss,
          (Loads("even loads", _even), Loads("one expert has all", _one_has_all)),
          oracle=expert_by_expert),
    mistakes=(
        Slip("Multiply the sum over experts by E, so that even loads give 1; a mean over experts "
             "would divide by E.", ("return E * ", "return "),
             (LOSS, LOSS.replace(".sum(-1)", ".mean(-1)"))),
        Slip("E is the number of experts, not the number of choices per token.",
             ("return E * ", "return chosen.shape[-1] * ")),
        Slip("Divide by k as well: f is a fraction of all T k choices.",
             (PART, "counts / chosen[..., 0].shape[-1]")),
        Slip("This f is a count. Divide it by T k: f is a fraction of all choices.",
             (PART, "counts")),
        Slip("The loss is T times too large: f is divided by T k, and P is a mean over T tokens.",
             (PART, "counts / chosen.shape[-1]"), (MEAN, MEAN.replace("mean", "sum"))),
        Slip("This is P times P: f must come from counting choices.",
             (LOSS, f"E * {MEAN}.square().sum(-1)")),
        Slip("This is f times f: P is the router's mean probability for an expert, chosen or not.",
             (LOSS, "E * part.square().sum(-1)")),
        Slip("P is the mean of all tokens' probabilities, including tokens that chose other "
             "experts.",
             (MEAN, "(logits.float().softmax(-1) * torch.nn.functional.one_hot(chosen, E).sum(-2))"
              ".mean(-2)")),
        Slip("Return one number for each sequence, not their mean.", (LOSS, f"({LOSS}).mean()")),
        Slip("Return one number for each sequence, not their sum.", (LOSS, f"({LOSS}).sum()")),
        Slip("f and P are means over all sequences here. Each sequence needs its own: otherwise "
             "the loss depends on which rows a rank has.",
             (LOSS, f"E * (part.view(-1, E).mean(0) * {MEAN}.view(-1, E).mean(0)).sum()")),
        Slip("Sum over the experts: the result has one number for each sequence.",
             (LOSS, LOSS.replace(".sum(-1)", ""))),
        Slip("P comes from a softmax over the experts.", (".softmax(-1)", ".sigmoid()")),
        Slip("Take the softmax over the experts, the last dimension: softmax(-1).",
             (".softmax(-1)", ".softmax(-2)")),
        Slip("Take the mean after the softmax: P is a mean of probabilities, not a softmax of mean "
             "logits.",
             (MEAN, "logits.float().mean(-2).softmax(-1)")),
        Slip("Count all k choices of a token, not just the first.",
             (COUNTS, COUNTS.replace("chosen.flatten(-2)", "chosen[..., 0]")),
             (COUNTS, COUNTS.replace("chosen.flatten(-2)", "chosen[..., 0]"), PART,
              "counts / chosen.shape[-2]")),
        Slip("Count what is in `chosen`: with a bias, these are not the k largest logits.",
             (COUNTS, COUNTS.replace("chosen.flat", "logits.topk(chosen.shape[-1]).indices.flat"))),
        Slip("No token chose the last expert here: one_hot needs E, and bincount needs "
             "minlength=E.",
             (COUNTS, COUNTS.replace(", E)", ")"))),
        Slip("Sums of exp lose precision in 16 bits: call .float() first.",
             ("logits.float()", "logits"),
             (MEAN, "logits.softmax(-1).mean(-2).float()")),
        Slip("The loss is float32, whatever the dtype of the logits.",
             (LOSS, f"({LOSS}).to(logits.dtype)")),
        Slip("P needs a gradient: don't use detach() or no_grad().", (MEAN, f"{MEAN}.detach()"),
             (MEAN, "logits.detach().float().softmax(-1).mean(-2)")),
        Slip("f comes from a count and has no gradient. Only P has one.",
             (PART, f"{PART} + {MEAN} - {MEAN}.detach()")),
        Slip("`logits` is an argument: work on a copy.",
             (LOSS, f"[{LOSS}, logits.data.neg_()][0]")),
    ), hints=(
        "Which of the two factors can the router change by small amounts?",
        "For f, count how often each expert is chosen in a sequence, and divide by T k. For P, "
        "take the softmax of the logits, then the mean over tokens.",
        "one_hot(chosen.flatten(-2), E).sum(-2) / (T * k); E * (f * logits.float().softmax(-1)"
        ".mean(-2)).sum(-1)",
    ))
