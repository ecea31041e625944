"""Lab 12's project by Ray Train: a worker dies, and all start again from the last checkpoint.

pip install 'ray[train]'; python labs/jobs/ray_train.py    # two workers on this machine, one killed
WORKERS=256 CHECKPOINT=/shared/gpt ray job submit --working-dir . -- python labs/jobs/ray_train.py

The second is a GPT of 70 billion parameters on 256 GPUs of a Ray cluster, on which ranklab is
installed; it was not run. CHECKPOINT is a folder that all its nodes share, OPTIONS the project's.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0",
               "RAY_AUTH_MODE": "disabled",  # or Ray writes a token into the home folder
               "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
import agent  # noqa: E402  the same command line as everywhere; Ray reads the environment at import
import ray  # noqa: E402
import ray.train  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402

SMALL = "--size laptop --shape 2x32x4x32x256 --layout 2x1x1,zero --steps 20 --no-compare"


def trained(line):
    """{"loss": held out, "began": at this step} of a project's command line, on each rank."""
    from ranklab.projects.hybrid import run
    from ranklab.projects.hybrid.__main__ import project

    options, config = project.parse(line)
    saved = sorted(Path(config.checkpoint or "-").glob("step-*/index.json"))
    began = int(saved[-1].parent.name.split("-")[1]) if options.resume else 0
    found = run(options.size, options.chosen_layout(), resume=options.resume, path=options.path,
                shape=options.chosen_shape(), **vars(config))
    return {"loss": found["ranks"][0]["loss"], "began": began}


def worker(environ):
    """On each rank, in the process group that Ray has made."""
    os.environ |= environ
    folder = Path(environ["CHECKPOINT"])
    if "FAULT" in environ and ray.train.get_context().get_world_rank() == 1:
        threading.Thread(target=strike, args=(folder,), daemon=True).start()
    return trained(agent.rank(os.environ)[3:])


def strike(folder):
    """This process dies when there is a checkpoint; once."""
    while not [*folder.glob("*/index.json")]:
        time.sleep(0.01)
    try:
        (folder / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def fit(environ, workers, storage):
    """What rank 0 returns; up to ten times a failure starts all workers anew."""
    return TorchTrainer(
        worker, train_loop_config=environ,
        torch_config=TorchConfig(backend=None if "WORKERS" in os.environ else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu="WORKERS" in os.environ),
        run_config=ray.train.RunConfig(
            name="ranklab", storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=10))).fit().return_value


def main():
    if "WORKERS" in os.environ:
        ray.init()
        environ = {name: os.environ[name] for name in ("CHECKPOINT", "OPTIONS") if name in os.environ}
        print(fit(environ, int(os.environ["WORKERS"]), str(Path(environ["CHECKPOINT"], "ray"))))
        return
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        usual = trained(SMALL.split())
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20,
                 _node_ip_address="127.0.0.1", _temp_dir=f"{folder}/ray", log_to_driver=False)
        environ = {"CHECKPOINT": f"{folder}/saved", "OPTIONS": SMALL, "EVERY": "5", "FAULT": "1"}
        found = fit(environ, 2, f"{folder}/runs")
        ray.shutdown()
    print(f"worker 1 was killed; all went on from step {found['began']}")
    print(f"loss {found['loss']:.9f}, undisturbed {usual['loss']:.9f}")


if __name__ == "__main__":
    main()
