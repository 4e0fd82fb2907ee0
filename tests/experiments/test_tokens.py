"""Tokenizers and packed texts."""

import gzip
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from damaged_records import BrokenSource
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data import DataError
from experiments.data import texts as texts_module
from experiments.data.texts import FILES, PYTHON_DOCS, read_texts
from experiments.data.tokenizer import (
    END_ID,
    SPECIAL_TOKENS,
    encode,
    load_tokenizer,
    make_tokenizer,
    require_same_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from experiments.data.tokens import NO_TOKEN, join_documents, pack

TEXTS = ["low lower lowest", "new newer newest", "wide wider widest", "Straße, naïve, 東京"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocabulary_size=290)


def make_options(**options: Any) -> Any:
    """Those of a program that decide on its tokenizer."""
    defaults = {"tokenizer": None, "vocabulary_size": None, "resume": False, "out": None}
    return SimpleNamespace(**defaults | {"run_folders": []} | options)


class TestTokenizer:
    @given(st.text())
    @settings(max_examples=50, deadline=None)
    def test_decodes_what_it_encoded(self, tokenizer, text):
        (ids,) = encode(tokenizer, [text])
        assert tokenizer.decode(ids.tolist()) == text

    @pytest.mark.parametrize("text", [*SPECIAL_TOKENS, "a<|end|>b", "\r\n\t  x ", "\x00", ""])
    def test_a_text_holds_no_special_tokens(self, tokenizer, text):
        (ids,) = encode(tokenizer, [text])
        assert (ids >= len(SPECIAL_TOKENS)).all()
        assert tokenizer.decode(ids.tolist()) == text

    def test_is_the_same_for_the_same_texts(self):
        texts = list(read_texts(PYTHON_DOCS, None, "test"))[:5]
        first, second = (train_tokenizer(iter(texts), 1000).to_str() for _ in range(2))
        assert first == second

    def test_is_saved_and_loaded(self, tokenizer, tmp_path):
        path = tmp_path / "tokenizer.json"
        save_tokenizer(tokenizer, path)
        loaded = load_tokenizer(path)
        assert loaded.to_str() == tokenizer.to_str()
        text = "a lower <|end|>"
        assert loaded.encode(text).ids == tokenizer.encode(text).ids
        require_same_tokenizer(loaded, path)
        assert list(tmp_path.iterdir()) == [path]

    def test_a_file_of_another_size_than_asked_for_is_refused(self, tokenizer, tmp_path):
        path = tmp_path / "tokenizer.json"
        save_tokenizer(tokenizer, path)
        for size in (None, 290):
            options = make_options(tokenizer=path, vocabulary_size=size)
            assert make_tokenizer(options, [], 270).get_vocab_size() == 290
        options = make_options(tokenizer=path, vocabulary_size=280)
        message = rf"--tokenizer must be a file of 280 tokens.* got {path} with 290: pass"
        with pytest.raises(DataError, match=message):
            make_tokenizer(options, [], 270)
        options.tokenizer = None
        assert make_tokenizer(options, TEXTS, 270).get_vocab_size() == 280
        options.vocabulary_size = None
        assert make_tokenizer(options, TEXTS, 270).get_vocab_size() == 270

    def test_a_run_that_is_resumed_has_its_own(self, tokenizer, tmp_path):
        path = tmp_path / "tokenizer.json"
        of_a_run = {"out": tmp_path, "run_folders": [tmp_path], "resume": True}
        options = make_options(vocabulary_size=280, **of_a_run)
        assert make_tokenizer(options, TEXTS, 270).get_vocab_size() == 280  # none was saved
        save_tokenizer(tokenizer, path)
        resumed = make_tokenizer(options, [], 270)  # has fewer tokens than asked for, or more
        assert resumed.to_str() == tokenizer.to_str()
        other = tmp_path / "other.json"
        save_tokenizer(train_tokenizer(TEXTS, 280), other)
        with pytest.raises(DataError, match=rf"must be that of the saved run, {path}"):
            make_tokenizer(make_options(tokenizer=other, **of_a_run), TEXTS, 270)

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
    def test_a_file_that_holds_none_is_refused(self, tmp_path, content):
        path = tmp_path / "tokenizer.json"
        path.write_bytes(content)
        with pytest.raises(DataError, match="must be the JSON file of a tokenizer"):
            load_tokenizer(path)

    def test_a_tokenizer_of_others_is_refused(self, tokenizer, tmp_path):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_str().replace("<|end|>", "</s>"))
        with pytest.raises(DataError, match=r"special tokens .*got .*null"):
            load_tokenizer(path)


