"""Lab 05's project: one process's losses on any ranks, bytes, timelines."""

import dataclasses
import json
import re

import pytest
import torch

import ranklab.horovod as hvd
from ranklab import launch
from ranklab.data.labelled_text import Words
from ranklab.engine import torchrun
from ranklab.collectives import mpi
from ranklab.projects.horovod import __main__ as command
from ranklab.projects.horovod import bert, other_tools, training, tuning
from ranklab.projects.horovod import timeline as timelines
from ranklab.projects.horovod.config import Config

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(180)]
needs_bert = pytest.mark.skipif(not bert.is_here(), reason="needs transformers")
SMALL = Config(steps=3, batch=12, n_ctx=8, width=16, n_layer=1, lr=1e-2)


def small_tokens(n=50):
    """Texts of two classes, which their third word tells apart."""
    texts = [f"one two {'left' if i % 3 else 'right'} {i % 7}" for i in range(n)]
    labels = torch.tensor([int(i % 3 > 0) for i in range(n)])
    words = Words(texts, 32)
    x = words.encode(texts, SMALL.n_ctx)
    return bert.Tokens("small", ("right", "left"), x, labels, x[:23], labels[:23],
                       words.vocab_size, words.PAD, 0.6, 1.0)


# --- the same on any number of ranks ------------------------------------------------------------

def on_rank(tokens):
    """The project's work, and what the trained model says on all held-out texts."""
    found = training.work(training.OURS, tokens, SMALL, ("none", "fp16"), None, (0, 2**27),
                          lambda seconds_of, low, high, calls: (seconds_of(low), low)[1], 6)
    hvd.init()
    model, _ = bert.fine_tune(hvd, tokens, SMALL)
    with torch.no_grad():
        said = bert.logits_of(model, tokens.held_out, tokens.pad).argmax(1)
    return {**found, "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
            "alone": (said == tokens.held_out_labels).double().mean().item(),
            "exact": bert.accuracy(hvd, model, tokens)}


@needs_bert
def test_losses_weights_bytes_and_accuracy_are_those_of_one_process():
    tokens = small_tokens()
    alone, = launch(on_rank, tokens, ranks=1, preload=bert.PRELOAD)
    of_ranks = launch(on_rank, tokens, ranks=4, nodes=4, preload=bert.PRELOAD)
    means = torch.tensor([one["runs"]["none"]["losses"] for one in of_ranks]).mean(0)
    torch.testing.assert_close(means, torch.tensor(alone["runs"]["none"]["losses"]))
    for one in of_ranks:
        torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-3, atol=1e-4)
        assert torch.equal(one["weights"], of_ranks[0]["weights"])
        plain, small = one["runs"]["none"], one["runs"]["fp16"]
        assert plain["sent_bytes"] == pytest.approx(1.5 * sum(plain["sizes"]), abs=8)
        assert small["sent_bytes"] == pytest.approx(plain["sent_bytes"] / 2, abs=8)
        assert small["losses"] == pytest.approx(plain["losses"], rel=1e-2)
        assert one["exact"] == of_ranks[0]["alone"], "4 does not divide 23 texts"
        assert one["chosen"] == one["tuned"][-1].threshold == tuning.RANGE[0]
    none, all_of_them, _ = of_ranks[0]["tuned"]
    assert all_of_them.all_reduces < none.all_reduces == len(plain["sizes"])
    text = training.report({**of_ranks[0], "config": SMALL, "name": "small", "texts": (50, 23),
                            "classes": tokens.classes, "best_constant": 0.6, "bag_of_words": 1.1})
    assert "23 held out, 2 classes" in text and "4, on 4 nodes" in text
    assert re.search(r"BERT, compression fp16 +\d+\.\d% +0\.\d\d MB", text)
    assert "The bag of words wins" in text and "\nYours: tune_fusion.\n" in text


@needs_bert
@pytest.mark.slow
def test_the_project_learns_under_torchrun_and_prints_once(tmp_path):
    output = torchrun("-m", "ranklab.projects.horovod", "--compression", "none", "--trace",
                      tmp_path / "trace.json", ranks=2)
    share = {name: float(value) for name, value in
             re.findall(r"^(always|bag|BERT).*?([\d.]+)%", output, re.MULTILINE)}
    assert share["BERT"] >= share["always"] + 15, output
    assert output.count("bottleneck:") == 1 and output.count("bag of words (") == 1
    phases = timelines.read_timeline(tmp_path / "trace.json")
    assert sum(timelines.all_reduces(phases)) == 60 * 41, "each gradient once in each step"
    assert len({phase.tensor for phase in timelines.one_step(phases)}) == 41


