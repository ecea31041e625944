"""Draw the figures of some decks: python slides/draw.py slides/figures/00_ranks.py ...

Each function of such a file draws one, but for those with "_" in front: `world` gives 00_world.svg.
It returns the figure, or (figure, width, height) in inches: a small figure is shown large, so that
its letters get as large as the text.
"""
import pathlib
import sys

from ranklab.plots.style import save


def draw(path):
    # As "__main__", so that launch sends the file's functions to the ranks by value.
    names = {"__name__": "__main__"}
    exec(compile(path.read_text(), path, "exec"), names)
    number = path.stem.partition("_")[0]
    for name, value in list(names.items()):
        if name.startswith("_") or getattr(value, "__module__", "") != "__main__":
            continue
        drawn = value()
        fig, *inches = drawn if isinstance(drawn, tuple) else (drawn,)
        if inches:
            fig.set_size_inches(inches)
        save(fig, path.with_name(f"{number}_{name}.svg"))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(pathlib.Path(argument))
