"""look(): the first thing to do with a program that misbehaves. The labs' bug hunts use it."""

from functools import partial

from ranklab.engine import HangError, RankError, launch


def look(program, ranks=4, **settings):
    """Run a program that returns a dict on `ranks` ranks, and print what each rank returns.

    The weights are left out. If the run hangs or fails, its report is printed.
    settings  keyword arguments of the program
    """
    try:
        results = launch(partial(program, **settings), ranks=ranks, stall=1)
    except (RankError, HangError) as error:
        print(error)
        return
    for rank, result in enumerate(results):
        print(f"rank {rank}", {name: x for name, x in result.items() if name != "weights"})
