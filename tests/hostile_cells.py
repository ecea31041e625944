"""What hostile submissions hold in the place of their first exercise.

{name} is the exercise's, {head} its first line, {right} its answer and {home} the answer's module.
None of it harms the machine: what it starts ends by itself within minutes, and no file is touched
outside of the notebook's own folder.
"""

NO_JSON = '{"cells": [{"cell_type": "code", "source": ["print(1)'

HOSTILE = {
    # What stands in the report of this one must not become a part of the page.
    "<img src=x onerror=alert(1)>": """for _ in range(200):
    print("x" * 1_000_000)

{head}
    raise ValueError("</td></table><script>alert(1)</script>" + "y" * 100_000)""",
    "patched_check": """import ranklab, ranklab.course.check
del check
check = ranklab.check = lambda one=None, **_: one
ranklab.course.check.judge = lambda *_: ranklab.course.check.Verdict("{name}")

{head}
    return None""",
    "librarys_own": "from {home} import {name}",
    "no_json": NO_JSON,
    "tampers": """{head}
    import os
    from ranklab.course import check, regrade
    regrade.judge = check.judge = lambda *_: check.Verdict("{name}")
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, b"{name}\\tpassed\\t\\t\\n")
        except OSError:
            pass""",
    "stays": """import os, subprocess, time
subprocess.Popen(["sleep", "300"], env={{}}, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    time.sleep(300)
    os._exit(0)

{right}""",
    "ends_process": "{right}\n\nimport os\nos._exit(3)",
    "endless": "while True:\n    pass",
    "endless_exercise": "{head}\n    while True:\n        pass",
}
