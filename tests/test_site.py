"""The site: every link leads somewhere, nothing comes from another server, every lab is there."""

import functools
import html.parser
import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
import urllib.parse

import pytest
from conftest import ROOT
from test_slides import slides

from ranklab.interview.bank import load
from ranklab.planner import live

pytest.importorskip("myst_nb", reason="needs sphinx and myst-nb: make setup installs them")
sys.path.insert(0, str(ROOT / "site"))      # as Python does for a script
spec = importlib.util.spec_from_file_location("site_build", ROOT / "site" / "build.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)
start = site.start
STEMS = sorted(path.stem for path in (ROOT / "labs" / "source").glob("[0-9]*.py"))
pytestmark = [pytest.mark.timeout(300),   # 15 s on an idle machine
              pytest.mark.filterwarnings("ignore:'myst_parser")]


class Page(html.parser.HTMLParser):
    """What one page links to, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.path, self.text = path, path.read_text()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values.get("id"), values.get("name")}
        kind = self.links if tag == "a" else self.loads
        kind += [values[name] for name in ("src", "href", "data", "srcset") if values.get(name)]


def built(folder, answers):
    """Every page of the real site, by its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "OUT", folder / "site")
        patch.setattr(site, "SOURCE", folder / "source")
        patch.setenv("REPOSITORY", "https://github.com/owner/name/tree/autumn")
        site.build(answers=answers)
    found = [Page(path) for path in sorted((folder / "site").rglob("*.html"))]
    return {str(page.path.relative_to(folder / "site")): page for page in found}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return built(tmp_path_factory.mktemp("site").resolve(), answers=True)


@pytest.fixture(scope="module")
def bank():
    return load()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Where write_source puts what Sphinx would read."""
    monkeypatch.setattr(site, "SOURCE", tmp_path / "source")
    return site.SOURCE


def broken(page, url, by_path):
    """True when `url` names no file of the site, or an anchor that its page lacks."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme in ("http", "https", "data"):
        return False
    path = urllib.parse.unquote(parts.path)
    target = (page.path.parent / path).resolve() if path else page.path
    if path.startswith("/") or not target.is_file():
        return True
    anchors = by_path[target].anchors if target in by_path else {parts.fragment}
    return bool(parts.fragment) and parts.fragment not in anchors


def all_broken(pages):
    by_path = {page.path: page for page in pages.values()}
    return [(name, url) for name, page in pages.items() for url in page.links + page.loads
            if broken(page, url, by_path)]


def test_every_link_anchor_and_picture_is_there(pages):
    assert not all_broken(pages)


def test_the_tour_is_there_and_the_spine_is_marked(pages):
    assert {"labs/tour.html", "docs/paths.html#the-spine"} <= set(pages["index.html"].links)
    assert pages["index.html"].text.count("On the spine: 4.1") == 8      # 06 begins with 4.2
    assert "../notebooks/tour.ipynb" in pages["labs/tour.html"].links
    assert "labs/tour.html" in pages["README.html"].links


@pytest.mark.sweep
def test_without_answers_too(tmp_path):
    pages = built(tmp_path.resolve(), answers=False)
    assert not all_broken(pages) and "not solved" in pages["index.html"].text
    assert pages["index.html"].text.count('<article id="') == len(STEMS)
    test_no_page_scrolls_sideways(pages, tmp_path)


def test_nothing_is_loaded_from_another_server(pages):
    for name, page in pages.items():
        away = [url for url in page.loads if re.match(r"(https?:)?//", url)]
        assert not away, f"{name}: a formula, for instance, would need MathJax from elsewhere"
    root = pages["index.html"].path.parent
    for path in [*root.rglob("*.css"), *root.rglob("*.html")]:
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text()), path


@pytest.mark.parametrize("stem", STEMS)
def test_a_lab_its_outputs_and_its_questions_are_there(pages, bank, stem):
    solved = json.loads((ROOT / "solutions" / f"{stem}.ipynb").read_text())
    outputs = [out for cell in solved["cells"] for out in cell.get("outputs", ())]
    figures = sum("image/png" in out.get("data", ()) for out in outputs)
    lab, asked = pages[f"labs/{stem}.html"], pages[f"questions/{stem}.html"]
    said = re.findall('<img alt="(.*?)"', lab.text)
    assert len(said) == figures and all(len(words.split()) > 4 for words in said), said
    assert " minutes" in lab.text and "-&gt;</b>    passed" in lab.text
    assert {f"../questions/{stem}.html", f"../notebooks/{stem}.ipynb"} <= set(lab.links)
    assert f"labs/{stem}.html" in pages["index.html"].links
    assert asked.text.count("<details>") == sum(one.lab == stem for one in bank)


