"""Turn slides/*.md into HTML, and PDF where chromium is installed, under build/slides/.

`--check` builds nothing for readers: it opens every deck in chromium and names each slide whose
content leaves the page. What is missing on this machine is one sentence, with what to install.
"""
import argparse
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent / "build" / "slides"
MEASURE = HERE / "measure.js"
MARP = HERE / "node_modules" / ".bin" / "marp"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

SLACK = 2     # pixels: fonts differ a little from machine to machine
LOW = 240     # pixels, a third of a slide: a figure below that is too small for a room


class Missing(Exception):
    """One sentence: what this machine lacks and how to get it."""


def browser():
    """Return the path of a chromium; raise Missing without one."""
    for name in (os.environ.get("CHROME_PATH"), *BROWSERS):
        if name and shutil.which(name):
            return shutil.which(name)
    raise Missing("needs chromium for PDF and for the overflow check: apt install chromium")


def install_marp():
    """Put Marp into node_modules; raise Missing where it can't be had."""
    install(HERE, "Marp", MARP, "the slides")


def install(folder, name, path, purpose):
    """Install what the folder's package-lock.json pins; raise Missing where `path` can't be had.
    """
    if not shutil.which("npm"):
        raise Missing(f"needs node and npm for {purpose}: install Node.js 20 or newer "
                      "(Debian: apt install nodejs npm), then run the same command again")
    stamp, pins = folder / "node_modules" / ".package-lock.json", folder / "package-lock.json"
    with pins.open() as lock:  # npm ci begins by removing what another process has installed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.stat().st_mtime >= pins.stat().st_mtime and path.exists():
            return
        done = subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        if done.returncode:
            last = (done.stdout.strip().splitlines() or ["no message"])[-1]
            raise Missing(f"needs npm to reach a registry once, to install {name}: {last}")
        os.utime(stamp)


def marp(deck, out, *options):
    """Make `out` from the deck, in the format of its suffix; from a folder, a folder of HTML."""
    source = ["--input-dir", deck] if deck.is_dir() else [deck]
    env = {**os.environ, "CHROME_NO_SANDBOX": "1"}      # chromium has no sandbox for root
    done = subprocess.run(
        [MARP, *source, "-o", out, "--theme-set", HERE / "theme.css", "--no-stdin", "--html",
         "--allow-local-files", *options],
        env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{deck.name}: marp stopped with\n{done.stdout}")


def draw(*texts):
    """Draw the decks' figures anew: 00_ranks.md's by figures/00_ranks.py, where there is one."""
    codes = [HERE / "figures" / f"{text.stem.lower()}.py" for text in texts]
    codes = [code for code in codes if code.exists()]
    print(f"drawing the figures of {len(codes)} files", flush=True)
    if codes and subprocess.run([sys.executable, HERE / "draw.py", *codes]).returncode:
        raise SystemExit("figures could not be drawn (see above)")


def copy_figures(out):
    """Copy the figures to `out`/figures, where the decks look for them."""
    if (HERE / "figures").exists():
        shutil.copytree(HERE / "figures", out / "figures", dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("*.py"))


def pages(out):
    """Write every deck to `out` as HTML, its figures as they were drawn last: in seconds."""
    marp(HERE, out)
    copy_figures(out)


def build(decks):
    """Write HTML and PDF of each deck to build/slides/, figures drawn anew and beside them."""
    OUT.mkdir(parents=True, exist_ok=True)
    draw(HERE.parent / "README.md", *decks)
    copy_figures(OUT)
    try:
        chromium = browser()
    except Missing as missing:
        chromium = print(f"no PDF: {missing}")
    for deck in decks:
        marp(deck, OUT / f"{deck.stem}.html")
        if chromium:
            marp(deck, OUT / f"{deck.stem}.pdf", "--browser", "chrome", "--browser-path", chromium)
        print(OUT.relative_to(HERE.parent) / f"{deck.stem}.html", "and .pdf" if chromium else "")


def measure(deck, folder, chromium):
    """Return what is bad in one deck, as chromium lays it out: measure.js says of what form."""
    page = folder / f"{deck.stem}.html"
    marp(deck, page, "--template", "bare")
    done = subprocess.run(["node", MEASURE, chromium, page.as_uri(), str(SLACK), str(LOW)],
                          text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=200)
    if done.returncode:
        raise SystemExit(f"{deck.name}: chromium measured nothing:\n{done.stdout}")
    return json.loads(done.stdout)


def check(decks):
    """Return a sentence a slide that leaves its page, misses a picture or shrinks its figure."""
    chromium, problems = browser(), []
    with tempfile.TemporaryDirectory(prefix="ranklab-slides-") as name:
        folder = pathlib.Path(name)
        copy_figures(folder)
        for deck in decks:
            for one in measure(deck, folder, chromium):
                place = f"{deck.name} slide {one['slide']}"
                problems += [f"{place}: no picture {image}" for image in one["images"]]
                problems += [f"{place}: a figure is {height} px high, less than {LOW}: give "
                             "it more room" for height in one["low"]]
                if one.get("over", ["", 0])[1] > SLACK:
                    side, pixels, text = one["over"]
                    problems.append(f"{place}: {pixels} px past the {side} edge at {text!r}")
    return problems


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("decks", nargs="*", type=pathlib.Path, help="default: all of slides/")
    parser.add_argument("--check", action="store_true", help="name the slides that overflow")
    options = parser.parse_args(argv)
    decks = [d.resolve() for d in options.decks] or sorted(HERE.glob("[0-9][0-9]_*.md"))
    try:
        install_marp()
        if not options.check:
            return build(decks)
        problems = check(decks)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 1
    print("\n".join(problems) or f"{len(decks)} decks: every slide fits its page")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
