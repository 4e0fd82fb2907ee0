"""Byte-pair tokenizers: trained on texts, saved with a run, and compared when it is resumed.

A tokenizer is a `tokenizers.Tokenizer` whose tokens are of bytes, as GPT-2's: it encodes any text,
and decodes it to the same text. Its first tokens are `SPECIAL_TOKENS`, which no text contains: one
that spells them is encoded as other text.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.data.local import DataError
from experiments.results import replace_text

TOKENIZER_FILE = "tokenizer.json"  # in the folder of the results
SPECIAL_TOKENS = ("<|padding|>", "<|begin|>", "<|end|>")
PADDING_ID = 0
BEGIN_ID = 1
END_ID = 2
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256
"""The special tokens, and one for each byte."""

ENCODED_TOGETHER = 1000  # texts, by several threads


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Returns a byte-pair tokenizer trained on these texts; the same for the same texts.

    It has `vocabulary_size` tokens, the special ones included, or fewer if each pair that is left
    occurs once.

    >>> tokenizer = train_tokenizer(["low lower lowest"] * 9, vocabulary_size=262)
    >>> tokenizer.encode("lower").tokens
    ['low', 'e', 'r']
    >>> tokenizer.decode(tokenizer.encode("slow <|end|>").ids)
    'slow <|end|>'

    References:
        Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL 2016,
        arXiv:1508.07909.
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    if vocabulary_size < MIN_VOCABULARY:
        raise DataError(
            f"--vocabulary-size must be >= {MIN_VOCABULARY}, a token for each byte and "
            f"{len(SPECIAL_TOKENS)} special ones, got {vocabulary_size}: raise it."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True  # of a text: as text
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes the JSON file of `tokenizers`: all of it, or nothing if the program is stopped."""
    replace_text(path, tokenizer.to_str(pretty=True))


def load_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer in a file."""
    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    except OSError:
        raise
    except Exception as error:  # `tokenizers` raises nothing more special
        raise DataError(
            f"{path} must be the JSON file of a tokenizer, got one that cannot be read: {error}"
        ) from error
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    saved = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    if saved != ids:
        raise DataError(
            f"{path} must have the special tokens {json.dumps(ids)}, got {json.dumps(saved)}: give "
            "a tokenizer that a program of these experiments has saved."
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def require_same_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Raises `DataError` if the file, of a run that is resumed, holds another tokenizer."""
    if not path.exists():
        return
    saved = load_tokenizer(path)
    if saved.to_str() != tokenizer.to_str():
        raise DataError(
            f"the tokenizer must be the saved run's, {path}, with {saved.get_vocab_size():,} "
            f"tokens, got another with {tokenizer.get_vocab_size():,}: pass --tokenizer {path}, or "
            "give the texts that it was trained on; or choose another --out."
        )


def make_tokenizer(options: Any, texts: Iterable[str], default_size: int) -> Tokenizer:
    """Returns the tokenizer of a run: one from a file, or one that is trained on the texts.

    A run that is resumed has the tokenizer that is saved in its folder. After a restart by the
    launcher, without `--resume`, the tokenizer is trained again, and must be the same.
    """
    saved = options.out / TOKENIZER_FILE if options.resume and options.out else None
    size = options.vocabulary_size
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
        number = tokenizer.get_vocab_size()
        if size is not None and number != size:
            raise DataError(
                f"--tokenizer must be a file of {size} tokens, the --vocabulary-size, got "
                f"{options.tokenizer} with {number}: pass --vocabulary-size {number}, or another "
                "file."
            )
    elif saved and saved.exists():
        tokenizer = load_tokenizer(saved)
    else:
        tokenizer = train_tokenizer(texts, size or default_size)
    for folder in options.run_folders:
        require_same_tokenizer(tokenizer, folder / TOKENIZER_FILE)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields the ids of each text, int32, without special tokens."""
    texts = iter(texts)
    while batch := list(itertools.islice(texts, ENCODED_TOGETHER)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids, np.int32)