@pytest.mark.parametrize("stem", STEMS)
def test_the_start_page_shows_a_lab(pages, stem):
    page = pages["index.html"]
    card = re.search(f'<article id="{stem}">(.*?)</article>', page.text, re.S)[1]
    minutes = re.search(r"# > (\d+ minutes)", (ROOT / f"labs/source/{stem}.py").read_text())[1]
    assert f"<b>{minutes}" in card and minutes in pages[f"labs/{stem}.html"].text
    assert f'<img src="slides/figures/{stem[:2]}_' in card and f"#{stem}" in page.links
    buttons = {f"https://colab.research.google.com/github/owner/name/blob/autumn/labs/{stem}.ipynb",
               "https://codespaces.new/owner/name/tree/autumn"}
    pages_of_it = {f"questions/{stem}.html", f"slides/{stem}.html"} & set(pages)
    wanted = {f"notebooks/{stem}.ipynb", *pages_of_it, *buttons}
    assert wanted <= set(re.findall('href="(.*?)"', card))
    assert buttons <= set(pages[f"labs/{stem}.html"].links)


def test_the_arc_has_every_lab_in_order_and_colabs_cell_the_address(pages):
    shown = html.unescape(re.sub("<.*?>", "", pages["docs/setup.html"].text))
    assert 'REPOSITORY = "https://github.com/owner/name"' in shown
    about = set(pages["README.html"].links)
    assert {"labs/00_ranks.html", "docs/paths.html#the-spine", "index.html#labs"} <= about
    assert [number for part in start.PARTS for number in part[2]] == [stem[:2] for stem in STEMS]


@pytest.mark.parametrize("asked, origin, name, branch", [
    ("https://github.com/me/labs", "", "me/labs", ""),
    ("https://github.com/me/la.bs/tree/fall/26/", "", "me/la.bs", "fall/26"),
    (None, "https://me:secret@github.com/me/labs.git", "me/labs", "trunk"),
    (None, "git@github.com:me/labs.git", "me/labs", "trunk"),
    (None, "ssh://git@github.com/me/labs", "me/labs", "trunk"),
    (None, "https://github.com.example.org/me/labs", None, None),
    (None, "", None, None),
    ("", "git@github.com:me/labs.git", None, None)])
def test_the_public_address(monkeypatch, tmp_path, capsys, asked, origin, name, branch):
    monkeypatch.setattr(start, "ROOT", tmp_path)
    for line in [f"remote add origin {origin}",
                 "symbolic-ref refs/remotes/origin/HEAD refs/remotes/origin/trunk"] * bool(origin):
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", *line.split()], cwd=tmp_path, check=True)
    monkeypatch.delenv("REPOSITORY", raising=False)
    if asked is not None:
        monkeypatch.setenv("REPOSITORY", asked)
    found = start.repository()
    assert found == (name and start.Repository(name, branch))
    assert capsys.readouterr().out == ("" if name else start.NO_BUTTONS + "\n")
    monkeypatch.setenv("REPOSITORY", "me/labs")
    with pytest.raises(SystemExit, match="REPOSITORY=me/labs is no address such as https"):
        start.repository()


@pytest.mark.parametrize("stem", STEMS)
def test_a_deck_is_there(pages, stem):
    if "slides/00_ranks.html" not in pages:
        pytest.skip("needs node and npm for the decks")
    assert f"../slides/{stem}.html" in pages[f"labs/{stem}.html"].links
    assert f"slides/{stem}.html" in pages["decks.html"].links
    assert "<section" in pages[f"slides/{stem}.html"].text


def test_the_planner_is_there(pages):
    assert "planner.html" in pages["index.html"].links
    assert "llama-70b on 256 GPUs of h100-dgx" in pages["planner.html"].text   # without scripts


def browser():
    try:
        return slides.browser()
    except slides.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def address(pages):
    """The site over HTTP: a browser starts no worker of a file."""
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    folder = pages["index.html"].path.parent
    with http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Silent, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_planner_plans_in_a_browser(pages, address):
    if not (pages["index.html"].path.parent / "planner").exists():
        pytest.skip("needs node and npm for a live planner")
    config = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "vocab_size":
              151936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
              "intermediate_size": 3072, "tie_word_embeddings": True}
    changes = [{"gpus": 24, "sequence": 4096}, {"network": 5, "price": 2.5}, {"gpus": 0},
               {"gpus": 16, "config": json.dumps(config)},
               {"config": json.dumps({"model_type": "mamba"})}]
    done = subprocess.run(
        ["node", ROOT / "tests" / "plan_in_browser.js", browser(), f"{address}/planner.html",
         json.dumps([{name: str(value) for name, value in change.items()} for change in changes])],
        capture_output=True, text=True, timeout=250)
    assert not done.returncode, done.stderr
    asked = {}
    for change, (said, out) in zip([{}, *changes], json.loads(done.stdout), strict=True):
        asked |= change
        right = json.loads(live.answer(json.dumps(asked)))
        if "refused" in right:
            assert (said, out) == (right["refused"] + ".", "")
            continue
        assert said.startswith(right["model"])
        for layout, *_ in right["row"][-1]:
            assert layout in out
        assert right["row"][3][2] in out               # how many published runs are behind it


