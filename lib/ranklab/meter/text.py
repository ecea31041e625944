"""Tables as plain text."""


def lined_up(header, rows):
    """Format a table as one string.

    The first column is flush left, the others are flush right; thousands are separated.
    """
    cells = [header] + [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row]
                        for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(_cell(cell, width, place) for place, (cell, width)
                               in enumerate(zip(row, widths))).rstrip() for row in cells)


def _cell(text, width, place):
    return text.rjust(width) if place else text.ljust(width)
