"""transformers, where it is installed: it asks no network for anything."""

import os
from importlib.util import find_spec


def is_here():
    """True when transformers is installed; nothing is imported."""
    return find_spec("transformers") is not None


def offline_transformers():
    """The module transformers, which asks no network for anything and keeps quiet."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # seconds, and only here
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # it has read the environment, if it was imported before

    transformers.logging.set_verbosity_error()  # else each rank tells that the head is new
    transformers.logging.disable_progress_bar()
    return transformers
