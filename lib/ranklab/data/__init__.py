"""Real data on every machine, without a download.

    text.py           for a GPT: the source of Python's own library, as bytes
    images.py         for a CNN: handwritten digits; MNIST and CIFAR-10 from files you have
    image_folder.py   for a ResNet: JPEGs in ImageNet's layout, and made-up images
    labelled_text.py  for a BERT: the functions of Python's library, labelled by purpose, or your
                      own file
"""

from ranklab.basics.targets import IGNORE
from ranklab.data.image_folder import write_digits
from ranklab.data.images import Images, cifar10, digits, find_images, mnist
from ranklab.data.labelled_text import LabelledText, labelled_file, python_functions
from ranklab.data.text import (
    Text, batch_at, bigram_loss, decode, held_out_batch, python_text, text_file, windows,
)

__all__ = [
    "IGNORE", "Images", "LabelledText", "Text", "batch_at", "bigram_loss", "cifar10", "decode",
    "digits", "find_images", "held_out_batch", "labelled_file", "mnist", "python_functions",
    "python_text", "text_file", "windows", "write_digits",
]
