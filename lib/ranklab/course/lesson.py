"""Where a lab teaches an exercise or prediction: the section, its picture, and the slide."""

import re

from ranklab.course import labs

HEADING = re.compile(r"^# #{2,4} (.*)$", re.M)
LISTED = 3  # a slide that names more exercises of its lab teaches none of them
PICTURE = re.compile(r"\bplots\.(\w+)\(")


def places(stem, name):
    """Say in sentences where the lab `stem` teaches the exercise or prediction `name`.

    Returns: a list of sentences from labs/source/ and slides/; empty outside a checkout
    """
    title, text = _section(labs.source(stem), name)
    if not title:
        return []
    sentences = [f"Lab {stem[:2]}, section {title}"]
    if picture := PICTURE.search(text):
        sentences.append(f"the picture below it in the solved lab, plots.{picture[1]}")
    if slide := _slide(stem, name, title):
        sentences.append(f'the slide "{slide}"')
    return sentences


def _section(source, name):
    """(its heading, its text from there on, where `name` is checked)."""
    check = re.search(rf"^({name} = check\({name}\)|check\(.*\b{name}=)", source, re.M)
    if not check:
        return "", ""
    heading = [*HEADING.finditer(source, 0, check.start())][-1]
    following = HEADING.search(source, check.start())
    text = source[check.start():following.start() if following else len(source)]
    return heading[1].replace("`", ""), text


def _slide(stem, name, title):
    """Return the title of the first slide with the section's words, or else the name in code."""
    slides = {_title(slide): slide for slide in labs.deck(stem).split("\n---\n")}
    words = title.lstrip("0123456789. ")
    same = [each for each in slides if re.match(rf"{re.escape(words)}(?!\w)", each, re.I)]
    code = re.compile(rf"`{name}\b|^(def |class |.*= ){name}\(", re.M)
    mentions = [each for each, slide in slides.items() if each and code.search(slide)
                and len(set(re.findall(r"\w+", slide)) & set(labs.names_of(stem))) <= LISTED]
    return next(iter(same + mentions), "")


def _title(slide):
    match = re.search(r"^# (.*)$", slide, re.M)
    return match[1].replace("`", "") if match else ""
