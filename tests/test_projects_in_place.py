"""Projects under torchrun: launch runs each on the ranks that are there, and rank 0 reports."""

import json

import pytest

from ranklab.engine import torchrun

RANKS = range(2)
FEW = "--batch 4 --eval-batch 4"
NARROW = "--micro-batch 3 --batch 6 --eval-batch 6 --precision bf16"
RUNS = {  # project: its options, {what its report has: how often}
    "ranks": ("", {"rank node local": 1, " right ": 2}),
    "collectives": ("--sizes 1K --verbs broadcast --iters 1", {"algbw": 1, " tree ": 1}),
    "data_parallel": ("--epochs 1 --seeds 1 --warmup 0 --without mean", {"speed-up": 1}),
    "ddp": ("--epochs 1 --images 64 --held-out 8 --batch-per-rank 8", {"epoch 1:": 1}),
    "zero": (f"--stage 3 --steps 1 --data {{text}} --recompute --offload cpu {NARROW}",
             {"stage 3": 1, "Offloaded to cpu": 1}),
    "fsdp": (f"--pretrain 0 --steps 3 --data {{alpaca}} {FEW}", {"peak, with activations": 1}),
    # "naive": in its row, and in the last line
    "tensor_parallel": (f"--method naive --steps 3 --clip 0.3 --data {{text}} {NARROW}",
                        {"naive": 2}),
    "pipeline_parallel": ("--steps 2 --eval-batch 16 --schedule zb-h1 --no-compare",
                          {"held out: ": 1}),
    "context_parallel": ("--steps 2 --eval-batch 4 --no-compare",
                         {"held-out nats per token": 1}),
    "expert_parallel": (f"--steps 2 --no-compare {FEW}", {"held out, experts": 1}),
    "hybrid": ("--steps 3 --layout 1x1x2 --eval-batch 16 --no-compare", {"held out: ": 1}),
}
SCRIPT = """
import contextlib, importlib, json, os, sys
for name, (words, path) in json.loads(sys.argv[1]).items():
    main = importlib.import_module(f"ranklab.projects.{name}.__main__").project.main
    with open(f"{path}.{os.environ['RANK']}", "w") as file, contextlib.redirect_stdout(file):
        assert main(words) == 0, name
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory, text):
    """{project: what its two ranks printed}, by one torchrun for all: it imports torch once."""
    folder = tmp_path_factory.mktemp("in-place")
    alpaca = folder / "alpaca.json"
    alpaca.write_text(json.dumps([{"instruction": "Add", "input": f"{n} + 1", "output": str(n + 1)}
                                  for n in range(40)]))
    commands = {name: (words.format(text=text, alpaca=alpaca).split(), str(folder / name))
                for name, (words, _) in RUNS.items()}
    (folder / "all.py").write_text(SCRIPT)
    torchrun(folder / "all.py", json.dumps(commands), ranks=len(RANKS))
    return {name: [(folder / f"{name}.{rank}").read_text() for rank in RANKS] for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_torchrun_runs_it_in_place(reports, name):
    first, second = reports[name]
    assert {part: first.count(part) for part in RUNS[name][1]} == RUNS[name][1], first
    assert not second
