"""The checks of top_k_route, capacity and load_balance_loss: beside plain loops over tokens."""

import math
from functools import partial

import torch

from ranklab.checks.beside import expect, refused
from ranklab.checks.trial import explain

TIES = "equal logits", "equal logits and a bias"
STABLE = ("Of equal scores the first counts as better. topk promises nothing about equals: "
          "argsort(descending=True, stable=True).")
NOISE = 1e-6  # below it a gradient that is 0 is only rounded
IN_FLOAT32 = "Sums of exp go wrong in 16 bits: .float() first."
ZEROS = "The best k probabilities may all be 0, and 0 / 0 is nan. Take the softmax of the k logits."


def _logits(shape, seed, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=random)).to(dtype)


# --- top_k_route ----------------------------------------------------------------------------------

def _best(scores, k):
    """The k best of each row, by a plain sort; of equals the first."""
    rows = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
            for row in scores.flatten(0, -2).double().tolist()]
    return torch.tensor(rows).view(*scores.shape[:-1], k)


def _but_noise(gradient):
    return gradient.where(gradient.abs() > NOISE, 0)


def _route(top_k_route, name, logits, k, renormalize, bias=None):
    kept = logits.clone()
    given = logits.clone().requires_grad_()
    got = top_k_route(given, k, renormalize, bias)
    expect(isinstance(got, tuple) and len(got) == 2, f"{name}: not two tensors",
           "Return chosen and weights.")
    chosen, weights = got
    P = kept.float().softmax(-1)
    scores = kept.float() if bias is None else P + bias
    right = _best(scores, k)
    explain(f"{name}: chosen", chosen, right, {
        "the worst": (_best(-scores, k), "descending=True."),
        "the best, in another order": (right.flip(-1), "The best comes first."),
        **({"what probabilities choose": (_best(P, k), "Without a bias the largest logits choose: "
                                          "in float32 several probabilities may be 0.")}
           if bias is None else {}),
        "chosen without the bias": (_best(kept.float(), k), "The bias is added where experts are "
                                    "chosen."),
        "chosen by logits and bias": (_best(kept.float() + (0 if bias is None else bias), k),
                                      "The bias is added to the probabilities."),
    }, STABLE if name in TIES else "")
    best = P.gather(-1, right)
    raw = kept.float().gather(-1, right)
    normal = raw.softmax(-1)
    biased = {} if bias is None else {"weights with the bias": scores.gather(-1, right)}
    biased |= {"normalised with the bias": w / w.sum(-1, keepdim=True) for w in biased.values()}
    explain(f"{name}: weights", weights, normal if renormalize else best, {
        "probabilities among all experts": (best, "renormalize=True: the k weights of a token add "
                                            "up to 1."),
        "probabilities among the k": (normal, "renormalize=False: the softmax over all experts, "
                                      "unchanged."),
        "logits": (raw / raw.sum(-1, keepdim=True) if renormalize else raw, "A softmax makes "
                   "weights of them."),
        **{slip: (w, "The bias chooses, but never weighs.") for slip, w in biased.items()},
        **({"a softmax of probabilities": (best.softmax(-1), "The softmax goes over the k "
                                           "logits.")} if renormalize else {}),
    }, IN_FLOAT32 if logits.dtype == torch.bfloat16 else ZEROS if weights.isnan().any() else "")
    expect(weights.requires_grad, f"{name}: weights have no gradient", "The router learns through "
           "the weights alone: compute them from `logits` by torch's operations.")
    factors = _logits(weights.shape, 9)
    (weights * factors).sum().backward()
    other = kept.float().requires_grad_()
    again = (other.gather(-1, right).softmax(-1) if renormalize else
             other.softmax(-1).gather(-1, right))
    (again * factors).sum().backward()
    explain(f"{name}: the gradient of logits", _but_noise(given.grad),
            _but_noise(other.grad.to(logits.dtype)))
    expect(torch.equal(given.detach(), kept), f"{name}: `logits` is changed", "Work on a copy.")


