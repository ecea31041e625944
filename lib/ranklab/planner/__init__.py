"""The planner: does a training fit, how long is a step, and how near is that to published runs?

    model.py      Model: a transformer's shape, its parameters and its matrix products
    machine.py    Machine: the GPUs, their links and their network, out of published tables
    plan.py       Plan: a layout and the tool that runs it
    memory.py     memory_per_gpu: what a GPU holds, in the tool that is advised
    step.py       step_time: the parts of a step's time, that add up

Those five are the idea. Then:
    constants.py  the few fitted numbers, each with its meaning and its bounds
    compute.py, links.py, traffic.py  what step.py adds up
    published/    published measurements, and the loader that reads them
    jobs.py, sources.py  a published run as a Model, a Machine and a Plan
    score.py, fit.py  errors on files of runs, and the fit of the constants
"""
