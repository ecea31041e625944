"""`ranklab diagnose`: it names the disease of each case of lab 16, and none where none is.

Numbers that detectors look at come from real ranks. (The checks of the four that are exercises try
them on lists.)
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel

from ranklab.clinic import trace
from ranklab.clinic.all_cases import CASES
from ranklab.clinic.diagnose import diagnose
from ranklab.clinic.hang_detectors import whereabouts
from ranklab.data_parallel import average_gradients
from ranklab.projects.clinic.ward import FORMS, observe

TWO_RUNS = "learning_rate"


# --- the cases ------------------------------------------------------------------------------------

# In every run each third case, as a learner finds it; `make sweep` has all in all forms.
@pytest.mark.parametrize("case, form", [
    pytest.param(case, form, id=f"{case.name}-{form}",
                 marks=[pytest.mark.sweep] * (form != "found" or i % 3 != 0))
    for i, case in enumerate(CASES) for form in FORMS])
def test_a_case_has_its_disease_and_no_other_one(case, form):
    ranks = observe(FORMS[form](case))
    found = diagnose(ranks)
    expected = [] if form == "mended" or case.disease == TWO_RUNS else [case.disease]
    assert [each.disease for each in found] == expected, found
    assert all(any(char.isdigit() for char in each.evidence) for each in found)
    is_over = all(rank.fate == "returned" for rank in ranks)
    assert is_over or len(whereabouts(ranks)) == sum(r.fate != "returned" for r in ranks)


@pytest.mark.parametrize("form", FORMS)
def test_a_rate_that_does_not_grow_shows_beside_a_run_of_one_rank(form):
    case = next(case for case in CASES if case.disease == TWO_RUNS)
    beside, ranks = (observe(FORMS[form](case), number) for number in (1, 4))
    found = diagnose(ranks, beside=beside)
    assert [each.disease for each in found] == [TWO_RUNS] * (form != "mended"), found


@pytest.mark.parametrize("start, expected", [(4, []), (0, ["data_twice"])])
def test_a_resume_in_a_process_of_its_own(start, expected):
    """10 batches are an epoch; the first process did 4 of them."""
    def train(start, stop):
        x, y = _batch(80, seed=0)
        model = nn.Linear(20, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at in torch.arange(80).repeat(2).split(8)[start:stop]:
            mine = at.tensor_split(dist.get_world_size())[dist.get_rank()]
            _step(model, optimizer, x[mine], y[mine], lambda: average_gradients(model))

    before, ranks = observe(train, 2, start=0, stop=4), observe(train, 2, start=start, stop=14)
    assert [each.disease for each in diagnose(ranks, before)] == expected
    assert diagnose(ranks) == []


def test_a_lost_rank_is_told_also_of_a_run_that_goes_on():
    def loses_one():
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    ranks = observe(loses_one, 3)
    first, second, third = whereabouts(ranks)
    assert re.match("rank 1 last called all_reduce, call 0 .* it was killed$", second), second
    assert "barrier" in first and "barrier" in third
    ranks[0].fate, ranks[0].process = "", (socket.gethostname(), os.getpid(),
                                           psutil.Process().create_time())
    assert whereabouts(ranks)[0].endswith("it runs")
    assert whereabouts(ranks[:2])[2] == "rank 2 left nothing here"


# --- other programs -------------------------------------------------------------------------------

def _batch(n=16, seed=None):
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    return torch.randn(n, 20, generator=generator), torch.randint(4, (n,), generator=generator)


def _mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    torch.manual_seed(dist.get_rank())
    return model


def _step(model, optimizer, x, y, between=lambda: None):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    between()
    optimizer.step()
    return loss


def accumulating():
    """As it should be: gradients are reduced once a step; the norm is clipped in each."""
    model = DistributedDataParallel(_mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(6):
        for last in (False, False, True):
            with contextlib.nullcontext() if last else model.no_sync():
                x, y = _batch()
                (F.cross_entropy(model(x), y) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers_and_validation(kept=()):
    """As it should be: two trainings, of which the second goes on from a copy; rank 0 validates."""
    first = DistributedDataParallel(_mlp())
    optimizers = [torch.optim.SGD(first.parameters(), 0.1)]
    second = nn.Sequential(nn.Linear(20, 4))
    if dist.get_rank() == 0:  # a training of its own
        optimizers.append(torch.optim.SGD(second.parameters(), 0.1))
    losses = []
    for turn in range(12):
        losses.append(_step(first, optimizers[0], *_batch()).detach())
        if dist.get_rank() == 0:
            _step(second, optimizers[1], *_batch())
            with torch.no_grad():
                first.module(_batch(300)[0])
    dist.all_reduce(torch.stack(losses))


def unawaited(wait=False):
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        works = []

        def reduce():
            for p in model.parameters():
                p.grad /= dist.get_world_size()
                works.append(dist.all_reduce(p.grad, async_op=True))
            for work in works if wait else ():
                work.wait()

        _step(model, optimizer, *_batch(), reduce)
        for work in works:
            work.wait()


def summed(scale=1):
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def reduce():
        flat = torch.cat([p.grad.flatten() for p in model.parameters()]) / scale
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.grad = part.view_as(p).clone()

    for _ in range(6):
        _step(model, optimizer, *_batch(), reduce)


def attending(lengths):
    """Attention by torch's two ways; flex_attention is an op of an unusual kind."""
    model = DistributedDataParallel(nn.Linear(16, 16))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        x = model(torch.randn(1, 2, lengths[dist.get_rank()], 16))
        flex_attention(*[x.detach()] * 3)
        F.scaled_dot_product_attention(x, x, x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("program, settings, expected", [
    (accumulating, {}, []), (two_optimizers_and_validation, {}, []),
    (unawaited, {"wait": True}, []), (unawaited, {}, ["stale_weights"]),
    (summed, {"scale": 3}, []), (summed, {}, ["wrong_reduction"]),
    (attending, {"lengths": (512, 1024, 512)}, ["straggler"]),
    (attending, {"lengths": (512, 32, 512)}, []),
])
def test_programs_of_another_form(program, settings, expected):
    found = diagnose(observe(program, 3, **settings))
    assert [each.disease for each in found] == expected, found


# --- the evidence ---------------------------------------------------------------------------------

def reducing_in_other_orders():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(3)))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def reduce():
        for p in [*model.parameters()][::-1 if dist.get_rank() else 1]:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)

    for _ in range(4):
        _step(model, optimizer, *_batch(), reduce)


