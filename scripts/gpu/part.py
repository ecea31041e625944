"""One part, in a process of its own: `part.py NAME JOB ANSWER`. Its answer is a JSON file."""

import json
import sys
from pathlib import Path

import parts


def main(name, job, answer):
    """Run the part; what it raises is the traceback that this process prints, and no answer."""
    try:
        numbers = parts.PARTS[name].load()(json.loads(job)) or {}
    except parts.LeftOut as missing:
        result = {"state": "left out", "words": str(missing)}
    except AssertionError as wrong:
        result = {"state": "failed", "words": str(wrong)}
    else:
        result = {"state": "passed", "numbers": numbers}
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
