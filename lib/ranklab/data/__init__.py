"""Real data on every machine, without a download.

    text.py           the source of Python's own library, as bytes: what a GPT is trained on
    images.py         handwritten digits; MNIST and CIFAR-10 from files you have: for a CNN
    image_folder.py   JPEGs in ImageNet's layout, and made-up images: for a ResNet
    labelled_text.py  the functions of that library and what they are for, or a file of yours: for
                      a BERT
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
