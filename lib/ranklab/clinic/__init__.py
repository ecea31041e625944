"""The clinic: programs that misbehave for a real reason, and what finds the reason.

Lab 16 has a part of the programs; the others are the bugs of the labs whose idea they break.

case.py says what an incident is. The mended programs, each with the edits that break it:

    hangs.py          ranks that wait for each other
    slowdowns.py      ranks that do too much
    silent_errors.py  trainings that run to the end and are wrong; the programs: trainings.py
    sharding.py       what breaks with tensor, pipeline and fully sharded parallelism
    run_state.py      precision, memory, data files, checkpoints, a resumed run; shards.py
    all_cases.py      all of them
    look.py           look(), which runs one and prints what its ranks return
    symptoms.py       which symptoms each disease shows: a table that is measured

Then what `ranklab diagnose` is made of, to be read in this order:

    detectors.py  four detectors in plain numbers
    diagnose.py   diagnose(), which asks all detectors
    trace.py      what a run shows of itself: a step, a collective; as lines in a file
    hang_detectors.py, training_detectors.py, sharding_detectors.py, run_state_detectors.py
    digests.py    a tensor in five numbers
    observer.py   what is seen of a rank's ops
    hooks.py, wrappers.py  put the observer into a program
"""

__all__ = ["all_cases", "case", "detectors", "diagnose", "hooks", "look", "shards", "symptoms",
           "trace"]
