"""By python or by torchrun: four ranks on GPUs that are pretended; each says what it was told."""

import json
import os
import sys

import pretended_gpus  # noqa: F401

from ranklab.engine import HangError, launch

NAMES = ("RANKLAB_RANKS_ON_GPU", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS",
         "NCCL_NVLS_ENABLE", "PRETENDED_BACKEND", "CUDA_VISIBLE_DEVICES")


def told():
    import pretended_gpus

    return {name: os.environ[name] for name in NAMES if name in os.environ} | {
        "memory": list(pretended_gpus.limits.values())}


def hangs():
    import time

    time.sleep(60)


def main(how):
    options = {} if "RANK" in os.environ else dict(ranks=4, preload=["pretended_gpus"])
    if how == "hang":
        try:
            launch(hangs, timeout=1, **options)
        except HangError as error:
            return print(error)
    seen = launch(told, **options, share_gpu=how == "share")
    if int(os.environ.get("RANK", 0)) == 0:
        print("TOLD", json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
