"""Lab 05's project: one process's losses on any ranks, bytes, timelines, the step by MPI."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import ranklab.horovod as hvd
from ranklab import launch
from ranklab.data.labelled_text import Words
from ranklab.engine import torchrun
from ranklab.horovod.trace import Phase, all_reduces, one_step, read_timeline
from ranklab.peers import mpi
from ranklab.projects.horovod import __main__ as command
from ranklab.projects.horovod import bert, training
from ranklab.projects.horovod.timeline import shares
from ranklab.projects.horovod.training import Config

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(180)]
needs_bert = pytest.mark.skipif(not training.is_here(), reason="needs transformers")
SMALL = Config(steps=3, batch=12, n_ctx=8, width=16, n_layer=1, lr=1e-2, warmup=1)
FILMS = [f"{kind},{kind} films {i}" for i in range(40) for kind in ("good", "bad")]


def small_tokens(n=50):
    """Texts of two classes, which their third word tells apart."""
    texts = [f"one two {'left' if i % 3 else 'right'} {i % 7}" for i in range(n)]
    labels = torch.tensor([int(i % 3 > 0) for i in range(n)])
    words = Words(texts, 32)
    x = words.encode(texts, SMALL.n_ctx)
    return bert.Tokens("small", ("right", "left"), x, labels, x[:23], labels[:23],
                       words.vocab_size, words.PAD, 0.6, 1.0)


@needs_bert
def test_losses_bytes_and_accuracy_are_those_of_one_process_with_a_learners_compression():
    tokens = small_tokens()  # 4 does not divide the 23 that are held out
    alone, of_4 = (
        launch(training.work, tokens, SMALL, ("none", "fp16"), None, lambda x: (
            x.half(), lambda small: small.float()), ranks=R, nodes=R, preload=training.PRELOAD)
        for R in (1, 4))
    plain, small = of_4[0]["runs"].values()
    assert plain["losses"] == pytest.approx(alone[0]["runs"]["none"]["losses"], rel=1e-4)
    assert plain["losses"] == pytest.approx(small["losses"], rel=1e-2)
    assert all(one["runs"]["none"]["losses"] == plain["losses"] for one in of_4)
    assert plain["accuracy"] == alone[0]["runs"]["none"]["accuracy"]
    for run, share in ((plain, 1.5), (small, 0.75)):
        assert run["predicted_bytes"] == share * sum(plain["sizes"])
        assert run["sent_bytes"] == pytest.approx(run["predicted_bytes"], abs=8)
    text = training.report({**of_4[0], "config": SMALL, "tokens": tokens, "authors": "Yours."})
    assert "23 held out, 2 classes" in text and "4, on 4 nodes\nYours." in text
    assert re.search(r"BERT, compression fp16 +\d+\.\d% +0\.0\d +0\.0\d", text)


SCRIPT = """
import sys
import torch
import ranklab.horovod as hvd
from ranklab.projects.horovod.__main__ import project
project.main(sys.argv[2:])
hvd.init()  # and no shutdown
with open(f"{sys.argv[1]}/rank{hvd.rank()}", "w") as file:     # what ranks print runs together
    print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), file=file)
