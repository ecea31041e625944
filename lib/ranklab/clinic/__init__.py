"""The clinic: programs that misbehave for a real reason, and what finds the reason (lab 16).

case.py says what an incident is. The mended programs, each with the edits that break it:
    hangs.py    ranks that wait for each other
    wrong.py    trainings that run to the end and are wrong
    sharded.py  what breaks with tensor, pipeline and fully sharded parallelism
    later.py    what goes well at first: precision, memory, checkpoints, a resumed run
Then symptoms.py, what a run shows of itself, and diagnose.py, which names the disease.
signs.py: which signs each disease shows, a table that is measured.
"""
