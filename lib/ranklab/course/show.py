"""A verdict on the screen: in colour in a notebook, and the same words as plain text elsewhere."""

import html
import re
import sys
import textwrap

COLUMNS = 100  # JupyterLab wraps longer lines
MARK = re.compile(r"  (ok|FAIL|--|->) {2,4}")
# JupyterLab's own colours follow its theme; the second ones can be read on white and on black.
COLOURS = {"ok": "var(--jp-success-color1, #23863b)", "FAIL": "var(--jp-error-color1, #d7423f)"}


def show(text):
    """Show `text`, wrapped at 100 columns; a notebook shows marks in colour.

    A notebook also keeps the plain text, for whatever can't show HTML.
    """
    text = wrap(text)
    display = notebooks_display()
    if display is None:
        print(text)
    else:
        display({"text/plain": text, "text/html": to_html(text)}, raw=True)


def wrap(text):
    """Wrap `text` at 100 columns; continue a broken line below its first word."""
    return "\n".join(part for line in text.splitlines() for part in _parts(line))


def _parts(line):
    start = re.match(r" *(?:(?:ok|FAIL|--|->|\d/\d) +)?", line).end()
    return [line] if len(line) <= COLUMNS else textwrap.wrap(
        line, COLUMNS, subsequent_indent=" " * min(start, COLUMNS // 2), break_on_hyphens=False)


def to_html(text):
    """Render `text` as HTML, as it stands, with its name in bold and its marks in colour."""
    name, *lines = text.split("\n")
    lines = [f"<b>{_escaped(name)}</b>", *map(_coloured, lines)]
    return '<pre style="margin: 0; word-break: normal">' + "\n".join(lines) + "</pre>"


def _coloured(line):
    mark = MARK.match(line)
    if not mark:
        return _escaped(line)
    style = f' style="color: {COLOURS[mark[1]]}"' if mark[1] in COLOURS else ""
    return f"  <b{style}>{_escaped(mark[1])}</b>{_escaped(line[mark.end(1):])}"


def _escaped(text):
    return html.escape(text, quote=False)


def notebooks_display():
    """Return IPython's display inside a Jupyter kernel; None in a terminal, a script or a test."""
    if kernels_shell() is None:
        return None
    from IPython.display import display

    return display


def kernels_shell():
    """Return the IPython of this Jupyter kernel; None in a terminal, a script or a test."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return shell if hasattr(shell, "kernel") else None