def check_top_k_route(top_k_route):
    for shape, k in (((2, 5, 8), 2), ((7, 4), 1), ((3, 2, 4), 4), ((1, 9, 6), 3)):
        for renormalize in (True, False):
            name = f"logits {shape}, k={k}, renormalize={renormalize}"
            _route(top_k_route, name, _logits(shape, k), k, renormalize)
    yield "the k best, with weights that add up to 1, or from the softmax over all"
    for E in (8, 64):  # of few numbers a sort is stable by chance
        equal = torch.randint(3, (4, 16, E), generator=torch.Generator().manual_seed(0)).float()
        _route(top_k_route, "equal logits", equal, 3, True)
        _route(top_k_route, "equal logits and a bias", equal, 3, True, torch.zeros(E))
    _route(top_k_route, "logits around 200", _logits((2, 4, 8), 1) + 200, 2, True)
    apart = torch.tensor([[200.0, 0, 50, 1], [-90, 20, 200, 21]])
    bias = torch.tensor([0.3, 0.0, -0.2, 0.1, 0.0, 0.4, 0.0, -0.5])
    for renormalize in (True, False):
        _route(top_k_route, f"logits that are far apart, renormalize={renormalize}", apart, 2,
               renormalize)
        for shape, more in (((2, 6, 8), None), ((8, 64, 8), bias)):
            name = f"bfloat16, renormalize={renormalize}{', with a bias' * (more is not None)}"
            _route(top_k_route, name, _logits(shape, 2, torch.bfloat16), 2, renormalize, more)
    yield "of equals the first; large logits and bfloat16 too; the weights have their gradient"
    for renormalize in (True, False):
        _route(top_k_route, f"with a bias, renormalize={renormalize}", _logits((3, 7, 8), 4), 2,
               renormalize, bias)
    far = torch.tensor([[0.0, 200, 201], [200, 1, 0]])  # in float32 a probability of 0
    _route(top_k_route, "logits that are far apart, with a bias", far, 1, True, bias[:3] * 9)
    yield "a bias chooses, and does not change weights; it may choose a probability of 0"
    for k in (-1, 0, 9):
        refused(f"k={k} of 8", partial(top_k_route, _logits((2, 8), 1), k))()
    yield "k below 1 or above E is a ValueError"


# --- capacity -------------------------------------------------------------------------------------

def _kept(chosen, room, by_choice=True, together=False):
    """What has room, by loops; `together` over all sequences."""
    T, k = chosen.shape[-2:]
    found, taken = [], {}
    for sequence in chosen.reshape(-1, T, k).tolist():
        taken = taken if together else {}
        rows = [[-1] * k for _ in range(T)]
        places = [(t, j) for j in range(k) for t in range(T)] if by_choice else [
            (t, j) for t in range(T) for j in range(k)]
        for t, j in places:
            e = sequence[t][j]
            taken[e] = taken.get(e, 0) + 1
            if taken[e] <= room:
                rows[t][j] = e
        found.append(rows)
    return torch.tensor(found).view_as(chosen)


def check_capacity(capacity):
    for shape, E, factor in (((2, 16, 2), 4, 1.0), ((3, 10, 2), 4, 0.75), ((2, 3, 9, 1), 4, 1.0),
                             ((12, 3), 8, 0.5), ((1, 20, 2), 6, 9.0), ((2, 8, 1), 8, 0.75)):
        logits = _logits((*shape[:-1], E), 5) + torch.arange(E) / 2  # late experts are wanted more
        chosen, (T, k) = logits.topk(shape[-1], dim=-1).indices, shape[-2:]
        share = T * k / E
        room, given = math.ceil(factor * share), chosen.clone()
        where = f"{T} tokens, k={k}, {E} experts, factor={factor:g}: room for {room}"
        got, right = capacity(given, E, factor), _kept(chosen, room)
        whole = right.where((right >= 0).all(-1, keepdim=True), -1)
        explain(where, got, right, {
            "kept token by token": (_kept(chosen, room, by_choice=False), "First choices come "
                                    "before second ones, whatever the token."),
            "room for all sequences together": (_kept(chosen, room, together=True), "Each sequence "
                                                "counts alone: otherwise what is dropped depends "
                                                "on the rows that a rank has."),
            "rounded down": (_kept(chosen, math.floor(factor * share)), "Rounded up: see "
                             "expert_slots."),
            "room for one fewer": (_kept(chosen, room - 1), f"The {room} first ones have room: "
                                   "cumsum counts from 1."),
            "room for one more": (_kept(chosen, room + 1), "cumsum counts from 1: the place of an "
                                  "expert's first token is 1."),
            "without k": (_kept(chosen, math.ceil(factor * share / k)), "A token wants k places: "
                          "the mean load is T k / E."),
            "`chosen` as it was": (chosen, ""),
            "whole tokens dropped": (whole, "A token keeps its other choices."),
            "the last ones kept": (_kept(chosen.flip(-2), room).flip(-2), "Early tokens come "
                                   "first."),
        }, "Count, for each place, how many before it want the same expert.")
        expect(torch.equal(given, chosen), f"{where}: `chosen` is changed", "Return a copy.")
    yield "in each sequence an expert takes as many as it has room for; the others have -1"
    yield "first choices before second ones, then early tokens; `chosen` stays as it is"


