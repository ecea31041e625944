"""Lab 14's project: it ends as an undisturbed run whatever fails, and leaves nothing behind."""

import tempfile
from dataclasses import replace

import psutil
import pytest

from ranklab.checkpoint.files import complete, rank_file
from ranklab.engine import launch
from ranklab.hybrid import parse_layout
from ranklab.projects import resilience as project
from ranklab.projects.resilience import Fault, plan_faults
from ranklab.projects.resilience import __main__ as command
from ranklab.projects.resilience.chaos import MARK, corrupt
from ranklab.projects.resilience.soak import LAYOUTS, SHAPE, TOLERANCE, Config, Trial
from ranklab.projects.resilience.survive import Survived, last_whole, live, survive
from ranklab.trainer.text import text_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

CONFIG = Config(steps=14, checkpoint_every=2)
FAULTS = (  # of each kind one; checkpoints after steps 2, 4, ...
    Fault("killed", 0, 1, 0, 0),  # before there is any
    Fault("slow", 2, 0, 0, 0),
    Fault("disk full", 4, 2, 0, 0),
    Fault("corrupted", 7, 3, 0, 1),
    Fault("left", 9, 4, 0, 0),  # rank 1 of the three that are left
    Fault("killed in a save", 10, 1, 0.01, 0),
    Fault("stopped", 12, 2, 0.005, 1),
)


@pytest.fixture(scope="module")
def job():
    text, shape = text_for(SHAPE, CONFIG)
    return shape, text, CONFIG, [*map(parse_layout, LAYOUTS.split())]


@pytest.fixture(scope="module")
def usual(job):
    return survive(*job, timeout=100)


@pytest.fixture(scope="module")
def disturbed(job, usual, tmp_path_factory):
    """What has survived each kind of fault; nothing is left of it."""
    launch(int, ranks=1)  # the process that forks ranks stays
    processes = {each.pid for each in psutil.Process().children(recursive=True)}
    folder = tmp_path_factory.mktemp("temporary")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        disturbed = survive(*job, FAULTS, timeout=100)
    finally:
        tempfile.tempdir = before
    assert {each.pid for each in psutil.Process().children(recursive=True)} == processes
    assert not [*folder.iterdir()]
    return disturbed


def life_of(disturbed, kind):
    return next(n for n, life in enumerate(disturbed.lives)
                if kind in [fault.kind for fault in life.faults])


@pytest.mark.sweep
def test_it_ends_as_an_undisturbed_run(job, disturbed, usual):
    struck = [fault for life in disturbed.lives for fault in life.faults]
    assert sorted(struck) == sorted(FAULTS)
    assert disturbed.loss == pytest.approx(usual.loss, abs=TOLERANCE)
    assert len(disturbed.path()) > 1 and disturbed.torn == 0 and disturbed.checked >= 6
    replay = survive(*job, path=disturbed.path(), timeout=100)
    assert Trial(0, CONFIG, disturbed, usual, replay).is_good()
    assert not Trial(0, CONFIG, disturbed, usual, usual).is_good()  # another path adds otherwise


@pytest.mark.sweep
def test_each_fault_was_what_it_is_called(job, disturbed):
    lives, layouts = disturbed.lives, job[3]
    assert lives[0].ended == "rank 1 of 4 was killed by SIGKILL" and lives[1].first == 0
    refused = lives[life_of(disturbed, "disk full")]
    assert refused.first == 0
    assert (refused.saves[0, [2, 4, 6]] < 0).tolist() == [False, True, False]  # it went on
    after = lives[life_of(disturbed, "corrupted") + 1]
    assert disturbed.damaged == 1
    assert after.first == 2  # 6 is damaged, and 4 was refused
    assert after.layout == layouts[1] and after.layout.ranks == 3
    left = lives[life_of(disturbed, "left")].ended
    assert "rank 1 has returned" in left and "wait forever" in left
    assert lives[life_of(disturbed, "stopped")].ended == "rank 2 of 4 was killed by SIGKILL"
    slow = lives[life_of(disturbed, "slow")].work[:, 3:8].min(axis=1)
    assert slow[0] > 0.1 > slow[1:].max()


def test_the_monkey_does_what_its_seed_says():
    plans = [plan_faults(seed, 14, CONFIG, 4) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    for plan in plans:
        assert [fault.step for fault in plan] == sorted(fault.step for fault in plan)
        assert sorted(fault.kind for fault in plan) == sorted(2 * [*project.KINDS])
        assert all(0 < fault.step < CONFIG.steps - 1 for fault in plan)


def test_a_run_in_one_layout_is_equal_bit_for_bit(job, disturbed, usual):
    config, layouts = Config(steps=6, checkpoint_every=2), [parse_layout("1x1x2")]
    small = *job[:2], config, layouts
    faults = [Fault("killed", 3, 0, 0.005, 0), Fault("disk full", 6, 1, 0, 0)]  # in the last save
    twice, undisturbed = (survive(*small, each, timeout=100) for each in (faults, ()))
    trial = Trial(7, config, twice, undisturbed, undisturbed)
    assert len(twice.lives) == 3 and twice.lives[2].first == 4 and trial.is_good()
    assert "File too large" in twice.lives[1].ended
    text = project.report([trial], lambda work: [1], lambda *seconds: 1)
    assert "are equal bit for bit" in text and "steps that count: 6 of " in text
    assert "by its seconds of work: rank 1" in text and "; by formula" in text
    assert max(map(len, text.splitlines())) <= 100
    trials = [trial, Trial(8, CONFIG, disturbed, usual, usual)]
    assert "1 of 2 runs ended as if undisturbed, after 9 fa" in project.report(trials)


def test_a_torn_checkpoint_is_counted_and_left_out(job, tmp_path):
    struck, saved = tmp_path / "struck", tmp_path / "saved"
    struck.mkdir()
    config = replace(CONFIG, steps=4, checkpoint=str(saved))
    for marked in (False, True):
        run = Survived()
        live(run, (*job[:2], config, (), struck), parse_layout("1x1x1"), 0, None, 100, 3)
        place = complete(saved)[-1]
        corrupt(place / rank_file(0))
        if marked:  # this one was the monkey's
            (place / MARK).touch()
        assert last_whole(saved, run) == 2 and run.checked == 2
        assert run.damaged == 1 and run.torn == int(not marked)
        assert len(complete(saved)) == 1


def test_the_command_runs(capsys):
    options = "--soak", "3", "--faults", "1", "--steps", "4", "--checkpoint-every", "2"
    assert command.project.main([*options, "--layouts", "1x1x2 1x1x1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("seed    1: 1 faults, ") and "DIFFERS" not in text
    assert "3 of 3 runs ended as if undisturbed, after 3 faults; torn checkpoints: 0 of " in text
