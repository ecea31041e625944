"""The text of a function, and that text with edits."""

import functools
import inspect
import textwrap


@functools.cache
def text_of(function):
    """Return the source of a function or class, without its indentation."""
    return textwrap.dedent(inspect.getsource(function))


def edited_text(function, edits):
    """Return the text of `function` with its edits: old, new, old, new, ...

    Raises: ValueError if an old text does not occur exactly once: the library has changed.
    """
    text = text_of(function)
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        if text.count(old) != 1:
            raise ValueError(f"{function.__name__}: {old!r} is there {text.count(old)} times, not "
                             f"once, in\n{text}")
        text = text.replace(old, new)
    return text
