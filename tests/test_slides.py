"""The decks: no slide overflows, no picture is missing, and what is not installed is a sentence."""

import importlib.util
import json
import re
import shutil

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("slides_build", ROOT / "slides" / "build.py")
slides = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slides)
pytestmark = pytest.mark.timeout(400)     # chromium is slow on a busy machine
DECKS = sorted((ROOT / "slides").glob("[0-9][0-9]_*.md"))

NUMBER = re.compile(r"(?<![\w#])-?\d+\.\d+")
TOO_MUCH = """---
marp: true
theme: ranklab
---
# Fits
one line
---

# Too long
""" + "\n- a line" * 30 + """

---

# Too wide
<span style="white-space: nowrap">""" + "a" * 200 + """</span>

---

# No picture
![](figures/nobody_drew_this.svg)

---

# A figure for ants
![h:150](figures/00_circle.svg)
"""


@pytest.fixture(scope="module")
def installed():
    """Marp and chromium are here; else the test is skipped with build.py's own sentence."""
    try:
        slides.install_marp()
        return slides.browser()
    except slides.Missing as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
@pytest.mark.parametrize("deck", [
    pytest.param(deck, id=deck.name, marks=[pytest.mark.sweep] * (deck != DECKS[0]))
    for deck in DECKS])
def test_every_slide_fits_and_has_its_pictures(installed, deck):
    assert slides.check([deck]) == []


@pytest.mark.slow
def test_what_does_not_fit_is_named(installed, tmp_path):
    deck = tmp_path / "99_made.md"
    deck.write_text(TOO_MUCH.replace("line\n---", "line\n\n---"))
    long, wide, missing, low = slides.check([deck])
    assert "99_made.md slide 2" in long and "past the bottom edge" in long
    assert "99_made.md slide 3" in wide and "past the right edge" in wide
    assert missing == "99_made.md slide 4: no picture figures/nobody_drew_this.svg"
    assert "99_made.md slide 5: a figure is" in low and "px high, less than 240" in low


@pytest.mark.slow
def test_html_and_pdf_are_built(installed, tmp_path, monkeypatch):
    deck = tmp_path / "99_made.md"
    deck.write_text("---\nmarp: true\ntheme: ranklab\n---\n# One\n")
    monkeypatch.setattr(slides, "OUT", slides.HERE.parent / "build" / "slides-test")
    drawn = []  # drawing is tested below, and README's figure takes a minute
    monkeypatch.setattr(slides, "draw", lambda *texts: drawn.extend(texts))
    try:
        slides.build([deck])
        assert drawn == [ROOT / "README.md", deck]
        assert "<section" in (slides.OUT / "99_made.html").read_text()
        assert (slides.OUT / "99_made.pdf").read_bytes().startswith(b"%PDF")
    finally:
        shutil.rmtree(slides.OUT, ignore_errors=True)


def draw_in(checkout, *texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slides, "HERE", checkout / "slides")
        slides.draw(*texts)


def stale(text, checkout):
    """The figures of a text that are not as they were drawn just now."""
    begin = "readme" if text.name == "README.md" else text.name[:2]
    figures = sorted((checkout / "slides" / "figures").glob(f"{begin}_*.svg"))
    assert figures
    kept = {one: (ROOT / "slides" / "figures" / one.name).read_text() for one in figures}
    return [one.name for one in figures if not look_alike(one.read_text(), kept[one])]


def look_alike(drawn, kept):
    """Return whether two figures differ by less than a hundredth of a point: where a curve shows
    what was computed, the last digits are another CPU's.
    """
    (texts, numbers), (others, places) = (
        (NUMBER.sub("#", svg), [float(each) for each in NUMBER.findall(svg)])
        for svg in (drawn, kept))
    return texts == others and numbers == pytest.approx(places, rel=0, abs=0.01)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.name)
def test_figures_are_what_the_code_draws_today(deck, checkout):
    # A figure of memory counts what lives. On a busy machine gloo's thread may hold a message for
    # a moment longer, so what is drawn once may have a dent that is not there the next time.
    for _ in range(2):
        draw_in(checkout, deck)
        if not stale(deck, checkout):
            return
    assert not stale(deck, checkout), "make slides"


@pytest.mark.slow
@pytest.mark.sweep  # a minute: all layouts of four ranks
def test_readmes_figures_are_what_the_code_draws_today(checkout):
    draw_in(checkout, ROOT / "README.md")
    assert not stale(ROOT / "README.md", checkout), "make slides"


def test_what_is_missing_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(slides.shutil, "which", lambda name: None)
    assert slides.main(["--check"]) == 1
    assert "install Node.js 20 or newer" in capsys.readouterr().err
    with pytest.raises(slides.Missing, match="apt install chromium"):
        slides.browser()


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.name)
def test_decks_share_one_look(deck):
    front = deck.read_text().split("---")[1]
    assert "marp: true" in front and "theme: ranklab" in front


@pytest.mark.parametrize("folder", ["slides", "site"])
def test_lock_has_no_download_addresses(folder):
    lock = json.loads((ROOT / folder / "package-lock.json").read_text())
    for name, package in lock["packages"].items():
        assert "resolved" not in package, name
        assert name == "" or package.get("integrity"), f"{name} is not pinned by its content"
