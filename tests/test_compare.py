"""`ranklab compare`: all layouts in one table, whose losses agree."""

import json

import pytest

from ranklab.cli import main
from ranklab.hybrid import Layout
from ranklab.models.gpt import GPTConfig, count_parameters
from ranklab.projects.hybrid import compare

pytestmark = pytest.mark.timeout(180)


def test_losses_agree_and_costs_are_those_of_the_layout():
    split = Layout(2, 2, 2, sequence_parallel=True, zero=1)
    alone, data, mesh = rows = compare.compare([Layout(2), split], progress=False)
    assert data["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert mesh["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    whole = alone["held"]["parameters"]
    assert alone["sent"] == {"data": 0, "tensor": 0, "pipeline": 0}
    assert data["held"] == {"parameters": whole, "gradients": whole,
                            "optimizer_state": alone["held"]["optimizer_state"]}
    # a ring of two; 8 bytes for the number of targets, and 8 for the norm
    assert data["sent"] == {"data": whole + 16, "tensor": 0, "pipeline": 0}
    assert all(mesh["sent"].values())
    assert mesh["held"]["optimizer_state"] < 2 * mesh["held"]["parameters"] * 0.51
    said = compare.table(rows)
    assert "2 x 2 x 2 sp zero" in said and max(map(len, said.splitlines())) <= 100


def test_the_model_has_the_bytes_of_its_formula():
    row, = compare.compare([], progress=False)
    vocab = row["held"]["parameters"] // 4 - count_parameters(GPTConfig(1, **compare.SHAPE))
    assert vocab % compare.SHAPE["n_embd"] == 0


def test_the_default_is_every_layout():
    found = {(each.dp, each.tp, each.pp) for each in compare.every_layout(8)}
    assert len(found) == 10 and {each.ranks for each in compare.every_layout(8)} == {8}


def test_the_command_prints_json_and_draws(capsys, tmp_path):
    plot = tmp_path / "compare.svg"
    options = ["--layouts", "1x1x2,recompute", "--json", "--plot", str(plot)]
    assert main(["compare", *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["dp 1 x tp 1 x pp 1", "dp 1 x tp 1 x pp 2 recompute"]
    assert "1 x 1 x 2 recompute" in plot.read_text()


@pytest.mark.parametrize("text, said", [
    ("2x2", "'2x2' is no layout: write dp x tp x pp as 2x2x2"),
    ("2x2x2,fsdp", "'fsdp' is not one of sp, zero, full, recompute, "),
    ("0x1x1", "dp=0 must be at least 1"),
])
def test_what_is_no_layout_is_a_sentence(text, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "--layouts", text])
    assert capsys.readouterr().err.startswith(f"ranklab compare: {said}")
