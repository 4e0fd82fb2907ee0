"""What is trained, in words, with the sizes of a scale."""

from collections.abc import Sequence

from experiments.report.section import Scale
from experiments.report.sections.sgp19.grid import Sizes, find_sizes
from experiments.report.sections.sgp19.readings import join_nodes
from experiments.training.optimization.learning_rates import STEP_BATCH_SIZE

PAPER_RATE = 0.1  # per 256 images


def describe_task(scale: Scale) -> str:
    """Returns what is trained, how, and how the recipe differs from the paper's."""
    sizes = find_sizes(scale)
    fewest, most = min(sizes.nodes), max(sizes.nodes)
    steps = [f"{sizes.count_steps(n, sizes.epochs):,} steps over {n}" for n in (fewest, most)]
    return (
        f"Here: a perceptron of 118,282 parameters on {name_data(scale)}, {sizes.batch} images per "
        f"node and step, {sizes.epochs} epochs over any number of nodes ({', '.join(steps)}), "
        f"{count_seeds(sizes.seeds)}, Nesterov momentum, the rate 10x down at 1/3, 2/3 and 8/9. "
        f"{describe_warmup(sizes)} {describe_rate(scale)} Accuracies are of the average model on "
        f"the {sizes.test_examples:,} test images. All methods but the real AD-PSGD are computed "
        "in one process: what they learn is measured, their time is not."
    )


def refer_to_task(scale: Scale, nodes: Sequence[int]) -> str:
    """Returns what is trained over these nodes, for the sections after that of Table 1."""
    sizes = find_sizes(scale)
    steps = join_nodes([sizes.count_steps(n, sizes.epochs) for n in nodes])
    return (
        f"Here: the task and the recipe of Table 1's section, on {name_data(scale)}, over "
        f"{join_nodes(nodes)} nodes ({steps} steps)"
    )


def name_data(scale: Scale) -> str:
    """Returns the data set, with its size if it is a part of another.

    >>> name_data(Scale())
    '4,000 of the digits of MNIST'
    """
    if scale.fashion_mnist is not None and not scale.is_quick:
        return "Fashion-MNIST"
    return f"{find_sizes(scale).examples:,} of the digits of MNIST"


def describe_warmup(sizes: Sizes) -> str:
    """Returns over which nodes the rate rises first.

    >>> describe_warmup(find_sizes(Scale()))
    'The rate warms up, from that of 256 images, over 32 nodes only: other steps have no more.'
    """
    nodes = [n for n in sizes.nodes if sizes.has_warmup(n)]
    if not nodes:
        return f"There is no warm-up, as no step has more than {STEP_BATCH_SIZE} images."
    return (
        f"The rate warms up, from that of {STEP_BATCH_SIZE} images, over {join_nodes(nodes)} nodes "
        "only: other steps have no more."
    )


def describe_rate(scale: Scale) -> str:
    """Returns the rate of all methods beside the paper's."""
    sizes = find_sizes(scale)
    rate = (
        f"The rate is {sizes.rate} per {STEP_BATCH_SIZE} images for all methods and nodes; the "
        f"paper's is {PAPER_RATE}"
    )
    if scale.is_quick:
        return f"{rate}."
    return (
        f"{rate}, which on Fashion-MNIST is near the largest stable one over 32 nodes: all gossip "
        "loses more with it. For one peer over 32 nodes the paper's is lower, 0.0375, with later "
        "decays, after 40, 70 and 85 of 90 epochs (SGP-18, A.3): there ours is higher, and these "
        "are the rows whose loss over 32 nodes is judged."
    )


def count_seeds(count: int) -> str:
    """Returns a number of seeds.

    >>> count_seeds(1), count_seeds(3)
    ('1 seed', '3 seeds')
    """
    return f"{count} seed{'' if count == 1 else 's'}"
