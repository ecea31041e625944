"""What each technique costs, as closed formulas over plain numbers: bytes, steps, shares of time.

    collectives.py        bytes and seconds of the verbs and of the algorithms behind them (lab 02)
    zero.py               states and bytes of a stage (lab 06)
    overlap.py            when computation hides communication (labs 03, 07, 08, 09, 12)
    tensor_parallel.py    bytes that tensor ranks sum (lab 08)
    pipeline_parallel.py  bubbles, and activations in flight (lab 09)
    context_parallel.py   bytes that attention keeps and sends (lab 10)
    resilience.py         how often to save, the share of useful work, how often failures occur (14)

They do not need torch, so `ranklab plan` starts at once, and the planner runs in a browser. Each
technique's package exports its own formulas as well: `from ranklab.zero import zero_memory`.
"""

__all__ = []
