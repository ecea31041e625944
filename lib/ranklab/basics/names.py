"""The names that a piece of Python uses but does not define, and the names that it binds."""

import symtable


def free_names(source):
    """Return the global names that `source` uses and does not bind itself."""
    top = symtable.symtable(source, "answer", "exec")
    used = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        used |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        tables += table.get_children()
    return used - bound_names(source)


def bound_names(source):
    """Return the names that `source` binds at its top level."""
    top = symtable.symtable(source, "cell", "exec")
    return {s.get_name() for s in top.get_symbols()
            if s.is_assigned() or s.is_imported() or s.is_namespace()}
