"""`ranklab compare`: all layouts in one table, whose losses agree."""

import pytest

from ranklab.cli import main
from ranklab.models.gpt import count_parameters
from ranklab.projects.hybrid import compare
from ranklab.projects.hybrid.config import LAPTOP

pytestmark = pytest.mark.timeout(180)


def test_losses_agree_and_costs_are_those_of_the_layout(monkeypatch, capsys, tmp_path):
    rows, run = [], compare.compare
    monkeypatch.setattr(compare, "compare",
                        lambda *arguments, **more: rows.extend(run(*arguments, **more)) or rows)
    plot = tmp_path / "compare.svg"
    assert main(["compare", "--layouts", "2x1x1", "2x2x1,sp,zero", "--plot", str(plot)]) == 0
    alone, data, mesh = rows
    assert data["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert mesh["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    whole = alone["held"]["parameters"]
    assert whole == 4 * count_parameters(LAPTOP)
    assert alone["sent"] == {"data": 0, "tensor": 0, "pipeline": 0}
    assert data["held"] == alone["held"]
    # a ring of two; 8 bytes for the number of targets, and 8 for the norm
    assert data["sent"] == {"data": whole + 16, "tensor": 0, "pipeline": 0}
    assert mesh["sent"]["tensor"] and mesh["messages"] > data["messages"] > 0
    assert mesh["held"]["optimizer_state"] < 2 * mesh["held"]["parameters"] * 0.51
    printed = capsys.readouterr().out
    assert "KB: 1000 bytes, at the peak of a step, of the rank that has most" in printed
    assert "2 x 2 x 1 sp zero" in printed and max(map(len, printed.splitlines())) <= 100
    assert "2 x 2 x 1 sp zero" in plot.read_text()


@pytest.mark.parametrize("layouts", ["1x1x1,ep=2", pytest.param(
    "1x1x1,ep=2 2x1x1,ep=2 1x2x1,ep=2", marks=pytest.mark.sweep)])
def test_experts_are_spread_and_losses_agree(layouts, capsys):
    words = layouts.split()
    assert main(["compare", "--experts", "4", "--layouts", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "expert" in lines[1]
    losses = [float(line[22:28]) for line in lines[2:3 + len(words)]]
    assert losses == pytest.approx([losses[0]] * (1 + len(words)), abs=1e-4)


def test_the_default_is_every_layout():
    assert len({(each.dp, each.tp, each.pp) for each in compare.every_layout(8)}) == 10
    assert {each.ranks for each in compare.every_layout(8)} == {8}
    assert compare.every_layout(16)
    with pytest.raises(ValueError, match="no layout of 11 ranks fits"):
        compare.every_layout(11)


@pytest.mark.parametrize("text, sentence", [
    ("2x2", "'2x2' is no layout: write dp x tp x pp as 2x2x2"),
    ("2x2x2,fsdp", "'fsdp' is not one of sp, zero, full, recompute, "),
    ("0x1x1", "dp=0 must be at least 1"),
    ("1x3x1", "tp=3 must divide the 8 heads"),
    ("1x1x1,ep=2", "ep=2 shares out experts, and this GPT has none"),
])
def test_what_is_no_layout_is_a_sentence(text, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "--layouts", text])
    assert capsys.readouterr().err.startswith(f"ranklab compare: {sentence}")
