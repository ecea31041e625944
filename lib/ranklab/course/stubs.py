"""A stub in labs/ is a contract; the advice in it is the exercise's first hint.

In labs/source the comment right above `raise NotImplementedError("exercise ...")` is advice on the
missing lines. The builder leaves it out of labs/, and hint() prints it. Other comments stay: they
say what the given lines do.
"""

import ast
import re

ADVICE = re.compile(r'((?:^[ ]+#.*\n)+)(?=[ ]+raise NotImplementedError\("exercise )', re.M)


def contract(source):
    """Remove from `source` the advice in its stubs."""
    return ADVICE.sub("", source)


def advice(source, name):
    """Return the advice in the stub of `name`, one line for each missing part.

    source: of a whole lab; a class's parts are its methods, and each line begins with the name of
    one
    """
    tree, lines = ast.parse(source), []
    for match in ADVICE.finditer(source):
        names = _names_around(tree, source.count("\n", 0, match.end()) + 1)
        if name in names:
            text = " ".join(line.strip(" #") for line in match[1].splitlines())
            lines.append(": ".join([*names[names.index(name) + 1:][-1:], text]))
    return lines


def _names_around(tree, line):
    """The functions and classes that hold this line, outermost first."""
    return [node.name for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and node.lineno <= line <= node.end_lineno]
