"""The clinic: programs that misbehave for a real reason, and what finds the reason (lab 16).

case.py says what an incident is. The mended programs, each with the edits that break it:
    hangs.py    ranks that wait for each other; slow.py: ranks that do too much
    wrong.py    trainings that run to the end and are wrong; their programs are in trainings.py
    sharded.py  what breaks with tensor, pipeline and fully sharded parallelism
    later.py    what goes well at first: precision, memory, checkpoints, a resumed run; shards.py
signs.py says which signs each disease shows: a table that is measured.
Then what `ranklab diagnose` is made of, to be read in this order:
    detectors.py  four detectors in plain numbers; diagnose.py: diagnose(), which asks all
    symptoms.py what a run shows of itself: a step, a collective; as lines in a file
    stopped.py, trained.py, split.py, kept.py     the detectors, group by group
    marks.py    a tensor in five numbers
    observer.py what is seen of a rank's ops; hooks.py and calls.py put it into a program
"""