@needs_bert
def test_local_weights_begin_where_they_ended(tmp_path):
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*marks, "good", "bad", "film", "##s"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    saved = bert.make_bert(dataclasses.replace(SMALL, n_ctx=16), classes=5, vocab_size=9, pad=0)
    saved.config.hidden_dropout_prob = 0.5  # other units on each rank
    saved.save_pretrained(tmp_path)
    rows = [f"{kind},{kind} films {i}" for i in range(40) for kind in ("good", "bad")]
    (tmp_path / "films.csv").write_text("\n".join(["label,text", *rows]))
    config = dataclasses.replace(SMALL, weights=str(tmp_path))
    tokens = bert.read_tokens(config, tmp_path / "films.csv")
    assert tokens.train.shape[1] == SMALL.n_ctx and tokens.vocab_size == 9
    assert tokens.train[0, :5].tolist() == [2, 5, 7, 8, 1], "[CLS] good film ##s [UNK]"
    model = bert.make_bert(config, 2, tokens.vocab_size, tokens.pad)
    assert model.classifier.out_features == 2, "the saved head had 5 classes"
    for name, weight in saved.bert.state_dict().items():
        assert torch.equal(model.bert.state_dict()[name], weight), name

    def is_training():
        hvd.init()
        return bert.fine_tune(hvd, tokens, config)[0].training

    assert launch(is_training, ranks=2, preload=bert.PRELOAD) == [True, True]


# --- reading timelines --------------------------------------------------------------------------

ONE_STEP = (("b", "NEGOTIATE_ALLREDUCE", 0, 2), ("a", "NEGOTIATE_ALLREDUCE", 1, 2), *(
    (name, phase, *times) for phase, *times in (
        ("ALLREDUCE", 2, 8), ("MEMCPY_IN_FUSION_BUFFER", 2, 3), ("GLOO_ALLREDUCE", 3, 6),
        ("MEMCPY_OUT_FUSION_BUFFER", 6, 8)) for name in "ab"))
TWO_STEPS = [timelines.Phase(name, phase, at + start, at + end) for at in (0, 10)
             for name, phase, start, end in ONE_STEP]


def test_every_moment_counts_once_also_in_our_own_file(tmp_path, capsys):
    found = timelines.shares(TWO_STEPS)
    assert found == pytest.approx({"negotiation": 4 / 18, "fusion copies": 6 / 18,
                                   "all-reduce": 6 / 18, "computing": 2 / 18})
    assert timelines.all_reduces(TWO_STEPS) == [2, 2]
    assert timelines.one_step(TWO_STEPS) == TWO_STEPS[:10]
    assert timelines.one_step(TWO_STEPS, -1) == TWO_STEPS[10:]
    with pytest.raises(ValueError, match="this timeline holds no all-reduce"):
        timelines.shares([])
    hvd.timeline([tuple(phase) for phase in TWO_STEPS], tmp_path / "trace.json")
    assert command.main(["--read", str(tmp_path / "trace.json")]) == 0
    said = capsys.readouterr().out
    assert "18.00 s, 2 all-reduces of 4 gradients" in said and "bottleneck: all-reduce, 33%" in said


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
    assert timelines.read_timeline(path) == [
        ("a", "ALLREDUCE", 1.5, 1.8), ("a", "NCCL_ALLREDUCE", 1.6, 1.7)]


# --- the same step elsewhere, and what is missing -------------------------------------------------

@pytest.mark.parametrize("script", ["torch_step.py", "mpi_step.py", "tf_mirrored_step.py"])
def test_one_step_has_the_same_loss_elsewhere(script, monkeypatch):
    monkeypatch.syspath_prepend("labs/jobs")
    import tiny_step

    x, y = map(torch.from_numpy, tiny_step.data())
    w1, w2 = (torch.from_numpy(each).requires_grad_() for each in tiny_step.weights())
    losses = []
    for _ in range(2):
        losses.append(torch.nn.functional.cross_entropy(torch.tanh(x @ w1) @ w2, y))
        for w, gradient in zip((w1, w2), torch.autograd.grad(losses[-1], (w1, w2))):
            w.data -= tiny_step.LR * gradient
    command, missing = other_tools.commands(ranks=4)[script]
    if missing:
        pytest.skip("needs mpirun and mpi4py" if "MPI" in missing else "needs tensorflow")
    said = other_tools.run_script(command, script)
    found = [float(number) for number in re.findall(r"\d+\.\d{5}", said)]
    assert found == pytest.approx([loss.item() for loss in losses], abs=2e-5), said


def test_what_is_missing_is_a_sentence_and_not_an_error(monkeypatch, capsys):
    monkeypatch.setattr(bert, "is_here", lambda: False)
    assert command.main([]) == 0
    assert "pip install -c constraints.txt -e '.[hf]'" in capsys.readouterr().out
    assert training.run() is None and training.report(None) == bert.NO_TRANSFORMERS
    monkeypatch.setattr(bert, "is_here", lambda: True)
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    assert command.main(["--real"]) == 0
    assert "make horovod" in capsys.readouterr().out
    monkeypatch.setattr(mpi, "is_here", lambda: False)
    monkeypatch.setattr(other_tools, "find_spec", lambda name: None)
    monkeypatch.delenv("TENSORFLOW_PYTHON", raising=False)
    found = other_tools.commands(ranks=2)
    assert "apt install openmpi-bin" in found["mpi_step.py"][1]
    assert "pip install tensorflow-cpu" in found["tf_mirrored_step.py"][1]
    failed = other_tools.run_script(["false"], "torch_step.py")
    assert failed == "torch_step.py failed: it said nothing"
