"""Pipeline parallelism: each rank has some layers, and micro-batches pass through all ranks.

    actions.py      Action, and what it needs; places; the text form: parse and text
    flush.py        gpipe_schedule, one_f_one_b_schedule
    interleaved.py  interleaved_schedule: several stages on a rank
    zero_bubble.py  zero_bubble_schedule: ZB-H1, the backward in two halves
    v_shaped.py     zb_v_schedule, dual_pipe_schedule: to be drawn and compared
    pipedream.py    pipedream_schedule, and which weights it uses: weight_versions
    validity.py     problems: what is wrong with a schedule
    simulate.py     simulate, bubble_fraction, in_flight_activations, memory_line
    formulas.py     the same numbers, as the papers give them
    messages.py     with_messages: the sends and receives between the actions

A schedule is pure data: it says what each rank does, in its order. Whoever runs it, draws it or
checks it reads the same tuples.
"""

from ranklab.pipeline_parallel.actions import Action, parse, places, text
from ranklab.pipeline_parallel.flush import gpipe_schedule, one_f_one_b_schedule
from ranklab.pipeline_parallel.interleaved import interleaved_schedule
from ranklab.pipeline_parallel.messages import Message, with_messages
from ranklab.pipeline_parallel.pipedream import pipedream_schedule, weight_versions
from ranklab.pipeline_parallel.simulate import (
    Span, bubble_fraction, in_flight_activations, memory_line, simulate,
)
from ranklab.pipeline_parallel.v_shaped import dual_pipe_schedule, zb_v_schedule
from ranklab.pipeline_parallel.validity import problems
from ranklab.pipeline_parallel.zero_bubble import zero_bubble_schedule

__all__ = [
    "Action", "Message", "Span", "bubble_fraction", "dual_pipe_schedule", "gpipe_schedule",
    "in_flight_activations", "interleaved_schedule", "memory_line", "one_f_one_b_schedule", "parse",
    "pipedream_schedule", "places", "problems", "simulate", "text", "weight_versions",
    "with_messages", "zb_v_schedule", "zero_bubble_schedule",
]
