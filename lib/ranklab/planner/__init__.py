"""The planner: does a training fit, how long is a step, how near is that to published runs?

    model.py      Model: a transformer's shape, its parameters and its matrix products
    machine.py    Machine: the GPUs, their links and their network, from published tables
    plan.py       Plan: a layout and the tool that runs it
    memory.py     memory_per_gpu: what a GPU holds, in the tool of the plan
    step.py       step_time: the parts of a step's time, which add up

    search.py     search_layouts: all layouts that fit, the fastest first
    choose.py     choose_layout: the same for the course's own trainer (lab 12); planned.py: its
                  jobs and layouts as Model and Plan, model_of, plan_of, and back; own.py: a dry run
    cost.py, scaling.py  cost_per_token, scaling_curve: dollars, and what more GPUs bring

Those are the idea. Then:
    catalog.py, space.py  models and nodes by name; the layouts that a tool can run
    why.py        where a step's time goes, and how far off similar runs were
    wish.py, sensitivity.py  the nearest possible plan; what half or twice of each thing changes
    page.py, quick.py  an HTML page of many choices; a search in a tenth of the time
    failures.py, mixed.py  the time that failures take; clusters with several kinds of GPUs
    constants.py  the few fitted numbers, each with its meaning and its bounds
    compute.py, links.py, traffic.py  what step.py adds up
    published/    published measurements, and the loader that reads them
    jobs.py, sources.py  a published run as a Model, a Machine and a Plan
    score.py, fit.py  errors on files of runs, and the fit of the constants
"""

from ranklab.planner.catalog import find_model, find_node, model_of_size
from ranklab.planner.choose import choose_layout
from ranklab.planner.cost import bill, cost_per_token
from ranklab.planner.memory import GpuMemory, memory_per_gpu
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan
from ranklab.planner.planned import model_of, plan_of
from ranklab.planner.scaling import scaling_curve
from ranklab.planner.search import NoLayout, search_layouts
from ranklab.planner.step import Step, step_time

__all__ = [
    "GpuMemory", "Model", "NoLayout", "Plan", "Step", "bill", "choose_layout", "cost_per_token",
    "find_model", "find_node", "memory_per_gpu", "model_of", "model_of_size", "plan_of",
    "scaling_curve", "search_layouts", "step_time",
]
