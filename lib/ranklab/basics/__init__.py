"""Small helpers that everything else builds on: none of them knows about ranks.

    targets.py  IGNORE, the target that no loss counts
    flat.py     packs many tensors into one flat tensor, and unpacks it
    options.py  settings as frozen dataclasses: help, limits, one sentence for a bad value
    files.py    files that are complete at any moment
    imports.py  the library files that a library file imports
    names.py    the outside names that a piece of Python uses
    machine.py  how many cores, how much memory, how many GPUs this process may use
"""

__all__ = ["files", "flat", "imports", "machine", "names", "options", "targets"]
