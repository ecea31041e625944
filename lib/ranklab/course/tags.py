"""HTML in which every text is escaped: only the output of tag() is inserted unchanged."""

from html import escape

LONGEST = 1000  # letters of one text; a submission may hand in a long one


class Html(str):
    """Text that is HTML already."""


def tag(name, *content, **attributes):
    """Build the HTML element; `class_` is its class.

    Strings in it are text, whatever they contain.
    """
    pairs = "".join(f' {key.strip("_")}="{safe(str(value))}"'
                    for key, value in attributes.items())
    return Html(f"<{name}{pairs}>{''.join(map(safe, content))}</{name}>")


def safe(content):
    """Return the HTML of a text, a number, an element, or a list of these."""
    if isinstance(content, Html):
        return content
    if isinstance(content, list | tuple):
        return Html("".join(map(safe, content)))
    text = printable(str(content))
    return Html(escape(text if len(text) <= LONGEST else f"{text[:LONGEST]} [...]"))


def printable(text):
    """Replace with ? every character that would move the cursor or reverse the text direction."""
    return "".join(c if c.isprintable() else "?" for c in text)
