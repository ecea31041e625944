"""Lab 12's project by Ray Train: a worker dies, and all start again from the last checkpoint.

pip install 'ray[train]'; python labs/jobs/ray_train.py    # two workers on this machine, one killed
WORKERS=256 CHECKPOINT=/shared/gpt ray job submit --working-dir . -- python labs/jobs/ray_train.py

The second is a GPT of 70 billion parameters on 256 GPUs of a Ray cluster, on which ranklab is
installed; it was not run. CHECKPOINT is a folder that all its nodes share, OPTIONS the project's.
The first was run eleven times by Ray 2.60.0 on two busy cores, last on 2026-11-26. Ten times, in
52 to 187 s, worker 1 was killed at its first checkpoint, all went on from step 5, and the loss was
that of an undisturbed run. Once Ray's own start had timed out.
Ray listens on all addresses, whatever address it is given (its issues 7418, 26293), so this first
one has a network of its own, by `unshare`: without root it needs user namespaces.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0",
               "RAY_AUTH_MODE": "disabled"}  # or Ray writes a token into the home folder
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
    ray.cloudpickle.register_pickle_by_value(agent)  # workers have no such file
    return TorchTrainer(
        worker, train_loop_config=environ,
        torch_config=TorchConfig(backend=None if "WORKERS" in os.environ else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers,
                                             use_gpu="WORKERS" in os.environ),
        run_config=ray.train.RunConfig(
            name="ranklab", storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=10))).fit().return_value


def alone():
    """This program again, where no other machine reaches it. With it end all that it starts."""
    shell = 'ip link set lo up && exec "$0" "$@"'
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    line = ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh",
            "-c", shell, sys.executable, __file__]
    os.environ["RAY_TRAIN_ALONE"] = "1"
    os.execvp(line[0], line)


def main():
    if "WORKERS" not in os.environ and "RAY_TRAIN_ALONE" not in os.environ:
        alone()
    if "WORKERS" in os.environ:
        ray.init()
        environ = {name: os.environ[name] for name in {"CHECKPOINT", "OPTIONS"} & {*os.environ}}
        print(fit(environ, int(os.environ["WORKERS"]), str(Path(environ["CHECKPOINT"], "ray"))))
        return
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        usual = trained(SMALL.split())
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20,
                 _temp_dir=f"{folder}/ray", log_to_driver=False)
        environ = {"CHECKPOINT": f"{folder}/saved", "OPTIONS": SMALL, "EVERY": "5", "FAULT": "1"}
        found = fit(environ, 2, f"{folder}/runs")
        ray.shutdown()
    print(f"worker 1 was killed; all went on from step {found['began']}")
    print(f"loss {found['loss']:.9f}, undisturbed {usual['loss']:.9f}")
    sys.exit(found != usual | {"began": 5})


if __name__ == "__main__":
    main()
