"""A small task for tests of the image program: 512 digits to train on, 101 to test on.

With `--model linear` it compiles in no time, too.
"""

from collections.abc import Callable

from experiments import data, plots


def make_small(setattr: Callable[..., None], has_plots: bool = False) -> None:
    """Gives the image program the small task; without table and plots unless `has_plots`.

    Args:
      setattr: that of a `MonkeyPatch`, or the builtin.
      has_plots: whether the program makes its table and plots.
    """
    load = data.load
    mnist = load("mnist5k")
    few = mnist._replace(
        train_images=mnist.train_images[:512],
        train_labels=mnist.train_labels[:512],
        test_images=mnist.test_images[:101],
        test_labels=mnist.test_labels[:101],
    )

    def load_few(name, *args):
        return few if name == "mnist5k" else load(name, *args)

    setattr(data, "load", load_few)
    if not has_plots:
        setattr(plots, "write_report", lambda *_: None)
