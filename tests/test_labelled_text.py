"""Labelled text: real, alike on every machine, whole files held out; and files of your own."""

import csv
import json
import random

import pytest
import torch

from ranklab.data import labelled_text as lt
from ranklab.data.text import library_files

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def library():
    return lt.python_functions()


def library_in(folder, files=12, functions=100):
    """A folder like Python's library: modules of two parts, with many different functions."""
    parts = {name: lt.PARTS[name].split()[:files] for name in ("files", "internet")}
    for part, modules in parts.items():
        for module in modules:
            (folder / f"{module}.py").write_text("\n".join(
                f"def {module}_{i}(a, b):\n    return {part}.one.two.three(a, b).four.five.six({i})"
                for i in range(functions)))  # fmt: skip
    return folder


def test_python_has_labelled_functions(library):
    assert len(library.train) > 4000 and len(library.held_out) > 800
    assert 6 <= len(library.classes) <= 10
    for labels in (library.train_labels, library.held_out_labels):
        counts = labels.bincount(minlength=len(library.classes))
        assert counts.min() > 20, "every class is on both sides"
    assert 0.1 < library.best_constant < 0.3
    first = library.train[0].strip()
    assert first.startswith(("def ", "async def ")) and "\n" in first


def test_best_constant_is_the_best_that_says_always_the_same(library):
    accuracies = [(library.held_out_labels == k).float().mean().item()
                  for k in range(len(library.classes))]
    assert library.best_constant == pytest.approx(max(accuracies))


def test_whole_files_are_held_out(tmp_path):
    text = lt.python_functions(library_in(tmp_path))
    modules = [{function.split()[1].rpartition("_")[0] for function in side}
               for side in (text.train, text.held_out)]
    assert not modules[0] & modules[1]
    assert len(modules[0] | modules[1]) == len(list(library_files(tmp_path)))
    assert len(text.train) + len(text.held_out) == 2400, "and no function is lost"


def test_no_text_is_on_both_sides_and_none_comes_twice(library):
    everything = library.train + library.held_out
    assert len(everything) == len(set(everything))


def test_the_split_does_not_depend_on_where_the_library_is(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here, there = (lt.python_functions(library_in(tmp_path / name)) for name in ("here", "there"))
    assert here.train == there.train and here.held_out == there.held_out
    assert torch.equal(here.train_labels, there.train_labels)


def test_a_function_ends_where_its_indentation_ends():
    body = "".join(f"    {'abcdefghijklm'[i]} = one(\n    )\n" for i in range(12))
    inside = f"def outer(a,\n          b\n):\n{body}\n    def inner():\n        return 1\n"
    method = "    async def method(self):\n" + body.replace("    ", "        ")
    source = f"import os\n\n{inside}\nx = 1\n\nclass Long:\n{method}    y = 2\ndef short(): pass\n"
    assert [text.rstrip() for text in lt.functions(source)] == [inside.rstrip(), method.rstrip()]


def test_modules_are_in_one_part_only():
    modules = [module for each in lt.PARTS.values() for module in each.split()]
    assert len(modules) == len(set(modules))


@pytest.mark.parametrize("name, in_words", [
    ("getHTTPResponse_2", ["get", "http", "response", "2"]),
    ("os.path.join", ["os", "path", "join"]), ("__init__", ["init"]),
    ("XMLParser", ["xml", "parser"]), ("utf8", ["utf", "8"]), ("+=", []),
])  # fmt: skip
def test_names_are_taken_apart_into_words(name, in_words):
    assert lt.words(name) == in_words


def test_tokens_are_words_between_berts_marks():
    tokenizer = lt.Words(["a cat", "a dog", "a dog barks"], vocab_size=6)
    assert tokenizer.number == {"a": 4, "dog": 5}, "the commonest, after BERT's own marks"
    assert tokenizer.encode(["a dog barks", "", "dog " * 9], n_ctx=5).tolist() == [
        [2, 4, 5, 1, 3], [2, 3, 0, 0, 0], [2, 5, 5, 5, 3]]  # fmt: skip


def test_the_vocabulary_is_made_from_training_text_only(library):
    tokenizer = lt.Words(library.train, 4000)
    assert tokenizer.vocab_size == 4000
    tokens = tokenizer.encode(library.held_out, 32)
    assert tokens.shape == (len(library.held_out), 32) and int(tokens.max()) < 4000
    assert (tokens == tokenizer.UNKNOWN).any(), "held-out files have words of their own"


def test_bag_of_words_knows_words_but_no_order():
    train, labels = torch.tensor([[4, 5, 0], [4, 4, 5], [6, 7, 0], [7, 6, 6]]), [0, 0, 1, 1]
    held_out = torch.tensor([[5, 4, 4], [0, 6, 7], [7, 0, 0], [4, 6, 4]])
    found = lt.bag_of_words(train, torch.tensor(labels), held_out, torch.tensor([0, 1, 1, 1]))
    assert found == 0.75


def test_bag_of_words_learns_the_library(library):
    tokenizer = lt.Words(library.train, 4000)
    tokens = [tokenizer.encode(side, 32) for side in (library.train, library.held_out)]
    found = lt.bag_of_words(tokens[0], library.train_labels, tokens[1], library.held_out_labels)
    assert library.best_constant + 0.15 < found < 0.95


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_file_of_yours(tmp_path, suffix):
    rows = [{"label": "good" if i % 3 else "bad", "text": f'film {i}, "quoted"\nand more'}
            for i in range(200)]  # fmt: skip
    write(tmp_path / f"films{suffix}", rows)
    text = lt.labelled_file(tmp_path / f"films{suffix}")
    assert text.classes == ("bad", "good") and text.name == f"films{suffix}"
    assert len(text.train) + len(text.held_out) == 200 and 20 < len(text.held_out) < 60
    labels = dict((row["text"], row["label"]) for row in rows)
    assert all(text.classes[k] == labels[t] for t, k in zip(text.train, text.train_labels))
    random.Random(0).shuffle(rows)
    write(tmp_path / f"films{suffix}", rows)
    shuffled = lt.labelled_file(tmp_path / f"films{suffix}")
    assert sorted(shuffled.held_out) == sorted(text.held_out), "the order of the file is no matter"


def write(path, rows):
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, ["label", "text"])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name, content, sentence", [
    ("a.txt", "", "a.txt: the name of a file of texts ends in .csv or .jsonl"),
    ("a.csv", "label,words\ngood,nice\n", "a.csv, row 1 needs a label and a text, and has label"),
    ("a.csv", "label,text\ngood,nice\nbad,\n", "a.csv, row 2 needs .* text that is empty"),
    ("a.jsonl", '{"label": 1, "text": "x"}\n{"label"\n', "a.jsonl, row 2: no JSON"),
    ("a.jsonl", "[1, 2]\n", "a.jsonl, row 1 needs a label and a text, and has none"),
    ("a.csv", "label,text\na,x\na,y\n", "a.csv: 1 classes, .* 2 classes and 1 text on each side"),
])  # fmt: skip
def test_a_bad_file_is_a_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        lt.labelled_file(tmp_path / name)


def test_a_python_without_its_source_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="holds 0 functions of its own .* 1000 are needed"):
        lt.python_functions(tmp_path)
