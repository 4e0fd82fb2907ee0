"""Trains a language model over gossiping nodes, and compares algorithms by perplexity.

    python -m experiments.language

Without options 8 nodes train a Transformer of 1.3 million parameters on the reference manual that
is part of Python, with SGP and with AllReduce. For other texts:

    python -m experiments.language --dataset files --data-dir FOLDER
    python -m experiments.language --dataset lm1b --data-dir ~/tensorflow_datasets

FOLDER contains text files with a text per line, whose names start with train and test. The program
trains a byte-pair tokenizer on the training texts, or reads one from the file `--tokenizer`.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import gossipjax as gx
from experiments.data import divide_examples, draw_batches
from experiments.data.texts import FILES, PYTHON_DOCS, Split, find_files, read_texts
from experiments.data.tokenizer import (
    END_ID,
    TOKENIZER_FILE,
    encode,
    make_tokenizer,
    save_tokenizer,
)
from experiments.data.tokens import NO_TOKEN, pack
from experiments.models import decay_mask
from experiments.models.decoder import DECODER_SIZES, Decoder
from experiments.models.transformer import compute_perplexity
from experiments.options import (
    DTYPES,
    Check,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
)
from experiments.training.main import run_program
from experiments.training.options import OPTIMIZER_HELP, Optimizer, TrainingOptions
from experiments.training.task import Metric, Task, Variables

MAX_LENGTH = Check(
    f"at most {Decoder.max_length}, the longest sequence that the models take",
    lambda value: value <= Decoder.max_length,
)
VOCABULARY_SIZE = 4096  # default size of a tokenizer that is trained


@dataclasses.dataclass(frozen=True)
class LanguageOptions(TrainingOptions):
    """Trains a language model over gossiping nodes."""

    batch_size_per_node: PositiveInt = 8
    """Sequences per node and step."""
    optimizer: Annotated[Optimizer, tyro.conf.arg(help=OPTIMIZER_HELP)] = "adam"
    learning_rate: PositiveFloat = 3e-3
    """Learning rate. With --lr-schedule step it is the rate for 256 sequences, and is scaled by the
    number of nodes; else it is not scaled. The default suits nano. Larger models need a smaller
    rate: 6e-4 for gpt2-small (Brown et al., table 2.1)."""
    warmup_steps: NonNegativeInt = 100
    """First updates, in which the rate rises linearly up to --learning-rate."""
    weight_decay: NonNegativeFloat = 0.1
    """L2 for sgd and nesterov, decoupled for adam and muon. Scales of norms do not decay."""
    adam_b2: Fraction = 0.95
    """Decay rate of Adam's mean of squared gradients."""
    dataset: str = PYTHON_DOCS
    """python_docs is the reference manual that is part of Python. files are train* and test* in
    --data-dir (.txt or .tsv, also gzipped), with a text per line. Any other name, for example lm1b,
    is a text set that TensorFlow Datasets has prepared in --data-dir."""
    data_dir: OptionalPath = None
    """Folder with text files, or with data sets of TensorFlow Datasets."""
    tokenizer: OptionalPath = None
    """File of a tokenizer, for example OUT/tokenizer.json of another run. By default, a tokenizer
    is trained on the training texts."""
    vocabulary_size: PositiveInt | None = None
    """Number of tokens of a tokenizer that is trained (default 4096), or fewer if the texts have
    fewer. With --tokenizer, its file must have this number of tokens."""
    sequence_length: Annotated[PositiveInt, MAX_LENGTH] = 128
    """Number of tokens of a sequence."""
    model: Literal["pico", "nano", "mini", "gpt2-small", "gpt2-medium", "gpt2-large", "1b"] = "nano"
    """The models in this order have 0.1, 0.8, 11, 85, 302, 708 and 906 million parameters besides
    the embedding of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset == PYTHON_DOCS and self.data_dir:
            raise ValueError(
                f"--data-dir needs --dataset {FILES} or the name of a set of TensorFlow Datasets, "
                f"got {PYTHON_DOCS}, which is installed."
            )


class LanguageModeling(Task):
    """A model that predicts the next token, trained by cross-entropy on sequences of fixed length.

    The texts are joined, each with an end token, and cut into sequences. The model gets an end
    token and all tokens of a sequence but the last, and predicts all tokens of the sequence. So
    each token of the texts is predicted once per epoch.
    """

    def __init__(self, options: LanguageOptions):
        self.options = options
        self.decay_mask = decay_mask
        self.tokenizer = make_tokenizer(options, self.read_texts("train"), VOCABULARY_SIZE)
        self.train_tokens = self.load_tokens("train")
        self.test_tokens = self.load_tokens("test")
        self.num_examples = len(self.train_tokens)
        dtype, param_dtype = DTYPES[options.precision]
        vocabulary = self.tokenizer.get_vocab_size()
        size = DECODER_SIZES[options.model]
        self.model: Any = Decoder(
            vocabulary, size, remat=options.remat, dtype=dtype, param_dtype=param_dtype
        )
        self.description = (
            f"{describe_texts(options)}, {count_tokens(self.train_tokens):,} training and "
            f"{count_tokens(self.test_tokens):,} test tokens of {vocabulary:,}, in sequences of "
            f"{options.sequence_length}"
        )

    def read_texts(self, split: Split) -> Iterator[str]:
        """Yields the texts of a split."""
        options = self.options
        return read_texts(options.dataset, options.data_dir, split)

    def load_tokens(self, split: Split) -> np.ndarray:
        """Returns the sequences of a split, int32 `[sequences, T]`, padded by `NO_TOKEN`."""
        documents = encode(self.tokenizer, self.read_texts(split))
        return pack(documents, self.options.sequence_length)

    def save(self, folder: Path) -> None:
        """Saves the tokenizer into the folder of a run."""
        save_tokenizer(self.tokenizer, folder / TOKENIZER_FILE)

    def init(self, seed: int) -> Variables:
        return self.model.init(jax.random.key(seed), self.test_tokens[:1])

    def losses(self, variables: Variables, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the cross-entropy `[B, T]` of tokens (0 for padding), and which are tokens."""
        is_token = tokens != NO_TOKEN
        tokens = jnp.where(is_token, tokens, END_ID)
        inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=END_ID)
        logits = self.model.apply(variables, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return jnp.where(is_token, losses, 0.0), is_token

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        losses, is_token = self.losses(variables, batch)
        return losses.sum() / is_token.sum(), None

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        tokens = self.train_tokens
        division = divide_examples(tokens, nodes.size, None, seed, self.options.shuffle)
        rows = draw_batches(division, batch_size_per_node, seed, nodes.local)
        return (tokens[row] for row in itertools.islice(rows, start, None))

    def test_batches(self) -> Iterator[Any]:
        size = self.options.global_batch_size  # fits, as a step has as many
        starts = range(0, len(self.test_tokens), size)
        return (self.test_tokens[start : start + size] for start in starts)

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        losses, is_token = self.losses(variables, batch)
        return {"loss": Metric(losses.sum(axis=1), is_token.sum(axis=1))}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "perplexity": compute_perplexity(means["loss"])}


def describe_texts(options: LanguageOptions) -> str:
    """Returns the name of the data set, and for files also their number."""
    if options.dataset != FILES:
        return options.dataset
    train, test = (len(find_files(options.data_dir, split)) for split in ("train", "test"))
    return f"{FILES} ({train:,} for training and {test:,} for the test)"


def count_tokens(tokens: np.ndarray) -> int:
    """Returns the number of tokens in packed sequences."""
    return int((tokens != NO_TOKEN).sum())


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    run_program("experiments.language", LanguageOptions, LanguageModeling, arguments)


if __name__ == "__main__":
    main()