def drifting_slowly():
    """Each rank takes its own gradient; the first weight is so large that its norm stays."""
    model = _mlp()
    model[0].weight.data += 100
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    dist.broadcast(model[0].weight.detach(), 0)
    for _ in range(6):
        _step(model, optimizer, *_batch())


def clipping_by_the_largest():
    """Each rank has its own half of the layer, and all of the bias."""
    torch.manual_seed(dist.get_rank())
    half, bias = nn.Parameter(torch.randn(20, 10)), nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([half, bias], 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        ((_batch(seed=0)[0] @ half).square().mean() + bias.square().sum()).backward()
        norm = nn.utils.get_total_norm([half.grad, bias.grad])
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        half.grad /= norm
        bias.grad /= norm
        optimizer.step()


@pytest.mark.parametrize("program, settings, evidence", [
    (reducing_in_other_orders, {},
     r"rank 0: .*\(gradient of 0.weight\).*; ranks 1, 2: .*\(gradient of 2.weight\)"),
    (drifting_slowly, {}, r"all weights differ .*: 3.\w+ has norms ([\d.]+), (?!\1)"),
    (clipping_by_the_largest, {}, r"norms is taken, [\d.]+; the smallest is [\d.]+\. (?!.*\d)"),
    (summed, {}, r"the gradient is 3 times their mean \(6 of 6 steps\)"),
    (attending, {"lengths": (512, 1024, 512)},
     r"computes [\d,]+ MFLOP in a step, the others [\d,]+ \("),
])
def test_a_sentence_is_true_of_the_program(program, settings, evidence):
    found = diagnose(observe(program, 3, **settings))
    assert len(found) == 1 and re.search(evidence, found[0].evidence), found


# --- a program that has not heard of ranklab ------------------------------------------------------

PLAIN = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, flags = dist.get_rank(), sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
if "early" in flags:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
if "ddp" in flags:
    model = DistributedDataParallel(model)
else:
    fully_shard(model[0])
    fully_shard(model)
if "early" not in flags:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(rank)
for step in range(8):
    if "skip" in flags and rank == step == 1:
        continue
    x, y = torch.randn(8, 20), torch.randint(4, (8,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
"""


def command(tmp_path, *words, status, ranks=("--ranks", "2")):
    (tmp_path / "plain.py").write_text(PLAIN)
    done = subprocess.run([sys.executable, "-m", "ranklab.cli", "diagnose", *ranks, *words],
                          cwd=tmp_path, capture_output=True, text=True, timeout=200,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("flags, disease", [
    pytest.param("ddp", None, marks=pytest.mark.sweep), ("fsdp2", None),
    pytest.param("fsdp2 early", "optimizer_before_sharding", marks=pytest.mark.sweep)])
def test_a_plain_script_under_torchrun(flags, disease, tmp_path):
    said = command(tmp_path, "plain.py", *flags.split(), status=int(bool(disease)))
    assert "2 ranks, 8 steps" in said
    assert f"\n  {disease}\n" in said if disease else "none of the known diseases" in said


@pytest.mark.sweep
def test_a_plain_script_that_hangs_is_ended_and_judged_again_from_its_folder(tmp_path):
    first = command(tmp_path, "--timeout", "25", "--keep", "kept", "plain.py", "ddp", "skip",
                    status=1)
    again = command(tmp_path, "kept", status=1, ranks=())
    for said in (first, again):
        assert re.search(r"rank_branch\n    rank 0 (waits|raised) in call 12 of ", said), said
        assert "rank 1 returned after 12 calls" in said
    assert "did not end well" in first


def test_what_cannot_be_judged_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no ranks were observed" in command(tmp_path, "empty", status=2, ranks=())
    assert "is no module" in command(tmp_path, "nothing.here", status=2)
    (tmp_path / "wrong.py").write_text("raise SystemExit(3)")
    assert "observed: exit code 3" in command(tmp_path, "wrong.py", status=2, ranks=())
    (tmp_path / "early.py").write_text("import torch.distributed as dist\n"
                                       "dist.init_process_group('gloo')\nint('no number')\n")
    said = command(tmp_path, "early.py", status=1)
    assert "did not come to a step" in said and "none of the known" not in said


# --- pieces ---------------------------------------------------------------------------------------

def test_files_of_a_long_run_stay_small_and_keep_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MOST_BYTES", 1000)
    lines = trace.Lines(tmp_path, 0)
    for number in range(1000):
        lines.write("pass", 0, number, True)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3000
    epochs = [epoch for _, epoch, _ in trace.read(tmp_path)[0].passes]
    assert epochs[0] == 0 and epochs[-1] == 999 and epochs == sorted(epochs)
