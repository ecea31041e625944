"""Lab 01: the bytes of a parameter, with one of its numbers lost or too wide."""

from mutants import mutant

from ranklab.baseline import model_state_bytes

WRONG = [mutant(model_state_bytes, old, new, says=says) for old, new, says in (
    ("moments + master", "moments", "4 bytes more"),
    ("2 * (2 if", "(2 if", "two numbers for each parameter"),
    ('"fp32": 4', '"fp32": 2', "4 bytes in float32 and 2 in bf16"),
    ('"gradients": width', '"gradients": 4', "as wide as its weight"),
    ('"parameters": width', '"parameters": 8 * width', "a byte has 8"),
    ('"parameters": width * n', '"parameters": width', "multiply by n"),
    ('"parameters": width', '"parameters": (width + master)',
     "master weights belong to the optimizer"),
    ("return {", "return 16 * n or {", "return a dict"),
)]  # fmt: skip
