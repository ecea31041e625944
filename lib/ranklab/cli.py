"""The `ranklab` command: status (also with no command), hint, work, drill, interview, questions,
doctor, tour, rehearse, diagnose, compare, plan, build, grade."""

import argparse
import sys
from pathlib import Path

from ranklab import __version__
from ranklab.basics.options import existing_place, new_file, new_folder, number
from ranklab.course import labs
from ranklab.projects.command import Command, refusals


def main(argv=None) -> int:
    """Run the command; return its exit code.

    argv: the arguments; None: the command line's
    """
    parser = Command("ranklab", __doc__)
    parser.add_argument("--version", action="version", version=f"ranklab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Subcommand)
    status = commands.add_parser("status", help="which exercises you have passed, what is next")
    status.add_argument("lab", nargs="?", default=argparse.SUPPRESS,
                        help="such as 02; all: also what you have not begun")
    status.add_argument("--lab", help="the same")
    status.set_defaults(run=_status)
    hint = commands.add_parser("hint", help="help for an exercise, a little more each time")
    hint.add_argument("name", help="the exercise or prediction, such as ring_all_reduce")
    hint.set_defaults(run=_hint)
    work = commands.add_parser("work", help="copy the labs to work/, where you work")
    work.add_argument("folder", nargs="?", type=new_folder, help="where; by default work/")
    work.add_argument("--merge", action="append", metavar="LAB",
                      help="bring your cells from the old copy of this lab into the new one")
    work.set_defaults(run=_work)
    commands.add_parser("doctor", help="what this machine can run").set_defaults(run=_doctor)
    # The next six read their own options: see `ranklab drill --help`.
    for name, run, help in (("drill", _drill, "interview questions in the terminal"),
                            ("interview", _interview, "a mock interview, timed and scored"),
                            ("questions", _questions, "interview questions, or cards for Anki"),
                            ("tour", _tour, "the course in a minute"),
                            ("compare", _compare, "one model in every layout"),
                            ("plan", _plan, "the best layouts on your GPUs, and their bill")):
        commands.add_parser(name, help=help, add_help=False).set_defaults(run=run)
    rehearse = commands.add_parser("rehearse", help="a notebook or program under a GPU's rules")
    rehearse.add_argument("what", help="a .ipynb file, or a .py file or module with a launch in it")
    rehearse.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the program")
    rehearse.set_defaults(run=_rehearse)
    _add_diagnose(commands)
    build = commands.add_parser("build", help="labs/ and solutions/ from labs/source/")
    build.add_argument("labs", nargs="*", help="such as 02_collectives; all by default")
    build.add_argument("--check", action="store_true", help="only say what is stale; run nothing")
    build.add_argument("--force", action="store_true",
                       help="execute solutions that are current; overwrite changed notebooks")
    build.set_defaults(run=_build)
    grade = commands.add_parser("grade", help="re-check the notebooks of a class")
    grade.add_argument("folder", type=existing_place, help="of the notebooks; or one notebook")
    grade.add_argument("--csv", type=new_file, help="write the table here")
    grade.add_argument("--html", type=new_file, help="write the instructor's report here")
    grade.add_argument("--minutes", type=number(float, above=0, most=24 * 60), default=10,
                       help="limit for each notebook")
    grade.set_defaults(run=_grade)
    arguments = sys.argv[1:] if argv is None else argv
    options, rest = parser.parse_known_args(arguments or ["status"])
    if rest and options.run not in (_drill, _interview, _questions, _tour, _compare, _plan):
        parser.error(f"unknown: {' '.join(rest)}")
    options.rest = rest
    with refusals(f"ranklab {options.command}"):
        return options.run(options) or 0


def _add_diagnose(commands):
    diagnose = commands.add_parser("diagnose", help="which known diseases a training has; "
                                   "watching it takes about twice the CPU time")
    diagnose.add_argument("--ranks", type=number(int, above=0), metavar="N",
                          help="start this many ranks with torchrun; by default the program "
                               "launches its own")
    diagnose.add_argument("--timeout", type=number(float, above=0), default=600, metavar="S",
                          help="seconds for the program")
    diagnose.add_argument("--keep", type=new_folder, metavar="FOLDER",
                          help="keep what is observed there, to judge it again or to compare with "
                               "it")
    diagnose.add_argument("--before", type=existing_place, metavar="FOLDER",
                          help="what was kept of the run that this one resumes")
    diagnose.add_argument("--beside", type=existing_place, metavar="FOLDER",
                          help="what was kept of the same program on fewer ranks")
    diagnose.add_argument("what", help="a .py file, a module, or a folder from --keep")
    diagnose.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the program")
    diagnose.set_defaults(run=_diagnose)


class _Subcommand(Command):
    """The parser of one of the commands; its help begins with "ranklab" and the command."""

    def __init__(self, prog, **more):
        super().__init__(prog, more.pop("help", None), **more)


def _status(options):
    from ranklab.course.status import status

    print(status(getattr(options, "lab", None)))


def _hint(options):
    from ranklab.course.hint import hint

    if options.name not in labs.names():
        near = labs.near(options.name) or ["`ranklab status 02`"]
        raise ValueError(f"nothing is called {options.name!r}; see {', '.join(near)}")
    hint(options.name)


def _work(options):
    from ranklab.course import work

    root = work.checkout()
    if root is None:
        raise ValueError("run it inside a checkout (a folder with labs/source)")
    folder = Path(options.folder or root / "work")
    stems = [labs.find_notebook(name) for name in options.merge or ()]  # before anything is written
    try:
        said = work.bring(root, folder)
        if stems:
            from ranklab.course.merge import merge  # here: it brings torch, some seconds at first

            said += [merge(folder, stem) for stem in stems]
        print(*said, sep="\n", end="\n" * bool(said))
    except OSError as error:
        print(f"ranklab work: the copies of the labs can't be written: {error}", file=sys.stderr)
        return 1


def _doctor(_):
    from ranklab.course.doctor import doctor

    return doctor()


def _drill(options):
    from ranklab.course.drill import drill

    return drill(options.rest)


def _interview(options):
    from ranklab.course.interview import interview

    return interview(options.rest)


def _questions(options):
    from ranklab.course.anki import export

    return export(options.rest)


def _rehearse(options):
    from ranklab.course.rehearse import rehearse

    return rehearse(options.what, options.arguments)


def _diagnose(options):
    from ranklab.course.diagnose import main

    return main(options.what, options.arguments, options.ranks, options.timeout, options.keep,
                options.before, options.beside)


def _tour(options):
    from ranklab.projects.tour import main

    return main(options.rest)


def _compare(options):
    from ranklab.course.passed_answers import passed_answers
    from ranklab.projects.hybrid.compare import main

    return main(options.rest, passed_answers)


def _plan(options):
    from ranklab.projects.planner.plan import main

    return main(options.rest)


def _build(options):
    from ranklab.course.build import BuildError, build, sources, stale

    root = labs.repository()
    if root is None:
        raise ValueError("run it inside a checkout (a folder with labs/source)")
    stems = [labs.find_notebook(name) for name in options.labs]
    if planned := sorted(set(stems) - set(sources(root))):
        raise ValueError(f"{planned[0]} is planned: labs/source/{planned[0]}.py is not there")
    try:
        if not options.check:
            build(root, stems, options.force)
        elif old := stale(root, stems):
            print("stale: " + ", ".join(old) + "\nrun: ranklab build")
            return 1
    except BuildError as error:
        print(f"ranklab build: {error}", file=sys.stderr)
        return 1


def _grade(options):
    from ranklab.course.grade import grade

    return grade(options.folder, options.csv, options.minutes * 60, options.html)


if __name__ == "__main__":
    sys.exit(main())
