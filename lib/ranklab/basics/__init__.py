"""Small things that stand below everything else: none of them knows a rank.

    targets.py  IGNORE, the target that counts in no loss
    flat.py     many tensors in one flat one, and back
    options.py  settings as frozen dataclasses: help, limits, one sentence for a bad value
    files.py    files that are whole at any moment
    imports.py  which files of the library a file of it imports
    names.py    the names that a piece of Python uses from outside
    machine.py  how many cores, how much memory, how many GPUs this process may use
"""

__all__ = ["files", "flat", "imports", "machine", "names", "options", "targets"]
