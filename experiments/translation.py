"""Trains a translation model over gossiping nodes, and compares algorithms by BLEU.

    python -m experiments.translation --data-dir FOLDER

FOLDER contains train.tsv, valid.tsv and test.tsv, plain or gzipped. Each line is a sentence, a tab
and its translation. Without further options 4 nodes train a small Transformer by Adam, with SGP and
with AllReduce. The program trains a byte-pair tokenizer on the training text, and saves it with the
run. For English to German of WMT'16, which TensorFlow Datasets prepares:

    python -m experiments.translation --dataset wmt16_en_de --model base --vocabulary-size 37000

After each epoch the program measures the average model on the validation set: loss and perplexity
per token, and the BLEU score of the first `--eval-sentences`. At the end it measures the BLEU score
on the test set by sacrebleu, whose signature is in `summary.json`, and writes hypotheses.txt and
references.txt into OUT/texts/RUN, a sentence per line.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from sacrebleu.metrics.bleu import BLEU

import gossipjax as gx
from experiments.data.texts import load_pairs
from experiments.data.tokenizer import (
    BEGIN_ID,
    END_ID,
    PADDING_ID,
    TOKENIZER_FILE,
    make_tokenizer,
    save_tokenizer,
)
from experiments.data.tokens import (
    Bucket,
    Sequences,
    TokenBatch,
    draw_token_batches,
    extend_widths,
    make_buckets,
)
from experiments.models.layers import draw_dropout_seeds, make_dropout_rngs
from experiments.models.seq2seq import SEQ2SEQ_SIZES, Seq2Seq, translate_texts
from experiments.models.transformer import compute_perplexity
from experiments.options import (
    DTYPES,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
)
from experiments.training.evaluation import map_texts
from experiments.training.main import run_program
from experiments.training.options import (
    LR_SCHEDULE_HELP,
    OPTIMIZER_HELP,
    LrSchedule,
    Optimizer,
    TrainingOptions,
)
from experiments.training.task import Examination, Metric, Task, Variables

VOCABULARY_SIZE = 8000  # default size of a tokenizer that is trained
SAMPLES = 3  # translations that are shown


@dataclasses.dataclass(frozen=True)
class TranslationOptions(TrainingOptions):
    """Trains a translation model over gossiping nodes."""

    BATCH_OPTION: ClassVar[str] = "--tokens-per-batch"
    nodes: PositiveInt = 4
    """Number of nodes. Each node has its own model and its part of the data."""
    batch_size_per_node: Annotated[PositiveInt, tyro.conf.arg(name="tokens-per-batch")] = 1024
    """Tokens of the targets per node and step, with the padding to --bucket-lengths. The sources
    have as many. For N tokens without padding, give N divided by the part of tokens that is not
    padding.
    """
    optimizer: Annotated[Optimizer, tyro.conf.arg(help=OPTIMIZER_HELP)] = "adam"
    learning_rate: PositiveFloat = 2e-3
    """Learning rate. With --lr-schedule step it is the rate for 256 tokens, and is scaled by the
    number of nodes; else it is not scaled."""
    lr_schedule: Annotated[LrSchedule, tyro.conf.arg(help=LR_SCHEDULE_HELP)] = "inverse_sqrt"
    warmup_steps: NonNegativeInt = 500
    """First updates, in which the rate rises linearly up to --learning-rate."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 for sgd and nesterov, decoupled for adam and muon."""
    adam_b2: Fraction = 0.98
    """Decay rate of Adam's mean of squared gradients."""
    adam_epsilon: PositiveFloat = 1e-9
    """Added to the square root of Adam's mean of squared gradients."""
    dataset: Literal["tsv", "wmt16_en_de"] = "tsv"
    """tsv reads files of tab-separated pairs in --data-dir. wmt16_en_de is English to German, from
    wmt16_translate/de-en of TensorFlow Datasets in --data-dir."""
    data_dir: OptionalPath = None
    """Folder with train, valid and test.tsv (or .tsv.gz), or data sets of TensorFlow Datasets."""
    tokenizer: OptionalPath = None
    """File of a tokenizer, for example OUT/tokenizer.json of another run. By default, a tokenizer
    is trained on the training text."""
    vocabulary_size: PositiveInt | None = None
    """Number of tokens of a tokenizer that is trained, for both languages (default 8000), or fewer
    if the text has fewer. With --tokenizer, its file must have this number of tokens."""
    bucket_lengths: tuple[PositiveInt, ...] = (16, 32, 64, 128)
    """Lengths in tokens to which sentences are padded, in rising order. A program is compiled for
    each length and round. Longer training pairs are left out."""
    model: Literal["mini", "base", "big"] = "mini"
    """base and big are the sizes of Vaswani et al. mini has 0.9 million parameters besides the
    embedding."""
    dropout: Fraction = 0.1
    """Probability that a unit is dropped in training."""
    label_smoothing: Fraction = 0.1
    """Probability that the training loss spreads evenly over the whole vocabulary."""
    beam: PositiveInt = 4
    """Number of hypotheses of the beam search."""
    length_penalty: NonNegativeFloat = 0.6
    """Exponent of the length penalty of the beam search (Wu et al.)."""
    eval_sentences: PositiveInt = 100
    """Number of sentences of the validation set that are translated after each epoch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = list(self.bucket_lengths)
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"--bucket-lengths must rise, got {' '.join(map(str, lengths))}.")
        if self.batch_size_per_node < lengths[-1]:
            raise ValueError(
                f"--tokens-per-batch must be at least {lengths[-1]}, the longest of "
                f"--bucket-lengths, got {self.batch_size_per_node}: raise it, or shorten them."
            )
        if self.dataset == "tsv" and self.data_dir is None:
            raise ValueError(
                "--dataset tsv needs --data-dir, the folder of train, valid and test.tsv, got none."
            )


class Translation(Task):
    """An encoder-decoder, trained by cross-entropy per token of the target.

    The training program counts tokens, padding included, as examples.
    """

    def __init__(self, options: TranslationOptions):
        self.options = options
        # The training texts are not kept, only their tokens.
        train, self.valid, self.test = load_pairs(options.dataset, options.data_dir)
        texts = itertools.chain(*train)
        self.tokenizer = make_tokenizer(options, texts, VOCABULARY_SIZE)
        self.sources = Sequences.encode(self.tokenizer, train.sources)
        self.targets = Sequences.encode(self.tokenizer, train.targets)
        lengths = self.lengths = np.maximum(self.sources.lengths, self.targets.lengths)
        # Count the nodes at the start, so that a resumed run has the same steps.
        buckets = self.make_buckets(options.nodes)
        self.num_examples = sum(len(bucket.rows) * bucket.width for bucket in buckets)
        dtype, param_dtype = DTYPES[options.precision]
        vocabulary = self.tokenizer.get_vocab_size()
        self.model: Any = Seq2Seq(
            vocabulary,
            SEQ2SEQ_SIZES[options.model],
            options.dropout,
            PADDING_ID,
            BEGIN_ID,
            END_ID,
            dtype,
            param_dtype,
            options.remat,
        )
        is_too_long = lengths > options.bucket_lengths[-1]
        too_long = int(is_too_long.sum())
        padding = 1 - self.targets.lengths[~is_too_long].sum() / self.num_examples
        self.description = (
            f"{options.dataset}, {len(lengths) - too_long:,} training pairs ({too_long:,} longer "
            f"than {options.bucket_lengths[-1]} tokens left out), "
            f"{len(self.valid.sources):,} for validation and "
            f"{len(self.test.sources):,} for the test; {self.num_examples:,} tokens an "
            f"epoch, {padding:.0%} of them padding, of {vocabulary:,} different ones"
        )

    def save(self, folder: Path) -> None:
        save_tokenizer(self.tokenizer, folder / TOKENIZER_FILE)

    def init(self, seed: int) -> Variables:
        tokens = jnp.full((1, self.options.bucket_lengths[0]), END_ID)
        return self.model.init(jax.random.key(seed), tokens, tokens)

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        sources, targets, seeds = batch
        rngs = make_dropout_rngs(seeds)
        logits = self.model.apply(variables, sources, targets, train=True, rngs=rngs)
        losses, is_token = cross_entropy(logits, targets, self.options.label_smoothing)
        return losses.sum() / is_token.sum(), None

    def make_buckets(self, nodes: int) -> list[Bucket]:
        """Returns the training pairs by length; each bucket has at least one pair for every node.

        If a run goes on with fewer nodes than at its start, the buckets stay the same. With more
        nodes, small buckets are joined.
        """
        return make_buckets(
            self.lengths, self.options.bucket_lengths, max(nodes, self.options.nodes)
        )

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        buckets = self.make_buckets(nodes.size)
        drawn = draw_token_batches(
            buckets,
            nodes.size,
            batch_size_per_node,
            seed,
            nodes.local,
            self.options.shuffle,
            self.options.accumulate,
        )

        def make_batch(step: int, batch: TokenBatch) -> Any:
            seeds = draw_dropout_seeds(seed, step, nodes.local, batch.rows.shape[1])
            return self.make_batch(batch.rows, batch.width, seeds)

        return itertools.starmap(make_batch, itertools.islice(enumerate(drawn), start, None))

    def make_batch(self, rows: np.ndarray, width: int, seeds: np.ndarray) -> Any:
        """Returns pairs by number `[...]`, as two arrays `[..., width]` of ids, and seeds."""
        return self.sources.pad(rows, width), self.targets.pad(rows, width), seeds

    def make_shapes(self, nodes: gx.Nodes, batch_size_per_node: int) -> list[Any]:
        batches = []
        for bucket in self.make_buckets(nodes.size):
            shape = (
                len(nodes.local),
                bucket.rows_per_batch(batch_size_per_node, self.options.accumulate),
            )
            rows = np.resize(bucket.rows, shape)
            batches.append(self.make_batch(rows, bucket.width, np.zeros(shape, np.uint32)))
        return batches

    def test_batches(self) -> Iterator[Any]:
        sources = Sequences.encode(self.tokenizer, self.valid.sources)
        targets = Sequences.encode(self.tokenizer, self.valid.targets)
        lengths = np.maximum(sources.lengths, targets.lengths)
        part = self.options.nodes * self.options.batch_size_per_node
        for bucket in make_buckets(lengths, extend_widths(self.options.bucket_lengths, lengths)):
            size = bucket.rows_per_batch(part)  # fits, as a step has as many
            for rows in np.array_split(bucket.rows, math.ceil(len(bucket.rows) / size)):
                yield sources.pad(rows, bucket.width), targets.pad(rows, bucket.width)

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        sources, targets = batch
        losses, is_token = cross_entropy(self.model.apply(variables, sources, targets), targets)
        return {"valid_loss": Metric(losses.sum(axis=1), is_token.sum(axis=1))}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "valid_perplexity": compute_perplexity(means["valid_loss"])}

    def examine(self, variables: Variables, is_last: bool) -> Examination:
        valid = self.valid
        count = self.options.eval_sentences
        translations = self.translate(variables, valid.sources[:count])
        score, _ = score_bleu(translations, valid.targets[:count])
        samples = [
            f"{source}\n  reference: {target}\n  translation: {translation}"
            for source, target, translation in zip(*valid, translations, strict=False)
        ]
        examined = Examination({"valid_bleu": score}, samples[:SAMPLES])
        if not is_last:
            return examined
        texts = {
            "hypotheses": self.translate(variables, self.test.sources),
            "references": list(map(join_lines, self.test.targets)),
        }
        score, signature = score_bleu(*texts.values())
        metrics = examined.metrics | {"bleu": score}
        details = {"bleu_signature": signature}
        return examined._replace(metrics=metrics, details=details, texts=texts)

    def translate(self, variables: Variables, sources: Sequence[str]) -> list[str]:
        """Returns the translation of each text as one line; each process translates a part."""
        translate = functools.partial(
            translate_texts,
            self.model,
            self.tokenizer,
            variables,
            widths=self.options.bucket_lengths,
            tokens=self.options.batch_size_per_node,
            beam=self.options.beam,
            alpha=self.options.length_penalty,
        )
        return list(map(join_lines, map_texts(translate, sources, variables)))


def cross_entropy(
    logits: jax.Array, targets: jax.Array, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy `[B, T]` of each token (0 for padding), and which are tokens.

    The target distribution gives `1 - label_smoothing` to the token, and divides the rest evenly
    over the whole vocabulary.
    """
    is_token = targets != PADDING_ID
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = (1 - label_smoothing) * chosen + label_smoothing * logits.mean(axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - expected
    return jnp.where(is_token, losses, 0.0), is_token


def join_lines(text: str) -> str:
    """Returns a text as one line, whatever characters end its lines; BLEU stays the same.

    >>> join_lines("ein\u2028Wort")
    'ein Wort'
    """
    return " ".join(text.splitlines())


def score_bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Returns the BLEU score of texts, from 0 to 100, and the signature of sacrebleu."""
    bleu = BLEU()
    score = bleu.corpus_score(translations, [references]).score
    return score, str(bleu.get_signature())


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    run_program("experiments.translation", TranslationOptions, Translation, arguments)


if __name__ == "__main__":
    main()
