"""The clinic: programs that misbehave for a real reason, and detectors that find the reason.

Lab 16 has some of the programs; the others are bugs to fix in the labs whose idea they break.

case.py defines an incident. The fixed programs, each with the edits that break it:

    hangs.py          ranks that wait for each other
    slowdowns.py      ranks that do too much
    silent_errors.py  training runs that finish with a wrong result; the programs: trainings.py
    sharding.py       bugs in tensor, pipeline and fully sharded parallelism
    run_state.py      precision, memory, data files, checkpoints, a resumed run; shards.py
    all_cases.py      all incidents
    look.py           look(), which runs a program and prints what its ranks return
    flight.py         torch's flight recorder: dumps of a hang, and who is waited for
    symptoms.py       the symptoms of each disease: a measured table

Then the parts of `ranklab diagnose`; read them in this order:

    detectors.py  four detectors in plain numbers
    diagnose.py   diagnose(), which runs all detectors
    trace.py      the record of a run: steps, collectives, ...; as lines in a file
    hang_detectors.py, training_detectors.py, sharding_detectors.py, run_state_detectors.py
    digests.py    a tensor in five numbers
    observer.py   what an observer records of a rank's ops
    hooks.py, wrappers.py  attach the observer to a program
"""

__all__ = ["all_cases", "case", "detectors", "diagnose", "flight", "hooks", "look", "shards",
           "symptoms", "trace"]
