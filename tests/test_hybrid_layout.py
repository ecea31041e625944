"""`ranklab layout`: a layout's mesh, its costs, and what others are told."""

import pytest

from ranklab.cli import main


def test_it_says_who_talks_to_whom_and_what_it_costs(capsys):
    assert main(["layout", "2x8x4,zero,sp,virtual=5", "--size", "100b"]) == 0
    said = capsys.readouterr().out
    for words in ("64 ranks: pipeline 4 x data 2 x tensor 8", "tensor    0 1 2 3 4 5 6 7",
                  "between nodes of 8 go the messages of: pipeline, data", "optimizer state",
                  "sent in a step along"):
        assert words in said, words
    assert "--" not in said


def test_it_prints_what_others_are_told(capsys):
    assert main(["layout", "1x4x2", "--per-node", "4", "--megatron", "--torchtitan"]) == 0
    said = capsys.readouterr().out
    assert "--pipeline-model-parallel-size 2 " in said and "torchrun --nnodes 2" in said
    assert "pipeline_parallel_degree = 2" in said


def test_nvlink_may_join_more_than_a_host(capsys):
    assert main(["layout", "1x8x1", "--per-node", "72", "--per-host", "4", "--megatron"]) == 0
    said = capsys.readouterr().out
    assert "go the messages of: no axis" in said and "--nnodes 2 --nproc-per-node 4" in said


@pytest.mark.parametrize("arguments, said", [
    (["2x2"], "'2x2' is no layout: write dp x tp x pp as 2x2x2"),
    (["1x3x1"], "tp=3 must divide the 40 heads"),
    (["1x8x1", "--per-node", "4"], "tp=8 tensor ranks would be on several nodes of 4"),
    (["7x1x1"], "dp x micro-batch = 7 must divide the batch of "),
    (["1x1x40"], "stages=40 must be between 1 and the 34 layers"),
])
def test_what_can_not_be_is_a_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["layout", *arguments])
    found = capsys.readouterr().err
    assert found.startswith(f"ranklab layout: {said}") and found.count("\n") == 1
