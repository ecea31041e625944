"""What is wrong with the arguments is one sentence and exit code 2: no traceback, no launch."""

import importlib
import shlex

import pytest

from ranklab import cli, engine
from ranklab.projects.command import Command

# {what is run: [arguments, each with a part of what is said]}; {x} are the files of `there`.
REFUSED = {
    "ranklab": """
        status 99 | no lab is called '99'; the labs are
        status '' | no lab is called ''
        status --lab -1 | no lab is called '-1'
        status 02 03 | unknown: 03
        hint nothing | nothing is called 'nothing'
        hint ring_all_reduc | see ring_all_reduce
        hint | required: name
        work {text} | is no folder
        work --merge 99 | no lab is called '99'
        drill --lab '' | no lab is called ''
        drill --level 6 | of at least 1 and at most 5 is wanted, not '6'
        drill --count 0 | of at least 1 is wanted, not '0'
        drill --seed x | a whole number is wanted, not 'x'
        drill 02 | unrecognized arguments: 02
        interview --minutes 0 | above 0 and at most 240 is wanted, not '0'
        interview --level 6 | of at least 1 and at most 5 is wanted, not '6'
        interview --report {folder} | is no name for a file
        questions 99 | no lab is called '99'
        questions --anki {text} --lab 99 | no lab is called '99'
        rehearse {broken} | can't be read as a notebook
        rehearse {empty}.ipynb | there is no file
        rehearse nowhere.at.all | is no module
        rehearse '' | is no module
        compare --ranks 0 | of at least 1 is wanted, not '0'
        compare --ranks 13 | no layout of 13 ranks fits
        compare --layouts 1x3x1 | tp=3 must divide the 8 heads
        tour 3 | unrecognized arguments: 3
        compare --layouts 1x1x99 | stages=99 must be between 1 and the 10 layers
        compare --layouts 2x2 | is no layout
        compare --plot x.txt | must end in .svg or .png
        build 99 | no lab is called '99'
        build --chekc | unknown: --chekc
        grade {text}s | there is no file or folder
        grade {folder} --minutes nan | above 0 and at most 1440 is wanted, not 'nan'
        grade {folder} --csv {folder} | is no name for a file
        grade {folder} --html {folder} | is no name for a file
        doctor 3 | unknown: 3
        projects | invalid choice: 'projects'""",
    "ranks": """
        --ranks 0 | --ranks: a whole number of at least 1
        --ranks -1 | not '-1'
        --ranks 1e9 | not '1e9'
        --ranks 4 --nodes 3 | --nodes 3 must divide the 4 ranks
        --limit nan | not 'nan'
        --limit 0 | above 0
        --ranks 2 --missing 2 | --missing 2 is not one of the 2 ranks
        --slow -1 | not '-1'""",
    "baseline": """
        --device nonsense | 'nonsense' is no device
        --device cuda:9 | sees no GPU
        --data /nonexistent | there is no file '/nonexistent'
        --data {folder} | there is no file
        --data {empty} | empty is empty
        --data {text} | tokens are too few for a window
        --threads 0 | not '0'
        --loss-chunks 0 | not '0'
        --checkpoint /dev/null | '/dev/null' is no folder
        --checkpoint {text}/below | can't be written, because of
        --resume | --resume goes on from a folder
        --resume --checkpoint {folder}/none | there is no checkpoint at
        --lr nan | not 'nan'
        --lr -1 | lr=-1.0 must be at least 0
        --steps 0 | steps=0 must be at least 1
        --seed -1 | not '-1'
        --size 9b | invalid choice""",
    "collectives": """
        --sizes , | a number above 0 is wanted, not ''
        --sizes 0 | not '0'
        --sizes 1K,infM | not 'inf'
        --max 5 | less than 1K
        --nodes 3 --ranks 4 | --nodes 3 must divide
        --ranks 0 | not '0'
        --iters 0 | not '0'
        --verbs all | 'all' is not one of all_reduce
        --figure x.txt | must end in .svg or .png
        --figure x.svg --verbs broadcast | --figure draws all_reduce""",
    "data_parallel": """
        --ranks 0 | not '0'
        --ranks 3 | 3 ranks must divide the batch of 64 images
        --seeds 0 | not '0'
        --folder /nonexistent | there is no folder
        --data mnist --folder {folder} | {folder}
        --warmup -1 | warmup=-1 must be at least 0
        --data imagenet | invalid choice
        --data mnist | --data mnist needs --folder
        --epochs 0 | epochs=0 must be at least 1
        --without luck | the pieces are""",
    "ddp": """
        --ranks -1 | not '-1'
        --data /nonexistent | there is no folder
        --ranks 3 --scaling | 3 ranks can't share it evenly
        --images 3 --ranks 2 | 3 images are less than one step
        --width 0 | width=0 must be at least 8
        --model resnet20 | invalid choice
        --workers -1 | workers=-1 must be at least 0
        --profile {folder} | is no name for a file
        --figure x.svg | --figure draws what --scaling has found
        --resume --checkpoint {folder} | there is no checkpoint""",
    "horovod": """
        --ranks 0 | not '0'
        --ranks 4 --nodes 3 | --nodes 3 must divide
        --ranks 5 | 5 ranks must divide batch=96
        --data /nonexistent | there is no file
        --data {text} | ends in .csv or .jsonl
        --read {text} | is no timeline
        --read {broken} | is no timeline
        --weights {text} | there is no folder
        --compression fp8 | 'fp8' is not one of none, fp16""",
    "zero": """
        --ranks 0 | not '0'
        --ranks 3 | 3 ranks must divide batch=16
        --stage 4 | 4 is not one of 0, 1, 2, 3
        --stage , | list of int
        --data /nonexistent | there is no file
        --checkpoint {folder} | is that of one stage: name it
        --offload cpu | needs stage 1, 2 or 3
        --compiled | is for --engine deepspeed
        --engine deepspeed --stage 1 --offload {folder} | with --engine deepspeed it is cpu
        --resume | --resume goes on from a folder
        --config {text} | is no DeepSpeed config
        --config {broken} | is no DeepSpeed config
        --gpus 0 | not '0'
        --gpu-gb nan | not 'nan'
        --stage 1 --resume --checkpoint {folder} | there is no checkpoint""",
    "fsdp": """
        --ranks 0 | not '0'
        --ranks 2 --eval-batch 1 | 2 ranks need a held-out example each
        --ranks 3 | 3 ranks must divide batch=32
        --ranks 4 --shard-ranks 3 | shard_ranks=3 must divide the 4 ranks
        --data {broken} | is no list of examples
        --data {text} | is no JSON
        --data {incomplete} | example 1 has no text called output
        --data {one} | 1 examples to train on
        --engine fsdp2 --shard-ranks 2 | --shard-ranks is for --engine ours
        --precision fp16 | invalid choice
        --resume | --resume goes on from a folder
        --data /nonexistent | there is no file
        --model {folder} | it has no config.json
        --save {text} | is no folder""",
    "tensor_parallel": """
        --ranks 3 | 3 ranks must divide n_head=8
        --ranks 8 | 8 ranks are more than n_layer=4
        --overlap --method sequence | overlap=True sums with an all-reduce
        --checkpoint {folder} | method='all' keeps no checkpoint
        --data {text} | tokens are too few
        --batch 0 | batch=0 must be at least 1""",
    "pipeline_parallel": """
        --ranks 11 | stages=11 must be between 1 and the 10 layers
        --ranks 0 | not '0'
        --ranks 2 --schedule interleaved --virtual 6 | stages=12 must be between 1 and the 10 layers
        --schedule interleaved --batch 15 --micro-batches 5 --eval-batch 30 | must be a multiple
        --schedule gpipe --virtual 3 | --virtual 3 is for --schedule interleaved
        --schedule 2f2b | invalid choice
        --batch 4 | batch=4 must be a multiple of micro_batches=8
        --eval-batch 24 | eval_batch=24 must be a multiple of batch=16
        --slow-stage 4 | slow_stage=4 is not one of the 4 stages
        --slow-stage -2 | slow_stage=-2 must be at least -1
        --virtual 0 | not '0'
        --data /nonexistent | there is no file
        --eval-batch 999936 | do not fit""",
    "context_parallel": """
        --ranks 7 | 14 parts must divide the 128 tokens of a sequence
        --ranks 16 --method ulysses | 16 ranks that trade heads must divide n_head=8
        --ranks 1 --method both | ranks=1 must be even for both
        --method spiral | invalid choice
        --batch 0 | batch=0 must be at least 1
        --data {text} | tokens are too few""",
    "expert_parallel": """
        --ranks 4 --ep 3 | ep=3 must divide the 4 ranks and n_expert=16
        --ranks 3 | ep=3 must divide the 3 ranks and n_expert=16
        --top-k 17 | top_k=17 must be between 1 and n_expert=16
        --balance luck | invalid choice
        --factor -1 | factor=-1.0 must be at least 0
        --batch 2 | batch=2 and eval_batch=64 rows must be at least 4
        --data {text} | tokens are too few""",
    "hybrid": """
        --data /nonexistent | there is no file
        --path {text} | unrecognized arguments
        --layout 0x1x1 | dp=0 must be at least 1
        --layout 1x3x1 | tp=3 must divide the 8 heads
        --layout 2x2 | is no layout: write dp x tp x pp as 2x2x2
        --layout 3x1x1 | dp x micro-batch = 6 must divide the batch of 16
        --layout 2x1x1 --eval-batch 30 | dp x micro-batch = 4 must divide the batch of 30
        --layout 1x1x8,zb-v | stages=16 must be between 1 and the 10 layers
        --layout 2x1x3,virtual=2 | micro_batches=4 must be a multiple of ranks=3
        --layout 1x4x1 --per-node 2 | tp=4 tensor ranks would be on several nodes of 2
        --per-node -1 | per_node=-1 must be at least 0
        --resume | --resume goes on from a folder
        --layout '' | '' is no layout
        --layout 1x1x1,sp,sp,fast | 'fast' is not one of""",
}
CASES = [(name, *map(str.strip, line.split(" | "))) for name, lines in REFUSED.items()
         for line in lines.strip().splitlines()]


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Files and folders that the arguments name."""
    folder = tmp_path_factory.mktemp("there")
    for name, content in (("text", "too short"), ("empty", ""), ("broken.ipynb", "3"),
                          ("incomplete.json", '[{"instruction": "Add", "input": ""}]'),
                          ("one.json", '[{"instruction": "a", "input": "", "output": "b"}]')):
        (folder / name).write_text(content)
    (folder / "folder").mkdir()
    return {path.stem: str(path) for path in folder.iterdir()}


def main_of(name):
    if name == "ranklab":
        return cli.main
    return importlib.import_module(f"ranklab.projects.{name}.__main__").project.main


@pytest.mark.parametrize("name, arguments, said", CASES, ids=[f"{n} {a}" for n, a, _ in CASES])
def test_it_is_refused(name, arguments, said, there, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path))
    monkeypatch.setattr(engine.launcher, "fork_server", None)  # a launch would end in a traceback
    with pytest.raises(SystemExit) as end:
        main_of(name)(shlex.split(arguments.format(**there)))
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    program = "ranklab " if name == "ranklab" else f"python -m ranklab.projects.{name}: "
    assert err.count("\n") == 1 and err.startswith(program.strip()), err
    assert said.format(**there) in err


@pytest.mark.parametrize("name, arguments, said", [
    ("baseline", "", "WORLD_SIZE=2: this is the baseline of one device"),
    ("data_parallel", "--ranks 4", "--ranks is for python alone"),
    ("zero", "--ranks 3", "--ranks is for python alone"),
    ("resilience", "", "run it by python, not by torchrun"),
])
def test_it_is_refused_in_a_job(name, arguments, said, monkeypatch, capsys):
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match="2"):
        main_of(name)(arguments.split())
    assert said in capsys.readouterr().err


class Parsed(Exception):
    """Carries the parser of a command."""


@pytest.mark.parametrize("name", [*REFUSED][1:])
def test_each_option_has_a_text_and_its_default(name, monkeypatch):
    def stop(parser, _=None):
        raise Parsed(parser)

    monkeypatch.setattr(Command, "parse_args", stop)
    with pytest.raises(Parsed) as stopped:
        main_of(name)([])
    parser, = stopped.value.args
    for action in parser._actions:
        assert action.help, action.option_strings
        assert "--path" not in action.option_strings, "a text file is --data"
        if action.default not in (None, False, "==SUPPRESS=="):
            shown = parser._get_formatter()._get_help_string(action)
            assert shown.endswith(")"), f"{action.option_strings}: {shown}"
    for option in ("--batch", "--steps", "--lr"):
        given = parser._option_string_actions.get(option)
        assert given is None or given.help.endswith(")"), "that of a laptop"
