"""Texts: pairs and lines of files, prepared sets, tokenizers, sequences, batches by tokens."""

import gzip
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.data import DataError, MissingDataError
from experiments.data import texts as texts_module
from experiments.data.texts import FILES, PYTHON_DOCS, load_pairs, read_pairs, read_texts
from experiments.data.tokenizer import (
    END_ID,
    PADDING_ID,
    SPECIAL_TOKENS,
    encode,
    load_tokenizer,
    make_tokenizer,
    require_same_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from experiments.data.tokens import (
    NO_TOKEN,
    Sequences,
    draw_token_batches,
    extend_widths,
    make_buckets,
    pack,
)

PAIRS = [("A small house", "Ein kleines Haus"), ("  two spaces \u2028", "<|end|> 😀")]
CONTENT = "".join(f"{source}\t{target}\n" for source, target in PAIRS).encode()
MARK = b"\xef\xbb\xbf"  # of the order of bytes
TEXTS = ["low lower lowest", "new newer newest", "wide wider widest", "Straße, naïve, 東京"] * 3


def test_pairs_of_a_file(tmp_path):
    for content in (CONTENT, CONTENT[:-1], CONTENT.replace(b"\n", b"\r\n"), MARK + CONTENT):
        (tmp_path / "a.tsv").write_bytes(content)
        (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(content, mtime=0))
        for name in ("a.tsv", "a.tsv.gz"):
            assert list(zip(*read_pairs(tmp_path / name), strict=True)) == PAIRS


def test_a_file_that_does_not_pair(tmp_path):
    for name, content, message in (
        ("a.tsv", b"one\teins\nb\tc\td\n", r"a.tsv, line 2 must be .* got 2 tabs"),
        ("a.tsv", b"one\t \n", r"a.tsv, line 1 must be a sentence, one tab and its translation"),
        ("a.tsv", b"one\teins\nw\xff\tb\n", r"a.tsv, line 2, must be .* got .* at byte 1"),
        ("a.tsv", MARK, r"a.tsv must hold one pair of sentences or more, got none"),
        ("a.tsv.gz", gzip.compress(CONTENT, mtime=0)[:-9], r"a.tsv.gz is corrupt or cut short"),
        ("a.tsv.gz", CONTENT, r"a.tsv.gz is corrupt or cut short"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_pairs(tmp_path / name)


def test_splits_of_a_folder(tmp_path):
    (tmp_path / "train.tsv").write_bytes(CONTENT)
    with pytest.raises(MissingDataError, match=r"no valid.tsv or valid.tsv.gz in .*--data-dir"):
        load_pairs("tsv", tmp_path)
    (tmp_path / "valid.tsv.gz").write_bytes(gzip.compress(CONTENT, mtime=0))
    (tmp_path / "test.tsv").write_bytes(b"one\teins\n")
    assert [len(pairs.sources) for pairs in load_pairs("tsv", tmp_path)] == [2, 2, 1]


def prepare_set(folder, set_name, splits, features, config=None):
    """Writes a set in the form of TensorFlow Datasets; its examples by split."""

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = set_name
        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
        pkg_dir_path = folder

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {split: enumerate(examples) for split, examples in splits.items()}

        def _generate_examples(self):
            return []

    builder: Any = Builder
    builder(data_dir=folder, file_format="array_record").download_and_prepare()


class CutShort(list):
    """Examples of text as TFDS gives them, of which the second cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            raise RuntimeError("cut short")
        return super().__getitem__(index)


def test_wmt16_as_tensorflow_datasets_prepares_it(tmp_path, monkeypatch):
    """A set of the name and features of the real one; pairs with an empty side are left out."""
    splits = {
        "train": [{"de": "eins", "en": "one"}, {"de": "", "en": "two"}],
        "validation": [{"de": "zwei", "en": "two"}],
        "test": [{"de": "drei \u00fc", "en": "three"}],
    }
    features = tfds.features.Translation(languages=["de", "en"])
    prepare_set(tmp_path, "wmt16_translate", splits, features, "de-en")
    sets = load_pairs("wmt16_en_de", tmp_path)
    assert sets == ((["one"], ["eins"]), (["two"], ["zwei"]), (["three"], ["drei \u00fc"]))
    pair = {"de": b"eins", "en": b"one"}
    for broken, message in (
        (CutShort([pair] * 3), "example 1 of test in .*1.0.0 must be .*got cut short"),
        ([pair, pair, {"de": b"\xff", "en": b"x"}], "example 2 of test in .*got 'utf-8' codec"),
    ):
        sources = [[pair], [pair], broken]
        monkeypatch.setattr(texts_module, "open_splits", lambda *_, sources=sources: sources)
        with pytest.raises(DataError, match=message):
            load_pairs("wmt16_en_de", tmp_path)


def test_a_prepared_set_of_texts(tmp_path):
    features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": np.int64})
    splits = {
        "train": [{"text": text, "label": 0} for text in "ab"],
        "validation": [{"text": "größer", "label": 1}],
    }
    prepare_set(tmp_path, "tiny_text", splits, features)
    assert sorted(read_texts("tiny_text", tmp_path, "train")) == ["a", "b"]
    assert list(read_texts("tiny_text/1.0.0", tmp_path, "test")) == ["größer"]
    prepare_set(tmp_path, "no_test", {"train": splits["train"]}, features)
    with pytest.raises(DataError, match="must have a split test or validation, got train"):
        list(read_texts("no_test", tmp_path, "test"))


def test_lines_of_files_and_the_reference_of_python(tmp_path):
    (tmp_path / "train.1.txt").write_text("one\n\n  \ntwo \u2028 2\r\n")
    (tmp_path / "train.2.txt.gz").write_bytes(gzip.compress(b"drei", mtime=0))
    (tmp_path / "train.md").write_text("not read")
    (tmp_path / "test.tsv").write_text("yes\tja\nno\tnein\n")
    assert list(read_texts(FILES, tmp_path, "train")) == ["one", "two \u2028 2", "drei"]
    assert list(read_texts(FILES, tmp_path, "test")) == ["yes\tja", "no\tnein"]
    train, test = (set(read_texts(PYTHON_DOCS, None, split)) for split in ("train", "test"))
    assert not train & test
    assert len(train) > 5 * len(test) > 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocabulary_size=290)


def make_options(**options: Any) -> Any:
    """Those of a program that decide on its tokenizer."""
    defaults = {"tokenizer": None, "vocabulary_size": None, "resume": False, "out": None}
    return SimpleNamespace(**defaults | {"run_folders": []} | options)


@given(st.text())
@example("a<|end|>b")
@settings(max_examples=50, deadline=None)
def test_a_tokenizer_decodes_what_it_encoded(tokenizer, text):
    """And no text holds a special token."""
    (ids,) = encode(tokenizer, [text])
    assert tokenizer.decode(ids.tolist()) == text
    assert (ids >= len(SPECIAL_TOKENS)).all()


def test_a_tokenizer_is_the_same_for_the_same_texts_and_when_loaded(tokenizer, tmp_path):
    assert train_tokenizer(iter(TEXTS), 290).to_str() == tokenizer.to_str()
    path = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, path)
    loaded = load_tokenizer(path)
    assert loaded.to_str() == tokenizer.to_str()
    text = "a lower <|end|>"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids
    require_same_tokenizer(loaded, path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_size_of_a_tokenizer_is_that_of_the_file_the_option_or_the_program(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, path)
    for options, size in (
        ({"tokenizer": path}, 290),
        ({"vocabulary_size": 280}, 280),
        ({}, 270),
    ):
        found = make_tokenizer(make_options(**options), TEXTS, 270)
        assert found.get_vocab_size() == size
    message = rf"--tokenizer must be a file of 280 tokens.* got {path} with 290: pass"
    with pytest.raises(DataError, match=message):
        make_tokenizer(make_options(tokenizer=path, vocabulary_size=280), [], 270)


def test_a_file_without_a_tokenizer_is_refused(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    others = tokenizer.to_str().replace("<|end|>", "</s>")
    for content, message in (
        ('{"model": 3}', "must be the JSON file of a tokenizer"),
        (others, "special tokens .*got .*null"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(path)


@given(st.lists(st.lists(st.integers(3, 9), max_size=9), max_size=9), st.integers(1, 7))
@settings(deadline=None)
def test_packing_drops_and_repeats_nothing(documents, length):
    rows = pack((np.array(document, np.int32) for document in documents), length)
    tokens = rows[rows != NO_TOKEN]
    assert tokens.tolist() == [token for document in documents for token in [*document, END_ID]]
    assert rows.dtype == np.int32
    assert rows.shape == (-(-len(tokens) // length), length)
    assert (rows.ravel()[len(tokens) :] == NO_TOKEN).all()


def test_sequences_are_padded(tokenizer):
    texts = ["a b c a b c", "", "c"]
    sequences = Sequences.encode(tokenizer, texts)
    ids = [[*tokenizer.encode(text).ids, END_ID] for text in texts]
    assert sequences.lengths.tolist() == list(map(len, ids))
    rows = np.array([[2, 0], [1, 2]])
    padded = sequences.pad(rows, 12)
    assert (padded.shape, padded.dtype) == ((2, 2, 12), np.int32)
    for row, line in zip(rows.ravel(), padded.reshape(-1, 12), strict=True):
        assert line.tolist() == ids[row] + [PADDING_ID] * (12 - len(ids[row]))
    assert tokenizer.decode(padded[0, 1].tolist()) == texts[0]


def test_buckets_are_narrow_and_have_an_example_for_each_node():
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    buckets = make_buckets(lengths, (4, 8, 16, 32))
    rows = np.concatenate([bucket.rows for bucket in buckets])
    assert sorted(rows) == np.flatnonzero(lengths <= 32).tolist()
    for bucket, below in zip(buckets, (0, 4, 8, 16), strict=True):
        assert set(lengths[bucket.rows]) <= set(range(below + 1, bucket.width + 1))
    for nodes, expected in (
        (3, [(32, [0, 1, 2, 3, 4, 5, 6])]),
        (2, [(8, [0, 1, 2, 3, 5]), (32, [4, 6])]),
    ):
        few = make_buckets(np.array([1, 5, 5, 5, 20, 6, 30]), (4, 8, 16, 32), nodes)
        assert [(b.width, sorted(b.rows.tolist())) for b in few] == expected
    with pytest.raises(DataError, match="an example of at most 32 tokens, got 2 for 3 nodes"):
        make_buckets(np.array([1, 5, 40]), (4, 32), nodes=3)
    assert extend_widths((4, 8), lengths) == [4, 8, 16, 32, 64]


LENGTHS = np.random.default_rng(1).integers(1, 33, 300)


def draw(count, seed=0, wanted=None):
    buckets = make_buckets(LENGTHS, (8, 16, 32), 3)
    return list(itertools.islice(draw_token_batches(buckets, 3, 64, seed, wanted), count))


def test_batches_are_of_few_shapes_and_each_example_is_of_one_node():
    batches = draw(2000)
    for batch, part in zip(batches, draw(20, wanted=[2, 0]), strict=False):
        assert batch.width == part.width
        np.testing.assert_array_equal(batch.rows[[2, 0]], part.rows)  # whichever process asks
    assert [b.width for b in batches[:20]] != [b.width for b in draw(20, seed=1)]
    assert {(b.width, b.rows.shape) for b in batches} == {(8, (3, 8)), (16, (3, 4)), (32, (3, 2))}
    assert all(LENGTHS[batch.rows].max() <= batch.width for batch in batches)
    seen = [set(np.concatenate([b.rows[node].ravel() for b in batches])) for node in range(3)]
    assert sum(map(len, seen)) == len(set.union(*seen)) == len(LENGTHS)
    # A bucket is drawn as often as it has batches: 20 epochs of each, up to the draws.
    counts = np.bincount(np.concatenate([b.rows.ravel() for b in batches]))
    by_width = [counts[(width // 2 < LENGTHS) & (width >= LENGTHS)].mean() for width in (16, 32)]
    np.testing.assert_allclose(by_width, counts.mean(), rtol=0.15)


def test_a_global_shuffle_reads_each_bucket_once_an_epoch():
    """Each example once, but for the batch of a bucket that ends one epoch and begins the next."""
    buckets = make_buckets(LENGTHS, (8, 16, 32), 3)
    drawn = draw_token_batches(buckets, 3, 64, 0, shuffle="global")
    per_epoch = [len(bucket.rows) / (3 * bucket.rows_per_batch(64)) for bucket in buckets]
    batches = list(itertools.islice(drawn, round(20 * sum(per_epoch))))
    counts = np.bincount(np.concatenate([b.rows.ravel() for b in batches]))
    assert set(counts.tolist()) <= {19, 20, 21}
    for bucket, steps in zip(buckets, per_epoch, strict=True):
        rows = [b.rows.ravel() for b in batches if b.width == bucket.width]
        assert len(rows) == pytest.approx(20 * steps, abs=1)
        first, second = np.split(np.concatenate(rows)[: 2 * len(bucket.rows)], 2)
        assert sorted(first) == sorted(second) == bucket.rows.tolist()
        assert first.tolist() != second.tolist()
    in_epochs = [[b.width for b in batches[k : k + 10]] for k in (0, round(sum(per_epoch)))]
    assert in_epochs[0] != in_epochs[1]
