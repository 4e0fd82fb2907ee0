"""Sentence pairs, sequences, and batches by tokens."""

import gzip
import itertools

import numpy as np
import pytest
from damaged_records import BrokenSource

from experiments.data import DataError, MissingDataError, texts
from experiments.data.texts import load_pairs, read_pairs
from experiments.data.tokenizer import END_ID, PADDING_ID, train_tokenizer
from experiments.data.tokens import Sequences, draw_token_batches, extend_widths, make_buckets

PAIRS = [("A small house", "Ein kleines Haus"), ("  two spaces \u2028", "<|end|> 😀")]
CONTENT = "".join(f"{source}\t{target}\n" for source, target in PAIRS).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", CONTENT),
        ("a.tsv.gz", gzip.compress(CONTENT, mtime=0)),
        ("a.tsv", CONTENT.removesuffix(b"\n")),
        ("a.tsv", CONTENT.replace(b"\n", b"\r\n")),
        ("a.tsv", b"\xef\xbb\xbf" + CONTENT),
        ("a.tsv.gz", gzip.compress(b"\xef\xbb\xbf" + CONTENT, mtime=0)),
    ],
)
def test_pairs_of_a_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    pairs = read_pairs(tmp_path / name)
    assert list(zip(*pairs, strict=True)) == PAIRS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"one\teins\ntwo\n", r"a.tsv, line 2 must be .* got 0 tabs in 'two'"),
        ("a.tsv", b"one\teins\nb\tc\td\n", r"a.tsv, line 2 must be .* got 2 tabs"),
        ("a.tsv", b"one\t \n", r"a.tsv, line 1 must be a sentence, one tab and its translation"),
        ("a.tsv", b"one\teins\n\nb\tc\n", r"a.tsv, line 2 must be .* got 0 tabs in ''"),
        (
            "a.tsv",
            b"one\teins\nw\xff\tb\n",
            r"a.tsv, line 2, must be text in UTF-8, got .* at byte 1",
        ),
        ("a.tsv", b"x" * 999, r"line 1 must be .* in 'x{60} ...'"),
        ("a.tsv", b"\xef\xbb\xbf", r"a.tsv must hold one pair of sentences or more, got none"),
        ("a.tsv", b"", r"a.tsv must hold one pair of sentences or more, got none"),
        ("a.tsv.gz", gzip.compress(CONTENT, mtime=0)[:-9], r"a.tsv.gz is corrupt or cut short"),
        ("a.tsv.gz", CONTENT, r"a.tsv.gz is corrupt or cut short"),
    ],
)
def test_a_file_that_does_not_pair(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_pairs(tmp_path / name)


def test_splits_of_a_folder(tmp_path):
    (tmp_path / "train.tsv").write_bytes(CONTENT)
    (tmp_path / "valid.tsv.gz").write_bytes(gzip.compress(CONTENT, mtime=0))
    with pytest.raises(MissingDataError, match=r"no test.tsv or test.tsv.gz in .*--data-dir must"):
        load_pairs("tsv", tmp_path)
    (tmp_path / "test.tsv").write_bytes(b"one\teins\n")
    sets = load_pairs("tsv", tmp_path)
    assert [len(pairs.sources) for pairs in sets] == [2, 2, 1]
    assert sets.test.targets == ["eins"]
    (tmp_path / "valid.tsv").write_bytes(CONTENT)
    with pytest.raises(DataError, match=r"each file of texts once, got both valid.tsv and .*gz"):
        load_pairs("tsv", tmp_path)
    with pytest.raises(MissingDataError, match=r"no wmt16_translate/de-en in .* tfds build"):
        load_pairs("wmt16_en_de", tmp_path)
    with pytest.raises(DataError, match="must be tsv or wmt16_en_de, got 'wmt'"):
        load_pairs("wmt", tmp_path)


def test_wmt16_as_tensorflow_datasets_prepares_it(tmp_path, monkeypatch):
    """A set of the name and features of the real one; pairs with an empty side are left out."""
    import tensorflow_datasets as tfds

    examples = {
        "train": [{"de": "eins", "en": "one"}, {"de": "", "en": "two"}],
        "validation": [{"de": "zwei", "en": "two"}],
        "test": [{"de": "drei \u00fc", "en": "three"}],
    }

    class Wmt16Translate(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en")]  # noqa: RUF012
        pkg_dir_path = tmp_path

        def _info(self):
            features = tfds.features.Translation(languages=["de", "en"])
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {split: enumerate(pairs) for split, pairs in examples.items()}

        def _generate_examples(self):
            return []

    builder = Wmt16Translate(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    sets = load_pairs("wmt16_en_de", tmp_path)
    assert sets.train.sources == ["one"]
    assert sets.valid.targets == ["zwei"]
    assert sets.test == (["three"], ["drei \u00fc"])
    pair = {"de": b"eins", "en": b"one"}
    for broken, message in (
        (BrokenSource([pair] * 3, 1), "example 1 of test in .*1.0.0 must be .*got cut short"),
        ([pair, pair, {"de": b"\xff", "en": b"x"}], "example 2 of test in .*got 'utf-8' codec"),
    ):
        monkeypatch.setattr(texts, "open_splits", lambda *_, last=broken: [[pair], [pair], last])
        with pytest.raises(DataError, match=message):
            load_pairs("wmt16_en_de", tmp_path)


def test_sequences_are_padded():
    texts = ["a b c a b c", "", "c"]
    tokenizer = train_tokenizer(texts, 300)
    sequences = Sequences.encode(tokenizer, texts)
    ids = [[*tokenizer.encode(text).ids, END_ID] for text in texts]
    assert len(sequences) == 3
    assert sequences.lengths.tolist() == list(map(len, ids))
    rows = np.array([[2, 0], [1, 2]])
    padded = sequences.pad(rows, 9)
    assert padded.shape == (2, 2, 9)
    assert padded.dtype == np.int32
    for row, line in zip(rows.ravel(), padded.reshape(-1, 9), strict=True):
        assert line.tolist() == ids[row] + [PADDING_ID] * (9 - len(ids[row]))
    assert tokenizer.decode(padded[0, 1].tolist()) == texts[0]


def test_buckets_are_narrow_and_have_an_example_for_each_node():
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    buckets = make_buckets(lengths, (4, 8, 16, 32))
    rows = np.concatenate([bucket.rows for bucket in buckets])
    assert sorted(rows) == np.flatnonzero(lengths <= 32).tolist()
    for bucket, below in zip(buckets, (0, 4, 8, 16), strict=True):
        assert set(lengths[bucket.rows]) <= set(range(below + 1, bucket.width + 1))
    few = make_buckets(np.array([1, 5, 5, 5, 20, 6, 30]), (4, 8, 16, 32), nodes=3)
    assert [(b.width, sorted(b.rows.tolist())) for b in few] == [(32, [0, 1, 2, 3, 4, 5, 6])]
    few = make_buckets(np.array([1, 5, 5, 5, 20, 6, 30]), (4, 8, 16, 32), nodes=2)
    assert [(b.width, b.rows.tolist()) for b in few] == [(8, [0, 1, 2, 3, 5]), (32, [4, 6])]
    with pytest.raises(DataError, match="an example of at most 32 tokens, got 2 for 3 nodes"):
        make_buckets(np.array([1, 5, 40]), (4, 32), nodes=3)
    assert extend_widths((4, 8), lengths) == [4, 8, 16, 32, 64]


def draw(count, nodes=3, tokens=64, seed=0, wanted=None):
    lengths = np.random.default_rng(1).integers(1, 33, 300)
    buckets = make_buckets(lengths, (8, 16, 32), nodes)
    return list(
        itertools.islice(draw_token_batches(buckets, nodes, tokens, seed, wanted), count)
    ), lengths


def test_batches_have_as_many_tokens_and_few_shapes():
    batches, lengths = draw(100)
    assert {(b.width, b.rows.shape) for b in batches} == {(8, (3, 8)), (16, (3, 4)), (32, (3, 2))}
    for batch in batches:
        assert lengths[batch.rows].max() <= batch.width


def test_the_data_of_one_node_is_never_seen_by_another():
    batches, lengths = draw(400)
    seen = [set(np.concatenate([b.rows[node].ravel() for b in batches])) for node in range(3)]
    assert not seen[0] & seen[1] | seen[0] & seen[2] | seen[1] & seen[2]
    assert set.union(*seen) == set(range(len(lengths)))


def test_all_examples_are_seen_about_equally_often():
    """A bucket is drawn as often as it has batches: 20 epochs of each, up to the draws."""
    batches, lengths = draw(2000)
    counts = np.bincount(np.concatenate([b.rows.ravel() for b in batches]))
    by_width = [counts[(lengths > width // 2) & (lengths <= width)].mean() for width in (16, 32)]
    np.testing.assert_allclose(by_width, counts.mean(), rtol=0.15)


def test_batches_do_not_depend_on_the_process_that_asks():
    batches, _ = draw(20)
    again, _ = draw(20)
    of_two, _ = draw(20, wanted=[2, 0])
    others, _ = draw(20, seed=1)
    for batch, same, part in zip(batches, again, of_two, strict=True):
        assert batch.width == same.width == part.width
        np.testing.assert_array_equal(batch.rows, same.rows)
        np.testing.assert_array_equal(batch.rows[[2, 0]], part.rows)
    assert [b.width for b in batches] != [b.width for b in others]