# --- load_balance_loss ----------------------------------------------------------------------------

def _any_experts(shape, k, seed, but_last):
    """Choices that are not the k best, as where a bias chooses; perhaps never the last expert."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(*shape[:-1], shape[-1] - but_last, generator=random).argsort(-1)[..., :k]


def check_load_balance_loss(load_balance_loss):
    for shape, k, dtype, but_last in (
            ((3, 8, 4), 2, torch.float32, False), ((2, 2, 5, 6), 1, torch.float32, True),
            ((7, 4), 3, torch.float32, False), ((2, 16, 8), 2, torch.bfloat16, False),
            ((2, 12, 6), 2, torch.float32, True)):
        logits = _logits(shape, k, dtype)
        more = "; nobody chooses the last expert" if but_last else ""
        for how, chosen in (("the k best", logits[..., : shape[-1] - but_last].topk(k).indices),
                            ("any experts", _any_experts(shape, k, 3, but_last))):
            where = f"logits {shape}, k={k}, {str(dtype)[6:]}, chosen are {how}{more}"
            _balance(load_balance_loss, where, logits, chosen)
    yield "E times the sum of f_e P_e, for each sequence, with the gradient of P"
    even = torch.arange(8).view(1, 8, 1).expand(2, 8, 1) % 4
    _balance(load_balance_loss, "even loads", torch.zeros(2, 8, 4), even)
    _balance(load_balance_loss, "one expert has all", torch.tensor([50.0, 0, 0, 0]).expand(1, 8, 4),
             0 * even[:1])
    yield "even loads have 1, one expert for all has E"


def _balance(load_balance_loss, where, logits, chosen):
    (T, E), k = logits.shape[-2:], chosen.shape[-1]
    P = logits.clone().float().requires_grad_()
    counts = torch.zeros(*logits.shape[:-2], E).scatter_add(
        -1, chosen.flatten(-2), torch.ones(chosen.flatten(-2).shape))
    f, mean = counts / (T * k), P.softmax(-1).mean(-2)
    right = E * (f * mean).sum(-1)
    given, kept = logits.clone().requires_grad_(), chosen.clone()
    got = load_balance_loss(given, kept)
    flat = f.reshape(-1, E).mean(0), mean.reshape(-1, E).mean(0)
    explain(where, got, right, {
        "without E": (right / E, "Times E: even loads have 1."),
        "with f of all choices": (right * k, "f is a part of all T k choices."),
        "a count, not a part": (right * T * k, "f is a part of all T k choices."),
        "a sum over tokens": (right * T, "P is a mean over tokens."),
        "P squared": (E * mean.square().sum(-1), "f counts choices."),
        "f squared": (E * f.square().sum(-1), "P is the router's mean probability, chosen or not."),
        "one number for all sequences": (E * (flat[0] * flat[1]).sum(), "Each sequence has its "
                                         "own: else it depends on the rows that a rank has."),
        "the mean of all sequences": (right.mean(), "Return one for each sequence."),
    }, "E times the sum over e of f_e P_e.")
    expect(got.requires_grad, f"{where}: no gradient", "P has one: it comes from `logits`.")
    got.sum().backward()
    right.sum().backward()
    explain(f"{where}: the gradient of logits", _but_noise(given.grad),
            _but_noise(P.grad.to(logits.dtype)), {},
            "f is a count, and has no gradient. P has the gradient of the softmax.")
    expect(torch.equal(given.detach(), logits) and torch.equal(kept, chosen),
           f"{where}: an argument is changed", "Work on a copy.")
