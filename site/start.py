"""The start page: the arc of the course as one picture, and a card for each lab.

All it says of a lab is taken from the lab, its deck, its questions and README.md's table.
"""
import html
import json
import os
import pathlib
import re
import subprocess
from dataclasses import dataclass

from ranklab.course.spine import MINUTES, part_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
GITHUB = re.compile(r"(?:(?:https|ssh)://)?(?:[^@/\s]+@)?github\.com[:/]([\w.-]+/[\w.-]+?)"
                    r"(?:\.git)?(?:/tree/([\w./-]+?))?/?")
NO_BUTTONS = ("no buttons for Colab and Codespaces: they need the public address, "
              "make site REPOSITORY=https://github.com/owner/name")
RAW = "````{{raw}} html\n{}\n````\n"        # HTML as it is, in a page of Markdown
NO_ADDRESS = "PUT THE ADDRESS OF THIS REPOSITORY HERE"    # in the cell for Colab
BUTTONS = """**Open in Colab** opens a lab as the repository has it: put
[this cell](docs/setup.md#colab) in front. **Open in Codespaces** opens the whole repository.
"""


def boxes(*each):
    """Return SVG's path of these boxes: x, y, width, height."""
    return "".join(f"M{x} {y}h{width}v{height}h-{width}z" for x, y, width, height in each)


RANKS = [(3, 3, 18, 18), (27, 3, 18, 18), (3, 27, 18, 18), (27, 27, 18, 18)]
# Name, what it is about, its labs, and its drawing of 48 x 48: what is filled, and what are lines.
PARTS = (
    ("One device", "processes, memory, FLOPs", ("00", "01"),
     boxes((14, 14, 20, 20)), boxes((8, 8, 32, 32))),
    ("Collectives", "ranks talk, and it costs bytes", ("02",), "",
     boxes((3, 3, 12, 12), (33, 3, 12, 12), (3, 33, 12, 12), (33, 33, 12, 12))
     + "M17 9h13m-4-4 4 4-4 4M39 17v13m-4-4 4 4 4-4M31 39h-13m4-4-4 4 4 4M9 31v-13m-4 4 4-4 4 4"),
    ("Data parallel", "a whole model on each rank, a part of the batch", ("03", "04", "05"),
     boxes(*((x + 4, y + 4, 10, 10) for x, y, *_ in RANKS)), boxes(*RANKS)),
    ("Sharding", "a part of the state on each rank", ("06", "07"),
     boxes((3, 3, 18, 4), (27, 8, 18, 4), (3, 36, 18, 4), (27, 41, 18, 4)), boxes(*RANKS)),
    ("Model parallel", "layers, depth, sequence and experts are split", ("08", "09", "10", "11"),
     boxes((11, 11, 10, 10), (27, 11, 10, 10), (11, 27, 10, 10), (27, 27, 10, 10)), boxes(*RANKS)),
    ("3D", "all of it on one model", ("12",),
     "M6 15l18 10v19l-18-10z", "M6 15 24 5l18 10v19L24 44 6 34zl18 10 18-10M24 25v19"),
    ("Planning", "does it fit, how fast, what does it cost", ("13",),
     boxes((11, 28, 7, 13), (22, 20, 7, 21), (33, 9, 7, 32)), "M5 3v39h40"),
    ("Survival", "a rank dies, the run goes on", ("14",),
     boxes(*((x + 4, y + 4, 10, 10) for x, y, *_ in RANKS[:3])),
     boxes(*RANKS[:3]) + "M29 29l14 14m0-14-14 14"),
    ("Clusters", "where it really runs", ("15",),
     boxes((8, 8, 8, 6), (8, 21, 8, 6), (8, 34, 8, 6), (32, 8, 8, 6), (32, 21, 8, 6),
           (32, 34, 8, 6)), boxes((3, 3, 18, 42), (27, 3, 18, 42)) + "M21 24h6"),
    ("Clinic", "broken runs, and what is wrong with them", ("16",),
     "", "M2 26h11l6-16 8 28 6-17 3 5h10"),
)


@dataclass(frozen=True)
class Repository:
    """owner/name on GitHub, where everyone can open it; its branch where that is known."""

    name: str
    branch: str = ""

    def buttons(self, stem):
        """Return {what a button says: where it leads}."""
        there = f"{self.name}/blob/{self.branch or 'main'}/labs/{stem}.ipynb"
        branch = f"/tree/{self.branch}" if self.branch else ""
        return {"Open in Colab": f"https://colab.research.google.com/github/{there}",
                "Open in Codespaces": f"https://codespaces.new/{self.name}{branch}"}


def git(*words):
    """Return what git says of this clone; "" where there is no clone, or no git."""
    try:
        return subprocess.run(["git", f"--git-dir={ROOT / '.git'}", *words], text=True, timeout=20,
                              stdin=subprocess.DEVNULL, capture_output=True).stdout.strip()
    except OSError:
        return ""


def repository():
    """Return the Repository that REPOSITORY names, else git's origin; print why it is None."""
    asked = os.environ.get("REPOSITORY")
    if (address := asked) is None and (address := git("remote", "get-url", "origin")):
        head = git("symbolic-ref", "--short", "refs/remotes/origin/HEAD")
        address += head.replace("origin/", "/tree/", 1)
    if found := GITHUB.fullmatch(address):
        return Repository(found[1], found[2] or "")
    if asked:
        raise SystemExit(f"REPOSITORY={asked} is no address such as https://github.com/owner/name")
    return print(NO_BUTTONS)


