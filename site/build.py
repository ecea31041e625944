"""Turn the solved labs, the decks, the interview questions and the planner's page into one site,
build/site/.

Sphinx makes the pages (conf.py) from a folder laid out like this checkout, so that the links of
README.md and docs/ lead to pages. Nothing is executed, and no page loads anything from another
server.
RANKLAB_ANSWERS=0 takes the unsolved labs, and leaves out the answers; REPOSITORY is the public
address for the buttons of start.py.
"""
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import start
from sphinx.cmd.build import main as sphinx

from ranklab.course.anki import cards
from ranklab.course.questions import question_html
from ranklab.interview.ask import draw
from ranklab.interview.bank import load
from ranklab.planner import live

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE, OUT = ROOT / "build" / "site-source", ROOT / "build" / "site"
TOUR = ROOT / "labs" / "tour.ipynb"
TEXTS = ("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")

SOLVED = """The labs here are **solved**: they hold the answers, with outputs and figures. To learn,
work on your own copies first (`make lab`)."""
UNSOLVED = """The labs here are **not solved**, and the interview questions have no answers. Work on
your own copies of the labs (`make lab`)."""
BESIDE = """ [How to start](README.md#ten-minutes). Beside the labs: [decks](decks.md),
[interview questions](questions/index.md), [the planner](planner.md).
"""
PLANNER = """# The planner

Choose a training, and see what a GPU holds, where the time of a step goes, and what it costs. All
numbers are computed by formulas with constants that were fitted to published runs; "likely" says
how far off the most similar of them were, and how many these are. The first change fetches Python
(Pyodide, 14 MB, or half of that from a server that compresses). Then your browser tries every
layout, as `ranklab plan` does, and sends nothing. `ranklab plan` knows more: budgets, files for
your tool, models that it measures by `transformers`. [What both can and can't see](docs/plan.md).

````{{raw}} html
{}
````
"""
PYODIDE = pathlib.Path(__file__).parent / "node_modules" / "pyodide"
RUNTIME = "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", \
    "pyodide-lock.json"
WORKER = "worker.js"
CONTENTS = """
```{toctree}
:hidden:
:caption: Course
README
labs/tour
docs/setup
docs/paths
questions/index
decks
planner
```
```{toctree}
:hidden:
:caption: Labs
:glob:
labs/[0-9]*
```
```{toctree}
:hidden:
:caption: Afterwards
docs/your_project
docs/plan
docs/diagnose
docs/cluster
docs/status
CHANGELOG
```
```{toctree}
:hidden:
:caption: For instructors
docs/teaching
CONTRIBUTING
docs/pins
```
"""


def lab_page(path, decks, public):
    """Return the notebook at `path`, with links to what else the lab has below its title."""
    stem = path.stem
    links = [f'<a href="../slides/{stem}.html">Deck</a>'] if stem in decks else []
    links += [f"[Interview questions](../questions/{stem}.md)", download(path)]
    if public:
        links += [f"[{text}]({url})" for text, url in public.buttons(stem).items()]
        links[-2] += " (with [this cell](../docs/setup.md#colab) in front)"
    return notebook_page(path, links)


def download(path):
    """Return a link to the notebook itself."""
    return f'<a href="../notebooks/{path.name}" download>Notebook</a>'


def notebook_page(path, links):
    """Return the notebook at `path` with `links` below its title and an alt text a figure."""
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["source"] += ["\n\n", " | ".join(links)]
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell["metadata"]["mystnb"] = {"image": {"alt": alt}}
    return json.dumps(notebook)


def question_list(questions, answers):
    """Return questions by level, with the numbers of one seed, below a filter without a server.

    Without JavaScript the filter is hidden, and all of them are shown.
    """
    by_level = sorted(questions, key=lambda question: question.level)
    choices = {name: sorted({getattr(question, name) for question in questions})
               for name in ("lab", "level", "kind")}
    selects = "".join(
        f'<label>{name} <select name="{name}"><option value="">all</option>'
        + "".join(f"<option>{value}</option>" for value in values) + "</select></label> "
        for name, values in choices.items() if len(values) > 1)
    unfold = '<label><input type="checkbox" name="unfold"> all answers</label> ' * answers
    form = f'<form id="filter" hidden>{selects}{unfold}<output></output></form>'
    parts = [start.RAW.format(form)]
    for place, question in enumerate(by_level, 1):
        shown = question_html(place, question, draw(question), answers)
        shown = shown.replace("</p>", "</p>\n")       # else the search joins their words
        about = " ".join(f'data-{name}="{getattr(question, name)}"' for name in choices)
        parts.append(start.RAW.format(f'<div class="question" {about}>{shown}</div>'))
    script = (pathlib.Path(__file__).parent / "questions.js").read_text()
    return "\n\n".join([*parts, start.RAW.format(f"<script>\n{script}</script>")])


def question_page(stem, name, questions, answers):
    """Return the page of a lab's questions."""
    short = name.partition(":")[0]
    return (f"# {short}: interview questions\n\n[The lab](../labs/{stem}.ipynb)\n\n"
            + question_list(questions, answers))


def list_page(heading, first, lines):
    """Return a page that is a list of links."""
    return "\n".join([f"# {heading}", "", first, "", *(f"- {line}" for line in lines)])


