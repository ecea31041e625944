"""Lab 01: a scale that comes too late, stays too long, or is never taken back."""

from mutants import mutant

from ranklab.baseline import scale_loss

ALL_FINITE = "all(gradient.isfinite().all() for gradient in gradients)"
DOUBLED = "scale=state.scale * 2, clean_steps=0"

WRONG = [mutant(scale_loss, *edits, says=says) for *edits, says in (
    ("gradient.div_(state.scale)", "pass", "divide the gradients by the scale"),
    ("optimizer.zero_grad()\n        return", "optimizer.step()\n        return",
     "look before you step"),
    ("(loss * state.scale)", "loss", "gradient.isfinite()", "(gradient * state.scale).isfinite()",
     "gradient.div_(state.scale)", "pass", "scale the loss before backward"),
    (ALL_FINITE, "gradients[0].isfinite().all()", "not at those of one parameter"),
    ("scale=state.scale / 2, ", "", "the scale halves"),
    ("scale=state.scale / 2, clean_steps=0", "scale=state.scale / 2",
     "an overflow sets clean_steps back"),
    ("if state.clean_steps + 1 < state.interval", "if False", "doubles too soon: after"),
    (DOUBLED, DOUBLED.replace("=0", "=state.clean_steps + 1"), "doubling sets clean_steps back"),
    ("1 < state", "1 != state", DOUBLED, DOUBLED.replace("=0", "=state.clean_steps + 1"),
     "it doubles again"),
    ("< state.interval", "< 3", "take state.interval"),
    ("return state._replace(clean_steps=", "return dict(clean_steps=", "Return a LossScale"),
)]  # fmt: skip
