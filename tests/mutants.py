"""Wrong answers, each the library's answer with one edit: the mistake is all that differs."""

import re

from ranklab.checks.prover.slips import compiled as as_in_a_notebook, edited_text


def mutant(answer, *edits, says, called="", **names):
    """The text of `answer` with its edits: old, new, old, new, ... Each old text must be there
    once, or the library has moved on and this is no mistake any more.

    says    a regular expression that the verdict must hold
    called  a name of its own, where `says` and the exercise do not tell it from others
    names   what the edited text uses and the library's module does not have
    """
    if not edits or len(edits) % 2:
        raise ValueError(f"{answer.__name__}: edits come in pairs, old and new")
    source = edited_text(answer, edits)
    wrong = as_in_a_notebook(answer, source, **names)
    wrong.text = source  # for class_of_30.py, which hands it in
    wrong.__doc__ = says  # where the test finds the pattern, as in an answer written by hand
    wrong.test_id = f"{answer.__name__}__{called or re.sub(r'[^a-z0-9]+', '_', says.lower())[:40]}"
    return wrong


def slips_of(answer, slips):
    """A mutant for each (hint, pair of edits, ...) that a check knows: it must get this hint."""
    return [mutant(answer, *sum(edits, ()), says=re.escape(hint), called=f"slip_{number}")
            for number, (hint, *edits) in enumerate(slips)]