"""


@pytest.mark.sweep
@needs_bert
def test_weights_are_tuned_under_torchrun_and_a_script_without_shutdown_ends(tmp_path, monkeypatch):
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for name, text in (
            ("vocab.txt", "\n".join([*marks, "good", "bad", "film", "##s"])),
            ("tokenizer_config.json", '{"tokenizer_class": "BertTokenizer"}'),
            ("films.csv", "\n".join(["label,text", *FILMS])), ("script.py", SCRIPT)):
        (tmp_path / name).write_text(text)
    five = small_tokens()._replace(classes="abcde", vocab_size=9)
    launch(lambda: bert.make_bert(SMALL, five).save_pretrained(tmp_path), ranks=1,
           preload=training.PRELOAD)  # its head has 5 classes; here transformers is not loaded
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "at exit.json"))
    options = "--compression none --steps 50 --warmup 5 --lr 0.02 --batch 20 --n-ctx 8".split()
    output = torchrun(tmp_path / "script.py", tmp_path, "--weights", tmp_path, "--data",
                      tmp_path / "films.csv", "--trace", tmp_path / "trace.json", *options, ranks=2)
    share = {name: float(value) for name, value in
             re.findall(r"^(always|bag|BERT).*?([\d.]+)%", output, re.MULTILINE)}
    assert share["BERT"] >= share["always"] + 15 and "weights, 2,866 parameters" in output, output
    assert output.count("bottleneck:") == 1 and output.count("bag of words (") == 1
    phases = read_timeline(tmp_path / "trace.json")
    assert sum(all_reduces(phases)) == 50 * 25, "each gradient once in each step"
    assert len({phase.tensor for phase in one_step(phases)}) == 25
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2.0\n"] * 2
    assert "NEGOTIATE_ALLREDUCE" in (tmp_path / "at exit.json").read_text()


# --- reading timelines ----------------------------------------------------------------------------

ONE_STEP = (("b", "NEGOTIATE_ALLREDUCE", 0, 2), ("a", "NEGOTIATE_ALLREDUCE", 1, 2), *(
    (name, phase, *times) for phase, *times in (
        ("ALLREDUCE", 2, 8), ("MEMCPY_IN_FUSION_BUFFER", 2, 3), ("GLOO_ALLREDUCE", 3, 6),
        ("MEMCPY_OUT_FUSION_BUFFER", 6, 8)) for name in "ab"))
TWO_STEPS = [Phase(name, phase, at + start, at + end) for at in (0, 10)
             for name, phase, start, end in ONE_STEP]


def test_every_moment_counts_once_also_in_our_own_file(tmp_path, capsys):
    assert shares(TWO_STEPS) == pytest.approx({"negotiation": 4 / 18, "fusion copies": 6 / 18,
                                               "all-reduce": 6 / 18, "computing": 2 / 18})
    assert all_reduces(TWO_STEPS) == [2, 2] and one_step(TWO_STEPS) == TWO_STEPS[:10]
    with pytest.raises(ValueError, match="this timeline holds no all-reduce"):
        shares([])
    hvd.timeline([tuple(phase) for phase in TWO_STEPS], tmp_path / "trace.json")
    assert command.project.main(["--read", str(tmp_path / "trace.json")]) == 0
    printed = capsys.readouterr().out
    assert "18.00 s, 2 all-reduces of 4 gradients" in printed
    assert "bottleneck: all-reduce, 33%" in printed


@pytest.mark.parametrize("ending", ["]", "", ",\n"])
def test_horovods_own_file_is_read_also_when_it_was_cut_off(tmp_path, ending):
    events = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "a"}},
              {"ph": "M", "pid": 1, "name": "process_sort_index", "args": {"sort_index": 1}},
              {"ph": "B", "pid": 1, "name": "ALLREDUCE", "ts": 1500000},
              {"ph": "X", "pid": 1, "name": "0", "ts": 1500001, "dur": 0},
              {"ph": "B", "pid": 1, "name": "NCCL_ALLREDUCE", "ts": 1600000},
              {"ph": "E", "pid": 1, "ts": 1700000}, {"ph": "E", "pid": 1, "ts": 1800000}]
    path = tmp_path / "trace.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + ending)
    assert read_timeline(path) == [
        ("a", "ALLREDUCE", 1.5, 1.8), ("a", "NCCL_ALLREDUCE", 1.6, 1.7)]


# --- the same step elsewhere, and what is missing -------------------------------------------------

@pytest.mark.parametrize("name", ["mpi_step", "tf_mirrored_step"])
def test_one_step_has_the_same_loss_by_other_tools(name, monkeypatch):
    monkeypatch.syspath_prepend("labs/jobs")
    import torch_step

    if name == "mpi_step" and not mpi.is_here():
        pytest.skip("needs mpirun and mpi4py")
    if name == "tf_mirrored_step" and not find_spec("tensorflow"):
        pytest.skip("needs tensorflow")
    launcher = ["mpirun", "-n", "4"] * (name == "mpi_step")
    printed = subprocess.run([*launcher, sys.executable, f"labs/jobs/{name}.py"], text=True,
                          env={"OMP_NUM_THREADS": "1", **os.environ, **mpi.OPEN_MPI},
                          capture_output=True, timeout=120).stdout
    losses = [float(number) for number in re.findall(r"\d+\.\d{5}", printed)]
    assert losses == pytest.approx(launch(torch_step.step, ranks=4)[0], abs=2e-5), printed


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(training, "is_here", lambda: False)
    assert command.project.main([]) == 0 and training.run() is None
    assert "pip install -c constraints.txt -e '.[hf]'" in capsys.readouterr().out