class TestPacking:
    @given(st.lists(st.lists(st.integers(3, 9), max_size=9), max_size=9), st.integers(1, 7))
    @settings(deadline=None)
    def test_drops_and_repeats_nothing(self, documents, length):
        rows = pack((np.array(document, np.int32) for document in documents), length)
        tokens = rows[rows != NO_TOKEN]
        assert tokens.tolist() == [token for document in documents for token in [*document, END_ID]]
        assert rows.dtype == np.int32
        assert rows.shape == (-(-len(tokens) // length), length)
        assert (rows[:-1] != NO_TOKEN).all()
        assert (rows.ravel()[len(tokens) :] == NO_TOKEN).all()

    def test_keeps_no_object_per_document(self):
        """A generator of 100,000 documents: 2 arrays of 96 bytes or more each would be 19 MB."""
        documents = (np.array([number], np.int32) for number in range(100_000))
        tracemalloc.start()
        ids, starts = join_documents(documents)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert ids.dtype == np.int32
        assert ids.reshape(-1, 2)[:, 0].tolist() == list(range(100_000))
        assert starts.tolist() == list(range(0, 200_001, 2))
        assert peak < 4_000_000


def write_files(folder):
    (folder / "train.1.txt").write_text("one\n\n  \ntwo \u2028 2\r\n")
    (folder / "train.2.txt.gz").write_bytes(gzip.compress(b"drei", mtime=0))
    (folder / "train.md").write_text("not read")
    (folder / "test.tsv").write_text("yes\tja\nno\tnein\n")
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a set of texts that TensorFlow Datasets prepared."""

    class TinyBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "tiny_text"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "label": np.int64}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples("ab"), "validation": iter([(0, EXAMPLE)])}

        def _generate_examples(self, texts):
            for key, text in enumerate(texts):
                yield key, {"text": text, "label": 0}

    folder = tmp_path_factory.mktemp("prepared")
    builder = TinyBuilder(data_dir=folder, file_format="array_record")
    builder.download_and_prepare()
    return folder


EXAMPLE = {"text": "größer", "label": 1}


class TestReading:
    def test_lines_of_files(self, tmp_path):
        write_files(tmp_path)
        assert list(read_texts(FILES, tmp_path, "train")) == ["one", "two \u2028 2", "drei"]
        assert list(read_texts(FILES, tmp_path, "test")) == ["yes\tja", "no\tnein"]
        assert list(read_texts(FILES, tmp_path, "test", column=2)) == ["ja", "nein"]

    def test_the_reference_of_python(self):
        train, test = (set(read_texts(PYTHON_DOCS, None, split)) for split in ("train", "test"))
        assert not train & test
        assert len(train) > 5 * len(test) > 20

    def test_a_prepared_set(self, prepared):
        assert sorted(read_texts("tiny_text", prepared, "train")) == ["a", "b"]
        assert list(read_texts("tiny_text/1.0.0", prepared, "test")) == ["größer"]

    def test_a_prepared_set_without_the_feature(self, prepared):
        message = "--text-feature must be a feature of tiny_text .* got label.* label, text"
        with pytest.raises(DataError, match=message):
            list(read_texts("tiny_text", prepared, "train", feature="label"))

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (
                BrokenSource([{"text": b"a"}] * 3, 2),
                "example 2 of train in .*got cut short: repair",
            ),
            ([{"text": b"a"}, {"text": b"\xff"}], "example 1 of train in .*got 'utf-8' codec"),
        ],
    )
    def test_a_prepared_set_of_which_an_example_is_corrupt(
        self, prepared, monkeypatch, source, message
    ):
        monkeypatch.setattr(texts_module, "open_splits", lambda *_: [source])
        texts = read_texts("tiny_text", prepared, "train")
        assert next(texts) == "a"
        with pytest.raises(DataError, match=message):
            list(texts)
