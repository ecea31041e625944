"""The cell magic `%%ranks 4`: a cell's body runs on fresh ranks, with no function to define.

    %load_ext ranklab

    %%ranks 4
    x = torch.ones(1) * dist.get_rank()
    dist.all_reduce(x)
    x                               # the value of a last expression is shown, for each rank

The notebook's names that the body uses are sent to the ranks by value; names that the body binds
stay on the ranks, and end with them.
"""

import ast
import pprint

COLUMNS = 88  # of a value that is shown


def register(shell):
    """Register the cell magic with this IPython."""
    from IPython.core.magic_arguments import MagicArgumentParser

    parser = MagicArgumentParser("%%ranks")
    parser.add_argument("ranks", nargs="?", type=int, help="by default as in launch")
    parser.add_argument("--nodes", type=int, default=1, help="lay the ranks out as this many nodes")
    parser.add_argument("--timeout", type=float, default=60, help="seconds")
    parser.add_argument("--rehearse", action="store_true", help="under a GPU's rules")
    parser.add_argument("--stream", action="store_true", help="show output as it comes")
    parser.add_argument("--to", metavar="NAME", help="the list of all ranks' last values")

    def ranks(line, cell):
        options = parser.parse_argstring(line)
        _run(shell, f"# %%ranks {line}\n{cell}", options)

    ranks.__doc__ = "Run the cell's body on fresh ranks.\n\n" + parser.format_help()
    shell.register_magic_function(ranks, "cell")


def _run(shell, source, options):
    """Run the source on the ranks.

    Its first line stands for the magic's line, so that line numbers match the cell's.
    """
    from IPython.core.error import UsageError

    from ranklab.engine import launch, ship

    number = len(shell.history_manager.input_hist_raw) - 1  # the cell's: it is noted before it runs
    file = shell.compile.cache(source, number)
    tree = ast.parse(source, file)
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
                    and _is_bound(node.id, shell)})
    body, last = _compiled(tree, file)
    # On a rank this function shares its globals with those of the notebook that it knows.
    known = eval(f"lambda: [{', '.join(names)}]", shell.user_ns)
    try:
        values = launch(_on_rank, body, last, known, bool(options.to), ranks=options.ranks,
                        nodes=options.nodes, timeout=options.timeout, stream=options.stream,
                        rehearse="gpu" if options.rehearse else None, headings=True)
    except (TypeError, ValueError) as error:  # IPython shows only the sentence of a UsageError
        stays = ship.what_stays({name: shell.user_ns[name] for name in names})
        raise UsageError(str(stays or error)) from None
    if options.to:
        shell.user_ns[options.to] = values


def _is_bound(name, shell):
    """Return True if the notebook bound it, and not IPython, as get_ipython, open and Out."""
    missing = object()
    value = shell.user_ns.get(name, missing)
    return value is not missing and value is not shell.user_ns_hidden.get(name, missing)


def _compiled(tree, file):
    """Compile all but the last expression, and that expression; None if there is none."""
    last = tree.body[-1:]
    is_shown = last and isinstance(last[0], ast.Expr)
    value = ast.Expression(tree.body.pop().value) if is_shown else None
    return compile(tree, file, "exec"), value and compile(value, file, "eval")


def _on_rank(body, last, known, wanted):
    space = known.__globals__
    exec(body, space)
    value = last and eval(last, space)
    if value is not None:
        print(pprint.pformat(value, width=COLUMNS, sort_dicts=False))
    return value if wanted else None
