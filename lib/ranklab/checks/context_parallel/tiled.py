"""tiled_logits_loss, compared with the loss of all logits at once: values, peak bytes, FLOPs."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.basics.targets import IGNORE
from ranklab.checks.baseline.whole_batch import one_thread, times_right
from ranklab.checks.flops import add_flops
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told, must_refuse
from ranklab.context_parallel.tiled import tiled_logits_loss
from ranklab.engine import device
from ranklab.meter import MemoryPeak
from ranklab.meter.watcher import Watcher
from ranklab.models.gpt import cross_entropy

C, V = 16, 50
GROWS, PEAK, WORK = "what the peak grows with", "bytes at the peak", "FLOPs"


class Case(NamedTuple):
    """A batch and a call. `factor` multiplies the loss before its backward."""

    rows: int
    tokens: int
    tile: int
    reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    factor: float = 1
    is_view: bool = False
    has_empty_tile: bool = False
    is_constant: bool = False

    def __str__(self):
        return (f"{self.rows} x {self.tokens} tokens in tiles of {self.tile}, {self.reduction}"
                + f", {str(self.dtype)[6:]}" * (self.dtype != torch.float32)
                + ", all tokens alike" * self.is_constant
                + f", (loss * {self.factor:g}).backward()" * (self.factor != 1)
                + ", hidden is a view" * self.is_view
                + ", all targets of a tile are IGNORE" * self.has_empty_tile)

    def inputs(self):
        """Return (the leaf that hidden is made of, weight, targets).

        In bfloat16 each logit is exact, in whatever order its products are added.
        """
        generator = torch.Generator().manual_seed(self.tokens)
        shape, targets = (self.rows, self.tokens + self.is_view, C), torch.full((1, 1), 3)
        if self.is_constant:
            states, weight = torch.ones(shape), torch.zeros(V, C)
        elif self.dtype == torch.float32:
            states, weight = (torch.randn(each, generator=generator) for each in (shape, (V, C)))
        else:
            states = torch.randint(-1, 2, shape, generator=generator)
            weight = torch.randint(-4, 5, (V, C), generator=generator) / 4
        targets = targets.expand(self.rows, self.tokens).clone()
        if not self.is_constant:
            targets = torch.randint(V, targets.shape, generator=generator)
            targets[0, 1:4] = IGNORE
        if self.has_empty_tile:
            targets.view(-1)[self.tile : 2 * self.tile] = IGNORE
        states, weight = (x.to(device(), self.dtype).requires_grad_() for x in (states, weight))
        return states, weight, targets.to(device())


CASES = (
    Case(2, 21, 8), Case(2, 21, 8, "sum"), Case(1, 7, 100), Case(1, 20, 5, factor=0.25),
    Case(2, 10, 7, "sum", factor=3), Case(2, 12, 8, is_view=True),
    Case(2, 12, 7, has_empty_tile=True))
NARROW = (Case(2, 21, 8, dtype=torch.bfloat16), Case(1, 20, 6, "sum", torch.bfloat16, 0.5),
          Case(1, 512, 1, dtype=torch.bfloat16, is_constant=True))


def _see(fn, case):
    states, weight, targets = case.inputs()
    before = [x.detach().clone() for x in (states, weight, targets)]
    hidden = states[:, :-1] if case.is_view else states * 1
    with one_thread():
        loss = fn(hidden, weight, targets, case.tile, **_keywords(case))
        if not isinstance(loss, torch.Tensor):
            yield {"the loss": loss}
            return
        if loss.requires_grad:
            (loss * case.factor).backward()
    changed = [name for name, old, new in zip(
        ("hidden", "weight", "targets"), before, (states, weight, targets))
        if not torch.equal(old, new)]
    yield {"the loss": Told(loss, times_right),
           "the gradient of hidden": Told(states.grad, times_right),
           "the gradient of weight": Told(weight.grad, times_right),
           "arguments that have changed": Must(changed, [])}


def _keywords(case):
    return {} if case.reduction == "mean" else {"reduction": case.reduction}


def whole(hidden, weight, targets, tile, reduction="mean"):
    """Compute the loss of all logits at once, by torch."""
    if tile < 1 or reduction not in ("mean", "sum"):
        raise ValueError("tile or reduction")
    logits = (hidden @ weight.T).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE,
                           reduction=reduction)


class Needs(NamedTuple):
    """What needs a gradient."""

    hidden: bool = True
    weight: bool = True
    no_grad: bool = False

    def __str__(self):
        if self.no_grad:
            return "under torch.no_grad()"
        frozen = [name for name in ("hidden", "weight") if not getattr(self, name)]
        return f"{frozen[0]} needs no gradient" if frozen else "a training step"


class Size(NamedTuple):
    """A batch whose logits are larger than all that may be held at the peak."""

    rows: int = 2
    tokens: int = 48
    tile: int = 8
    vocabulary: int = 512

    @property
    def tile_bytes(self):
        return self.tile * self.vocabulary * 4

    def costs(self, fn, needs):
        """Return (bytes at the peak, without the arguments; FLOPs) of forward and backward."""
        model, flops, generator = nn.Module(), [], torch.Generator().manual_seed(1)
        for name, shape in (("hidden", (self.rows, self.tokens, C)),
                            ("weight", (self.vocabulary, C))):
            model.register_parameter(name, nn.Parameter(
                torch.randn(shape, generator=generator), requires_grad=getattr(needs, name)))
        model.register_buffer("targets", torch.randint(
            self.vocabulary, (self.rows, self.tokens), generator=generator))
        model.to(device())

        with one_thread(), Watcher(flops, add_flops(flops)), MemoryPeak(model) as memory:
            with torch.set_grad_enabled(not needs.no_grad):
                loss = fn(model.hidden, model.weight, model.targets, self.tile)
            if getattr(loss, "requires_grad", False):
                loss.backward()
        return memory.peak_bytes - memory.points[0].total, sum(flops)


SIZE = Size()
LARGER = {  # what is changed, and by how many bytes the peak may grow: more than all gradients do
    "the rows": (Size(rows=4), 1.5 * SIZE.tile_bytes),
    "the tokens of a row": (Size(tokens=96), 1.5 * SIZE.tile_bytes),
    "the number of tiles": (Size(tile=4), 2 * SIZE.vocabulary * C * 4),
}


def _see_cost(fn, needs):
    peak, flops = SIZE.costs(fn, needs)
    grows = [name for name, (larger, most) in LARGER.items()
             if larger.costs(fn, needs)[0] - peak > most]
    products = 1 + (not needs.no_grad) * (needs.hidden + needs.weight)
    gradients = (SIZE.rows * SIZE.tokens + SIZE.vocabulary) * C * 4
    yield {
        GROWS: Must(grows, []),
        WORK: AtMost(flops, 2 * SIZE.rows * SIZE.tokens * SIZE.vocabulary * C * products,
                     "computes {:,.0f} FLOPs; {:,.0f} are enough"),
        PEAK: AtMost(peak, 2 * gradients + 4 * SIZE.tile_bytes,
                     "holds {:,.0f} bytes at its peak; {:,.0f} are enough: four tiles of logits, "
                     "and twice the gradients")}


class Refused(NamedTuple):
    tile: int = 4
    reduction: str = "mean"

    def __str__(self):
        return f"tile={self.tile}, reduction={self.reduction!r}"


def _see_refusal(fn, case):
    yield {"what it raises": must_refuse(fn, *Case(1, 8, 4).inputs(), *case)}


# --- mistakes -------------------------------------------------------------------------------------

def by_checkpoint(hidden, weight, targets, tile, reduction="mean"):
    """Compute each tile again in backward, as models/gpt.py does."""
    def head(x):
        return F.linear(x, weight).float()

    return cross_entropy(head, hidden, targets, reduction, chunks=-(-targets.numel() // tile))


def by_graph(hidden, weight, targets, tile, reduction="mean"):
    """Leave the gradients of all tiles to autograd, which keeps their logits until then."""
    total = sum(F.cross_entropy((x @ weight.T).float(), y, ignore_index=IGNORE, reduction="sum")
                for x, y in zip(hidden.flatten(0, -2).split(tile), targets.flatten().split(tile)))
    return total / (targets != IGNORE).sum() if reduction == "mean" else total


def by_means(hidden, weight, targets, tile, reduction="mean"):
    """Average the means of all tiles."""
    losses = [F.cross_entropy((x @ weight.T).float(), y, ignore_index=IGNORE, reduction=reduction)
              for x, y in zip(hidden.flatten(0, -2).split(tile), targets.flatten().split(tile))]
    return sum(losses) / (len(losses) if reduction == "mean" else 1)


NEEDS = "x.requires_grad and torch.is_grad_enabled()"
COUNT = '(targets != IGNORE).sum() if reduction == "mean" else 1'
SCALED = ".mul_((y != IGNORE).unsqueeze(-1) / count)"
TILES = "range(0, len(targets), tile)"
BACK = "None if grad is None else grad * grad_loss for grad in ctx.saved_tensors"
ZEROS, ADD = "torch.zeros_like(weight, dtype=torch.float32)", "grad_weight += grad.T @ x"
TILED = Proof(
    tiled_logits_loss,
    Stage("loss and gradients of the whole logits: an uneven last tile, IGNORE, mean and sum, a "
          "view, a loss that is multiplied before its backward", _see, CASES, oracle=whole),
    Stage({"the peak does not grow with the logits": (GROWS,),
           "each logit is computed once; a gradient that is not needed costs nothing": (WORK,),
           "at most four tiles of logits at the peak": (PEAK,)},
          _see_cost, (Needs(), Needs(weight=False), Needs(hidden=False), Needs(no_grad=True)),
          oracle=whole),
    Stage("the same in bfloat16: softmax, loss and the sum of the weight's gradient are float32",
          _see, NARROW, oracle=whole,
          note="In float32 it was right. Here the logits are bfloat16."),
    Stage("a tile of less than 1 token, or another reduction, is a ValueError", _see_refusal,
          (Refused(tile=0), Refused(tile=-1), Refused(reduction="none")),
          note="Refuse it with a sentence that says what is wrong."),
    mistakes=(
        Slip("A mean of the tiles' means is not the mean: tiles have different numbers of targets "
             "that count. Add up sums, and divide once.", by_means),
        Slip("Divide by the number of targets that count, not by the number of tokens.",
             (COUNT, 'targets.numel() if reduction == "mean" else 1')),
        Slip("The mean is missing in the gradients: divide them by the same number as the loss.",
             (SCALED, ".mul_((y != IGNORE).unsqueeze(-1))")),
        Slip("The gradients are divided by the number of targets, and the loss is not.",
             ("return loss / count", "return loss")),
        Slip('With reduction="sum" nothing is divided.', (COUNT, "(targets != IGNORE).sum()")),
        Slip("A token whose target is IGNORE has no gradient: set its row to zero.",
             (SCALED, ".div_(count)")),
        Slip("IGNORE is -100, which is not a word of the vocabulary: clamp the targets before you "
             "use them as an index.", ("y.clamp(min=0)", "y")),
        Slip("The gradient of the logits is softmax minus 1 at the target. The minus 1 is missing.",
             ("                    grad[torch.arange(len(y)), y.clamp(min=0)] -= 1\n", "")),
        Slip("backward receives the gradient of the loss, which is not 1 if the loss was scaled "
             "afterwards. Multiply both gradients by it.",
             (BACK, "ctx.saved_tensors")),
        Slip("Multiply both gradients by the gradient of the loss: the weight's is not multiplied.",
             (f"*({BACK}), None", "*((saved := ctx.saved_tensors)[0] * grad_loss, saved[1]), None"),
             ),
        Slip("The last, shorter tile is left out.",
             (TILES, "range(0, len(targets) // tile * tile, tile)")),
        Slip("All tiles add to the weight's gradient: add, do not assign.",
             (ADD, "grad_weight = grad.T @ x")),
        Slip("The softmax is computed in bfloat16: make the logits float32 first.",
             ("(x @ weight.T).float()", "x @ weight.T")),
        Slip("The weight's gradient is added up in bfloat16, where a small number no longer "
             "changes a large sum. Add it up in float32.", (ZEROS, "torch.zeros_like(weight)")),
        Slip("All logits exist at once. Make them for one tile, use them, and free them.",
             ("    needs = [", "    tile = targets.numel()\n    needs = ["), whole),
        Slip("A tile is `tile` tokens in total. Cutting along T gives `tile` tokens of every row: "
             "flatten B and T first.",
             ("    needs = [", "    tile = tile * len(hidden)\n    needs = [")),
        Slip("autograd keeps each tile's log-probabilities until backward. Compute the gradients "
             "of a tile in forward, right after its loss.", by_graph),
        Slip("Each logit is computed twice, in forward and again in backward. The loss is one "
             "number, so forward can already compute the gradients, and backward only scales them.",
             by_checkpoint),
        Slip("Each tile's gradient of the weight is as large as the weight. Add it to the sum at "
             "once, instead of keeping a list of them.",
             (ZEROS, "[]", ADD, "grad_weight.append((grad.T @ x).float())",
              "ctx.save_for_backward(grad_hidden, grad_weight)",
              "ctx.save_for_backward(grad_hidden, sum(grad_weight) if needs[1] else None)")),
        Slip("A frozen tensor needs no gradient: look at requires_grad, or at "
             "ctx.needs_input_grad, before you compute one.",
             (f"[{NEEDS} for x in (hidden, weight)]", "[torch.is_grad_enabled()] * 2"),
             (f"[{NEEDS} for x in (hidden, weight)]", "[torch.is_grad_enabled()] * 2",
              ADD, "grad_weight.addmm_(grad.T.float(), x.float())")),
        Slip("Under torch.no_grad() no gradient is needed. ctx.needs_input_grad is still True "
             "there, so ask torch.is_grad_enabled() outside the Function.",
             (NEEDS, "x.requires_grad")),
        Slip("No gradient comes back: backward returns none, or the loss is cut off. If forward "
             "asks torch.is_grad_enabled(), ask before apply(): inside a Function's forward it is "
             "False.",
             (NEEDS, "False")),
        Slip("Gradients are computed that are not needed: of a frozen tensor, and under "
             "torch.no_grad().",
             (f"[{NEEDS} for x in (hidden, weight)]", "[True, True]")),
        Slip("hidden may be a view whose rows are not adjacent: flatten or reshape it, because "
             "view cannot.",
             ("hidden.flatten(0, -2)", "hidden.view(-1, hidden.shape[-1])")),
        Slip("A tile must have at least 1 token: anything less is a ValueError.",
             ("tile < 1", "False")),
        Slip('A reduction that is not "mean" or "sum" is a ValueError.',
             ('reduction not in ("mean", "sum")', "False")),
    ), hints=(
        "The loss is one number. What does its backward need to know of a tile, once the tile's "
        "logits are gone?",
        "In the forward of a torch.autograd.Function, go through the tiles: logits, the sum of "
        "their losses, then at once this tile's part of both gradients. backward multiplies them "
        "by the gradient of the loss.",
        "The gradient of a tile's logits is softmax(logits), minus 1 at the target, 0 where the "
        "target is IGNORE, divided by the count; grad @ weight is hidden's, grad.T @ x is added to "
        "the weight's (float32). Count the targets before the first tile.",
    ))
