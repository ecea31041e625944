"""One version: the package's, the newest in CHANGELOG.md, and the one that CITATION.cff names."""

import re
import tomllib

import pytest
import yaml
from conftest import ROOT

import ranklab
from ranklab import cli

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", CHANGELOG, re.M)


def test_package_changelog_and_citation_agree(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    cited = yaml.load((ROOT / "CITATION.cff").read_text(), yaml.BaseLoader)
    assert capsys.readouterr().out == f"ranklab {ranklab.__version__}\n"
    assert RELEASES[0] == (ranklab.__version__, cited["date-released"])
    assert cited["version"] == ranklab.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]  # taken from the package, so said once
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ranklab.__version__"}
    assert cited["license"] == project["project"]["license"]


def test_changelog_has_its_form():
    assert CHANGELOG.startswith("# Changelog\n")
    assert RELEASES == sorted(RELEASES, reverse=True, key=numbers)
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^## (.*)$", CHANGELOG, re.M)) == {
        "[Unreleased]", *(f"[{version}] - {date}" for version, date in RELEASES)}


def numbers(release):
    return [int(part) for part in release[0].split(".")]
