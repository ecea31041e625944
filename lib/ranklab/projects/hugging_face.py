"""transformers, where it is installed, kept off the network."""

import os
from importlib.util import find_spec

INSTALL = ("transformers is not here. After pip install -c constraints.txt -e '.[hf]' this runs: "
           "python -m ranklab.projects.{}")


def is_here():
    """Return whether transformers is installed; import nothing."""
    return find_spec("transformers") is not None


def offline_transformers():
    """Return the module transformers, set to work offline and to print only errors."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # seconds, and only here
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # it has read the environment, if it was imported before

    transformers.logging.set_verbosity_error()  # else each rank tells that the head is new
    transformers.logging.disable_progress_bar()
    return transformers
