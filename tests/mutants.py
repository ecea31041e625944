"""Wrong answers, each the library's answer with one edit: the mistake is all that differs."""

import functools
import inspect
import re
import textwrap

from ranklab.course.build import free_names


def mutant(answer, *edits, says, called="", **names):
    """The text of `answer` with its edits: old, new, old, new, ... Each old text must be there
    once, or the library has moved on and this is no mistake any more.

    says    a regular expression that the verdict must hold
    called  a name of its own, where `says` and the exercise do not tell it from others
    names   what the edited text uses and the library's module does not have
    """
    source = text_of(answer)
    if not edits or len(edits) % 2:
        raise ValueError(f"{answer.__name__}: edits come in pairs, old and new")
    for old, new in zip(edits[::2], edits[1::2]):
        if source.count(old) != 1:
            raise ValueError(f"{answer.__name__}: {old!r} is there {source.count(old)} times, not "
                             f"once, in\n{source}")
        source = source.replace(old, new)
    wrong = as_in_a_notebook(answer, source, **names)
    wrong.text = source  # for class_of_30.py, which hands it in
    wrong.__doc__ = says  # where the test finds the pattern, as in an answer written by hand
    wrong.test_id = f"{answer.__name__}__{called or re.sub(r'[^a-z0-9]+', '_', says.lower())[:40]}"
    return wrong


@functools.cache
def text_of(answer):
    return textwrap.dedent(inspect.getsource(answer))


def slips_of(answer, slips):
    """A mutant for each (hint, pair of edits, ...) that a check knows: it must get this hint."""
    return [mutant(answer, *sum(edits, ()), says=re.escape(hint), called=f"slip_{number}")
            for number, (hint, *edits) in enumerate(slips)]


def as_in_a_notebook(answer, source, **names):
    """What `source` defines, with what the lab's cells bind around it."""
    namespace = {"__name__": "__main__"}
    home = vars(inspect.getmodule(answer)) | names
    namespace |= {name: home[name] for name in free_names(source) if name in home}
    exec(compile(source, f"<the text of {answer.__name__}>", "exec"), namespace)
    return namespace[answer.__name__]


