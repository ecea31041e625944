"""What each technique costs, as closed formulas of numbers alone: bytes, steps, shares of time.

    collectives.py        bytes and seconds of the verbs and of the algorithms behind them (lab 02)
    zero.py               states and bytes of a stage (lab 06)
    overlap.py            from where on computing hides the messages (labs 03, 07, 08, 09, 12)
    tensor_parallel.py    bytes that tensor ranks add up (lab 08)
    pipeline_parallel.py  bubbles, and activations in flight (lab 09)
    context_parallel.py   bytes that attention keeps and sends (lab 10)
    resilience.py         how often to save, what share is useful work, how often failures come (14)

They need no torch, so `ranklab plan` starts at once, and the planner runs in a browser. Each
technique's package offers its own as well: `from ranklab.zero import zero_memory`.
"""

__all__ = []
