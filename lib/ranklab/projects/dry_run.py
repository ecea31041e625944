"""What a dry run has counted (ranklab.meter.dry_run), beside what a formula said, as text."""


def table(head, rows):
    """Bytes as predicted and as counted, in GB: rows of (name, bytes, bytes or None), as text."""
    lines = [f"{head:24}{'predicted':>12}{'counted':>12}"]
    for name, *both in rows:
        cells = ["-" if nbytes is None else f"{nbytes / 1e9:,.4g}" for nbytes in both]
        lines.append(f"{name.replace('_', ' '):24}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