def link(text, url, kind=""):
    return f'<a href="{url}"{kind and f" class={kind}"}>{text}</a>'


def arc(texts):
    """Return the parts in their order, each with its drawing, minutes and links to its labs' cards.
    """
    items = []
    for part, about, numbers, filled, lines in PARTS:
        found = {stem: re.match(r"# ([^:\n]*?)(?: parallelism)?[:\n].*?\n> (\d+) ", text, re.S)
                 for stem, text in texts.items() if stem[:2] in numbers}
        labs = "".join(link(lab[1], f"#{stem}") for stem, lab in found.items())
        items.append(
            f'<li><svg viewBox="0 0 48 48" aria-hidden="true"><path class="filled" d="{filled}"/>'
            f'<path d="{lines}"/></svg><b>{part}</b><span>{about}</span><span>{labs}</span>'
            f"<small>{sum(int(lab[2]) for lab in found.values())} minutes</small></li>")
    return '<ol class="arc">\n' + "\n".join(items) + "\n</ol>"


def card(stem, first, row, links, buttons):
    """Return a lab: its figure, minutes, what is built in it, links and buttons ({text: address}).

    first  the text of its first cell, with minutes and difficulty
    row    its line in README.md: what you build, and on what it runs
    """
    name = html.escape(first.splitlines()[0].removeprefix("# "))
    part = part_of(stem)
    spine = f" On the spine: {html.escape(str(part))}." if part else ""
    minutes, level = re.search(r"> (\d+ minutes[^\xb7]*) \xb7 difficulty (\d)/5", first).groups()
    build, runs = (re.sub("`(.*?)`", r"<code>\1</code>", html.escape(cell)) for cell in row)
    deck = (ROOT / "slides" / f"{stem}.md").read_text()       # its first figure is the lab's
    said, path = re.search(r"!\[[wh]:\d+ ([^\]]+)\]\((figures/\S+\.svg)\)", deck).groups()
    shown = " ".join(link(text, url) for text, url in links.items()) + "<br>" * bool(buttons)
    shown += " ".join(link(text, url, "open") for text, url in buttons.items())
    return f"""<article id="{stem}">
<a href="labs/{stem}.html"><img src="slides/{path}" alt="{html.escape(said)}" loading="lazy"></a>
<p><b>{link(name, f"labs/{stem}.html")}</b></p>
<p><b>{minutes}</b>, difficulty {level} of 5. {build[0].upper()}{build[1:]}.{spine}
<small>Runs on: {runs}.</small></p><p class="links">{shown}</p></article>"""


def first_cell(path):
    """Return a notebook's title, minutes and difficulty."""
    return "".join(json.loads(path.read_text())["cells"][0]["source"])


def about(decks, answers):
    """Return README.md under another title than the start page; its links lead into the site.

    A lab has one page here, solved or not, and a deck only where its stem is in `decks`.
    """
    def deck(match):
        return link("slides", f"slides/{match[1]}.html") if match[1] in decks else "slides"

    text = (ROOT / "README.md").read_text().replace("# ranklab\n", "# About ranklab\n", 1)
    both = r"\[lab\]\((labs/\w+\.ipynb)\), \[solved\]\(solutions/\w+\.ipynb\)"
    text = re.sub(both, r"[solved](\1)" if answers else r"[lab](\1)", text)
    text = text.replace("](solutions/)", "](index.md#labs)")
    return re.sub(r"\[slides\]\(slides/(\w+)\.md\)", deck, text)


def with_address(text, public):
    """Return `text`, in which the cell for Colab has the address of this Repository."""
    return text.replace(NO_ADDRESS, f"https://github.com/{public.name}") if public else text


def page(texts, decks, public, note):
    """Return the page in Markdown: what the course is, `note`, its arc, its labs.

    texts   {stem: the first cell of the lab}
    public  a Repository, or None
    """
    readme = (ROOT / "README.md").read_text()
    title, lead, *rest = readme.split("\n\n")
    whom = rest[rest.index("## For whom") + 1]
    rows = {stem: cells for stem, *cells in re.findall(
        r"^\| \[(\d\d_\w+)\]\S+ \| (.*?) \| \d+ \| (.*?) \|$", readme, re.M)}
    cards = []
    for stem, text in texts.items():
        links = {"Deck": f"slides/{stem}.html"} if stem in decks else {}
        links |= {"Questions": f"questions/{stem}.html", "Notebook": f"notebooks/{stem}.ipynb"}
        buttons = public.buttons(stem) if public else {}
        cards.append(card(stem, text, rows[stem], links, buttons))
    shown = '<div class="labs">\n' + "\n".join(cards) + "\n</div>"
    begin = (f"Begin with [the tour](labs/tour.ipynb), ten minutes to read. [The spine]"
             f"(docs/paths.md#the-spine) is {MINUTES / 60:.0f} hours of the labs below, in its own "
             "order.")
    return "\n\n".join([title, lead, whom, note, "## The course", begin, RAW.format(arc(texts)),
                        "## Labs", BUTTONS if public else "", RAW.format(shown)])
