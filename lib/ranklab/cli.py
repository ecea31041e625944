"""The `ranklab` command: status (also with no command), work, drill, doctor, rehearse,
compare, layout, build, grade."""

import argparse
import sys
from pathlib import Path

from ranklab.course import labs


def main(argv=None) -> int:
    """The command has run; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ranklab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="which exercises you have passed, what is next")
    status.add_argument("lab", nargs="?", default=argparse.SUPPRESS, help="such as 02 (all)")
    status.add_argument("--lab", help="the same")
    status.set_defaults(run=_status)
    work = commands.add_parser("work", help="copy the labs to work/, where you work")
    work.add_argument("folder", nargs="?", type=Path, help="where; by default work/ beside labs/")
    work.set_defaults(run=_work)
    commands.add_parser("doctor", help="what this machine can run").set_defaults(run=_doctor)
    drill = commands.add_parser("drill", help="interview questions in the terminal", add_help=False)
    drill.set_defaults(run=_drill)  # reads its own options: see `ranklab drill --help`
    rehearse = commands.add_parser("rehearse", help="a notebook or module under a GPU's rules")
    rehearse.add_argument("what", help="a .ipynb file, or a module with a launch in it")
    rehearse.set_defaults(run=_rehearse)  # hands the other arguments to the module
    compare = commands.add_parser("compare", help="one model in every layout", add_help=False)
    compare.set_defaults(run=_compare)  # reads its own options, as drill does
    layout = commands.add_parser("layout", help="what a layout costs", add_help=False)
    layout.set_defaults(run=_layout)  # reads its own options, as drill does
    build = commands.add_parser("build", help="labs/ and solutions/ from labs/source/")
    build.add_argument("labs", nargs="*", help="such as 02_collectives; all by default")
    build.add_argument("--check", action="store_true", help="only say what is stale; run nothing")
    build.add_argument("--force", action="store_true",
                       help="execute solutions that are current; overwrite changed notebooks")
    build.set_defaults(run=_build)
    grade = commands.add_parser("grade", help="re-check the notebooks of a class")
    grade.add_argument("folder", type=Path)
    grade.add_argument("--csv", type=Path, help="write the table here")
    grade.add_argument("--minutes", type=_minutes, default=10, help="limit for each notebook")
    grade.set_defaults(run=_grade)
    arguments = sys.argv[1:] if argv is None else argv
    options, rest = parser.parse_known_args(arguments or ["status"])
    if rest and options.run not in (_drill, _rehearse, _compare, _layout):
        parser.error(f"unknown: {' '.join(rest)}")
    options.rest = rest
    return options.run(options) or 0


def _status(options):
    from ranklab.course.status import status

    try:
        print(status(getattr(options, "lab", None)))
    except ValueError as error:
        print(f"ranklab status: {error}")
        return 2


def _work(options):
    from ranklab.course import work

    root = work.checkout()
    if root is None:
        print("ranklab work: run it inside a checkout (a folder with labs/source)")
        return 2
    try:
        for sentence in work.bring(root, options.folder or root / "work"):
            print(sentence)
    except OSError as error:
        print(f"ranklab work: the copies of the labs can't be written: {error}")
        return 1


def _doctor(_):
    from ranklab.course.doctor import doctor

    return doctor()


def _drill(options):
    from ranklab.course.drill import drill

    return drill(options.rest)


def _rehearse(options):
    from ranklab.course.rehearse import rehearse

    return rehearse(options.what, options.rest)


def _compare(options):
    from ranklab.projects.hybrid.compare import main

    return main(options.rest)


def _layout(options):
    from ranklab.projects.hybrid.explain import main

    return main(options.rest)


def _build(options):
    from ranklab.course.build import BuildError, build, sources, stale

    root = labs.repository()
    if root is None:
        print("ranklab build: run it inside a checkout (a folder with labs/source)")
        return 2
    try:
        stems = [labs.find_stem(name) for name in options.labs]
    except ValueError as error:
        print(f"ranklab build: {error}")
        return 2
    if planned := sorted(set(stems) - set(sources(root))):
        print(f"ranklab build: {planned[0]} is planned: labs/source/{planned[0]}.py is not there")
        return 2
    try:
        if not options.check:
            build(root, stems, options.force)
        elif old := stale(root, stems):
            print("stale: " + ", ".join(old) + "\nrun: ranklab build")
            return 1
    except BuildError as error:
        print(f"ranklab build: {error}")
        return 1


def _minutes(text):
    """A number of minutes, up to a day.

    error  argparse's own, with the sentence
    """
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0
    if not 0 < minutes <= 24 * 60:
        raise argparse.ArgumentTypeError(f"a number above 0 and at most 1440 is wanted, not {text}")
    return minutes


def _grade(options):
    from ranklab.course.grade import grade

    return grade(options.folder, options.csv, options.minutes * 60)


if __name__ == "__main__":
    sys.exit(main())
