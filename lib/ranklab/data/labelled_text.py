"""Real text with labels on every machine, without a download: the functions of Python's library.

    text = python_functions()             # label: the part of the library's manual it is from
    text = labelled_file("reviews.csv")   # or .jsonl: your own, with a label and a text

Whole files are held out, never functions of a file whose other functions are trained on. The hash
of its name decides whether a file is held out, so that all machines agree.
"""

import csv
import json
import re
import sysconfig
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from ranklab.data.text import library_files

# Parts of the library's manual, and their modules. Only modules in every build of Python (tkinter
# is a separate package on some systems); a module that a version lacks is skipped.
PARTS = {
    "data types": "_collections_abc _pydatetime _strptime _weakrefset bisect calendar codecs "
                  "collections copy datetime difflib enum fractions functools graphlib heapq "
                  "numbers operator pprint random re reprlib statistics string struct textwrap "
                  "types weakref zoneinfo",
    "files": "_compression bz2 compression configparser csv dbm filecmp fileinput fnmatch "
             "genericpath glob gzip linecache lzma netrc ntpath os pathlib pickle plistlib "
             "posixpath shelve shutil sqlite3 tarfile tempfile tomllib zipfile",
    "processes": "_threading_local concurrent multiprocessing queue sched signal subprocess "
                 "threading",
    "asyncio": "asyncio",
    "internet": "cgi ftplib http imaplib ipaddress nntplib poplib selectors smtplib socket "
                "socketserver ssl telnetlib urllib uuid webbrowser wsgiref xmlrpc",
    "mail and markup": "base64 email html json mailbox mimetypes quopri xml",
    "testing": "bdb cProfile doctest pdb profile pstats pydoc timeit trace tracemalloc unittest",
    "the language": "_py_abc abc annotationlib ast code codeop compileall contextlib dataclasses "
                    "dis importlib inspect modulefinder opcode pickletools pkgutil py_compile "
                    "pyclbr runpy symtable tabnanny tokenize traceback typing warnings zipimport",
    "programs": "argparse cmd ctypes curses getopt getpass gettext locale logging optparse "
                "platform shlex",
}  # fmt: skip
ENOUGH = 1000  # functions
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")  # getHTTPResponse_2: get HTTP Response 2
# The def line, then lines that are indented more, close its parentheses, or are empty.
FUNCTION = re.compile(r"^( *)(?:async )?def .*\n(?:(?:\1[ )].*)?\n)*", re.MULTILINE)
FEWEST_WORDS = 12


@dataclass(frozen=True)
class LabelledText:
    """Texts to train on, and held-out texts; a label is an index into `classes`."""

    name: str
    classes: tuple[str, ...]
    train: list[str]
    train_labels: torch.Tensor  # (N,) int64
    held_out: list[str]
    held_out_labels: torch.Tensor

    @property
    def best_constant(self):
        """The share of the most common class in the held-out texts: accuracy without learning."""
        return int(self.held_out_labels.bincount().max()) / len(self.held_out_labels)


def python_functions(root=None):
    """Read the functions of this Python's own library: 7,000 to train on, 1,800 held out.

    root: the folder of a different library
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    part_of = {module: part for part, modules in PARTS.items() for module in modules.split()}
    train, held_out = [], []
    for path, content in library_files(root):
        module = path.partition("/")[0].removesuffix(".py")
        if module in part_of:
            side = held_out if zlib.crc32(path.encode()) % 5 == 0 else train
            texts = functions(content.decode("utf-8", errors="replace"))
            side += [(part_of[module], text) for text in texts]
    if len(train) + len(held_out) < ENOUGH:
        raise ValueError(f"this Python holds {len(train) + len(held_out)} functions of its own in "
                         f"{root}, {ENOUGH} are needed: give a file of your own with "
                         "labelled_file(path), or --data PATH")  # fmt: skip
    return labelled("functions of Python's library", train, held_out)


def functions(source):
    """List the functions in `source` with enough words; a nested one is part of the outer one."""
    texts = [match.group() for match in FUNCTION.finditer(source + "\n")]
    return [text for text in texts if len(words(text)) >= FEWEST_WORDS]


def labelled_file(path):
    """Read a LabelledText from your file, .csv or .jsonl, with a `label` and a `text` per row.

    Hold out one text in five, by the hash of the text: the file may be in any order.
    Raises: ValueError with the number of the row that lacks one of the two.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"{path.name}: the name of a file of texts ends in .csv or .jsonl")
    train, held_out = [], []
    with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a mark
        for number, row in enumerate(csv.DictReader(file) if path.suffix == ".csv" else file, 1):
            label, text = label_and_text(row, f"{path.name}, row {number}")
            (held_out if zlib.crc32(text.encode()) % 5 == 0 else train).append((label, text))
    return labelled(path.name, train, held_out)