def planner_page(slides):
    """Make the planner's page and build/site/planner/; it is live where npm could fetch Pyodide."""
    try:
        slides.install(PYODIDE.parent.parent, "Pyodide", PYODIDE / RUNTIME[0], "a live planner")
    except slides.Missing as missing:
        print(f"no live planner: {missing}")
        return PLANNER.format(live.fragment())
    folder = OUT / "planner"
    folder.mkdir(parents=True)
    for path in (*(PYODIDE / name for name in RUNTIME), pathlib.Path(__file__).parent / WORKER):
        shutil.copy(path, folder)
    code = "import sys, ranklab.planner.live; print(*(m.__file__ for m in sys.modules.values()" \
           " if m.__name__.startswith('ranklab')), sep='\\n')"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             check=True).stdout.split("\n")[:-1]
    library = pathlib.Path(live.__file__).parents[2]
    with zipfile.ZipFile(folder / "ranklab.zip", "w", zipfile.ZIP_DEFLATED) as bundle:
        for path in (*map(pathlib.Path, modules), *library.glob("ranklab/planner/published/*.csv")):
            bundle.write(path, path.relative_to(library))
    return PLANNER.format(live.fragment(f"planner/{WORKER}"))


def labs(answers):
    """Return the notebooks that are shown, by stem; stop where a lab has no solution."""
    unsolved = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
    shown = [ROOT / "solutions" / path.name if answers else path for path in unsolved]
    for path in shown:
        if not path.exists():
            raise SystemExit(f"{path.relative_to(ROOT)} is missing: make build writes it")
    return {path.stem: path for path in shown}


def slides_module():
    """Load slides/build.py."""
    spec = importlib.util.spec_from_file_location("slides_build", ROOT / "slides" / "build.py")
    slides = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slides)
    return slides


def build_decks(slides):
    """Build the decks into build/site/slides/; return their stems, none where npm is missing."""
    slides.copy_figures(OUT / "slides")            # the start page shows them, with or without npm
    try:
        slides.install_marp()
    except slides.Missing as missing:
        print(f"no decks: {missing}")
        return ()
    slides.pages(OUT / "slides")
    return {path.stem for path in (OUT / "slides").glob("*.html")}


def write_source(answers, decks, public=None):
    """Write build/site-source/, which Sphinx reads."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for folder in ("labs", "questions", "docs"):
        (SOURCE / folder).mkdir(parents=True)
    shutil.copytree(ROOT / "slides" / "figures", SOURCE / "slides" / "figures")
    for name in TEXTS:
        shutil.copy(ROOT / name, SOURCE)
    for path in (ROOT / "docs").glob("*.md"):
        (SOURCE / "docs" / path.name).write_text(start.with_address(path.read_text(), public))
    (SOURCE / "README.md").write_text(start.about(decks, answers))
    bank, shown = load(), labs(answers)
    texts = {stem: start.first_cell(path) for stem, path in shown.items()}
    note = "```{note}\n" + (SOLVED if answers else UNSOLVED) + BESIDE + "```"
    (SOURCE / "index.md").write_text(start.page(texts, decks, public, note) + CONTENTS)
    names = {stem: text.splitlines()[0].removeprefix("# ") for stem, text in texts.items()}
    for stem, path in shown.items():
        (SOURCE / "labs" / path.name).write_text(lab_page(path, decks, public))
        questions = [question for question in bank if question.lab == stem]
        page = question_page(stem, names[stem], questions, answers)
        (SOURCE / "questions" / f"{stem}.md").write_text(page)
    (SOURCE / "labs" / TOUR.name).write_text(notebook_page(TOUR, [download(TOUR)]))
    every = question_list([question for question in bank if question.lab in shown], answers)
    (SOURCE / "questions" / "all.md").write_text(
        f"---\nnosearch: true\n---\n# All interview questions\n\n{every}")
    write_lists(names, decks, answers)


def write_lists(names, decks, answers):
    """Write the two pages that lead to all decks and to all questions."""
    lines = [f'<a href="slides/{stem}.html">{name}</a>' if stem in decks else f"{name}: no deck"
             for stem, name in names.items()]
    (SOURCE / "decks.md").write_text(list_page("Decks", "Ten minutes for each lab.", lines))
    lines = ["[All of them](all.md), by lab, level and kind"]
    lines += ['<a href="../anki/ranklab.txt" download>All of them for Anki</a> '
              "(in Anki: File > Import)"] * answers
    lines += [f"[{name}]({stem}.md)" for stem, name in names.items()]
    first = ("`ranklab drill` asks them in a terminal, with new numbers each time; `ranklab "
             "interview` holds a mock interview.")
    menu = "\n\n```{toctree}\n:hidden:\n:glob:\nall\n[0-9]*\n```\n"
    page = list_page("Interview questions", first, lines) + menu
    (SOURCE / "questions" / "index.md").write_text(page)


def build(answers):
    """Build the site in build/site/, and leave nothing of an earlier one."""
    shutil.rmtree(OUT, ignore_errors=True)
    slides = slides_module()
    write_source(answers, build_decks(slides), start.repository())
    (SOURCE / "planner.md").write_text(planner_page(slides))
    (OUT / "notebooks").mkdir(parents=True, exist_ok=True)
    for path in (TOUR, *labs(answers).values()):
        shutil.copy(path, OUT / "notebooks")
    if answers:
        (OUT / "anki").mkdir()
        (OUT / "anki" / "ranklab.txt").write_text(cards(load()))
    here = str(pathlib.Path(__file__).parent)
    doctrees = str(SOURCE / ".doctrees")
    if sphinx(["-q", "-W", "--keep-going", "-c", here, "-d", doctrees, str(SOURCE), str(OUT)]):
        raise SystemExit("the site could not be built (see above)")
    print(OUT / "index.html")


if __name__ == "__main__":
    build(answers=os.environ.get("RANKLAB_ANSWERS") != "0")
