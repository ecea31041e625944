"""systems: software that starts, watches and repairs training on clusters, and our use of each.

Each line of systems.csv has a kind and a name, how we used it, with which version or why not, our
file for it, and a proof: a command, or a file and, after "::", a test or a word in it.

    run        it did its work, on a machine without a GPU unless the line says otherwise
    validated  its own schema accepts our file; nothing was submitted
    not run    for the reason in the line; our substitute may also have a proof

tests/test_cluster_systems.py checks the file and proof of every line.
"""

import csv
from pathlib import Path


def systems():
    """Read systems.csv: [{"kind": , "system": , "how": , "with": , "file": , "proof": }]."""
    with open(Path(__file__).with_suffix(".csv"), newline="") as lines:
        return [*csv.DictReader(lines)]


def table():
    """Format systems() as text of at most 100 columns, without proofs."""
    lines, kind = [], ""
    for row in systems():
        if row["kind"] != kind:
            kind = row["kind"]
            lines.append(f"{kind}:")
        lines.append(f"  {row['system']:25} {row['how']:10} {row['with']}")
    return "\n".join(lines)