def test_without_npm_the_planner_shows_one_plan_and_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(site, "OUT", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    page = site.planner_page(slides)
    assert "no live planner: needs node and npm" in capsys.readouterr().out
    assert '"worker":""' in page and not [*tmp_path.iterdir()]


def test_questions_are_all_there_and_for_anki(pages, bank):
    root = pages["index.html"].path.parent
    assert pages["questions/all.html"].text.count('class="question"') == len(bank)
    assert (root / "anki" / "ranklab.txt").read_text() == site.cards(bank)
    assert {"all.html", "../anki/ranklab.txt"} <= set(pages["questions/index.html"].links)


def after_scripts(path):
    """The page as it is when chromium has run its scripts."""
    return subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=200).stdout


def test_no_page_scrolls_sideways(pages, tmp_path):
    """On a phone and on a laptop, light and dark; a page that is too wide on a phone is found."""
    (tmp_path / "wide.html").write_text('<!doctype html><p style="width: 500px">wide')
    paths = [page.path for name, page in pages.items() if not name.startswith("slides/")]
    frames = "".join(f'<iframe height="900" src="{path.as_uri()}"></iframe>'
                     for path in [*paths, tmp_path / "wide.html"])
    (tmp_path / "page.html").write_text("<!doctype html>" + frames + """<script>
    onload = () => {
      const found = [];
      for (const frame of document.querySelectorAll("iframe"))
        for (const width of [390, 1400]) for (const theme of ["light", "dark"]) {
          frame.style.width = `${width}px`;
          const {body, documentElement: page} = frame.contentDocument;
          body.dataset.theme = theme;
          found.push(`${frame.src} ${width} ${theme} ${page.scrollWidth > page.clientWidth}`);
        }
      document.title = found.join("|");
    };</script>""")
    title = re.search("<title>(.*?)</title>", after_scripts(tmp_path / "page.html"), re.S)[1]
    found = [line.split() for line in title.split("|")]
    assert len(found) == 4 * (len(paths) + 1)
    wide = [(tmp_path / "wide.html").as_uri(), "390"]
    assert [line[:3] for line in found if line[3] == "true"] == [[*wide, "light"], [*wide, "dark"]]


def test_the_filter_shows_what_fits_and_unfolds_it(pages, bank, tmp_path):
    act = """<script>
    for (const [name, value] of [["lab", "04_ddp"], ["kind", "open"]]) form[name].value = value;
    form.kind.dispatchEvent(new Event("change", {bubbles: true})); form.unfold.click();
    const seen = [...document.querySelectorAll(".question")].filter(
      (one) => getComputedStyle(one).display !== "none");
    document.title = `${form.querySelector("output").value}, ${seen.length} seen, `
      + `${seen.filter((one) => one.querySelector("details").open).length} open`;
    </script></body>"""
    (tmp_path / "page.html").write_text(
        pages["questions/all.html"].text.replace("</body>", act))
    count = sum(one.lab == "04_ddp" and one.kind == "open" for one in bank)
    shown = after_scripts(tmp_path / "page.html")
    assert f"<title>{count} questions, {count} seen, {count} open</title>" in shown


def test_the_search_knows_words_of_labs_and_of_questions(pages):
    text = (pages["index.html"].path.parent / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    for word, page in (("perfetto", "labs/04_ddp"), ("silent", "labs/00_ranks"),
                       ("straggler", "questions/04_ddp")):
        found = index["terms"][word]
        found = [found] if isinstance(found, int) else found
        assert index["docnames"].index(page) in found, word
        assert index["docnames"].index("questions/all") not in found, "each would be found twice"


def test_without_answers(source):
    site.write_source(answers=False, decks=())
    for stem in STEMS:
        assert "<details>" not in (source / "questions" / f"{stem}.md").read_text()
        lab = json.loads((source / "labs" / f"{stem}.ipynb").read_text())
        assert not [cell for cell in lab["cells"] if cell.get("outputs")]
    assert "not solved" in (source / "index.md").read_text()


def test_a_missing_solution_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs" / "00_ranks.ipynb").write_text("{}")
    with pytest.raises(SystemExit, match="solutions/00_ranks.ipynb is missing: make build"):
        site.labs(answers=True)


def test_without_npm_the_site_has_no_decks_and_says_so(source, monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert site.build_decks(slides) == ()
    assert "no decks: needs node and npm" in capsys.readouterr().out
    site.write_source(answers=True, decks=())
    assert "00 Ranks: many processes, one program: no deck" in (source / "decks.md").read_text()
    assert "slides/00_ranks.html" not in (source / "labs" / "00_ranks.ipynb").read_text()
