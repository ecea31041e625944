"""The bank's texts: filled with parameters, wrapped for a terminal, turned into HTML.

Empty lines separate paragraphs; one whose lines all start with four spaces is code.
"""
import html
import re
import string
import textwrap


def fields(template):
    """Return the parameter names in `template`.

    Raises: ValueError for a lone brace or a field without a name.
    """
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    bad = [name for name in names if not name.isidentifier()]
    if bad:
        raise ValueError(f"'{{{bad[0]}}}'")
    return names


def fill(template, values):
    """Replace every {name} in `template` with its value; {{ and }} are braces."""
    return str(template).format(**values).strip()


def plain(text, indent="", width=92):
    """Wrap `text` for a terminal, with every line starting with `indent`."""
    paragraphs = []
    for block in _blocks(text):
        if _is_code(block):
            paragraphs.append(textwrap.indent(block, indent))
        else:
            paragraphs.append(textwrap.fill(" ".join(block.split()), width, initial_indent=indent,
                                            subsequent_indent=indent, break_on_hyphens=False))
    return "\n\n".join(paragraphs)


def to_html(text):
    """Convert `text` to HTML paragraphs; `name` becomes code."""
    paragraphs = []
    for block in _blocks(text):
        safe = html.escape(textwrap.dedent(block), quote=False)
        if _is_code(block):
            paragraphs.append(f"<pre>{safe}</pre>")
        else:
            paragraphs.append("<p>" + re.sub(r"`([^`]+)`", r"<code>\1</code>", safe) + "</p>")
    return "".join(paragraphs)


def _blocks(text):
    return [block.strip("\n") for block in re.split(r"\n[ ]*\n", str(text)) if block.strip()]


def _is_code(block):
    return all(line.startswith("    ") for line in block.splitlines() if line.strip())