def label_and_text(row, where):
    """Return the label and the text of a row: a dict, or a line of JSON."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except ValueError as error:
            raise ValueError(f"{where}: no JSON ({error})") from None
    has = [key for key in ("label", "text") if isinstance(row, dict) and row.get(key) is not None]
    if len(has) < 2 or not str(row["text"]).strip():
        raise ValueError(f"{where} needs a label and a text, and has {' and '.join(has) or 'none'}"
                         f"{' that is empty' if len(has) == 2 else ''}")  # fmt: skip
    return str(row["label"]), str(row["text"])


def labelled(name, train, held_out):
    """Make a LabelledText from (class, text) pairs; leave out repeated texts."""
    unique_texts, sides = set(), []
    for side in (train, held_out):
        label_of = {text: label for label, text in reversed(side)  # the first one stays
                    if text not in unique_texts}
        unique_texts |= label_of.keys()
        sides.append([(label, text) for text, label in reversed(label_of.items())])
    classes = tuple(sorted({label for label, _ in train + held_out}))
    if len(classes) < 2 or not all(sides):
        raise ValueError(f"{name}: {len(classes)} classes, {len(sides[0])} different texts to "
                         f"train on and {len(sides[1])} held out; 2 classes and 1 text on each "
                         "side are needed")  # fmt: skip
    labels = [torch.tensor([classes.index(label) for label, _ in side]) for side in sides]
    texts = [[text for _, text in side] for side in sides]
    return LabelledText(name, classes, texts[0], labels[0], texts[1], labels[1])


def words(text):
    """List the words in `text`; names are split into words: getHTTPResponse_2 has four."""
    return [word.lower() for word in WORD.findall(text)]


class Words:
    """A tokenizer that numbers the most common words of the texts that it is made from."""

    PAD, UNKNOWN, START, END = range(4)  # BERT's [PAD], [UNK], [CLS], [SEP]

    def __init__(self, texts, vocab_size):
        counted = Counter(word for text in texts for word in words(text))
        known = [word for word, _ in counted.most_common(vocab_size - 4)]
        self.number = {word: place for place, word in enumerate(known, 4)}
        self.vocab_size = len(known) + 4

    def encode(self, texts, n_ctx):
        """Encode `texts` as tokens: [CLS] words [SEP], cut or padded to n_ctx.

        Returns: (N, T), int64.
        """
        tokens = torch.full((len(texts), n_ctx), self.PAD)
        for row, text in zip(tokens, texts):
            numbers = [self.number.get(word, self.UNKNOWN) for word in words(text)[: n_ctx - 2]]
            row[: len(numbers) + 2] = torch.tensor([self.START, *numbers, self.END])
        return tokens


def bag_of_words(train, train_labels, held_out, held_out_labels, pad=Words.PAD):
    """Return the held-out accuracy of multinomial naive Bayes on the counts of the same tokens.

    It knows how often each word occurs, but not the order of words. A BERT should beat it.
    """
    from scipy.sparse import csr_matrix
    from sklearn.naive_bayes import MultinomialNB  # a second, and only here

    vocab_size = int(max(train.max(), held_out.max())) + 1

    def counts(tokens):
        rows, places = (tokens != pad).nonzero(as_tuple=True)
        ones = torch.ones(len(rows)).numpy()
        at = (rows.numpy(), tokens[rows, places].numpy())
        return csr_matrix((ones, at), shape=(len(tokens), vocab_size))  # adds up what coincides

    model = MultinomialNB().fit(counts(train), train_labels.numpy())
    return float(model.score(counts(held_out), held_out_labels.numpy()))
