"""What users and others give that cannot be: arguments, metadata, and edited files."""

import json
import math
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

STATE = {"a": jnp.arange(3.0)}
NODES = gx.Nodes(2)


def make_tx(metadata):
    return optax.chain(optax.sgd(0.1), gx.allreduce())


def open_wrongly(folder: Any, **arguments: Any):
    return Checkpoints(folder, **arguments)


class TestArguments:
    @pytest.mark.parametrize("folder", ["", None, 3, True, b"runs", ["runs"], "a\0b"])
    def test_a_folder_that_is_no_path(self, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=r"^folder must be the path of a folder, got"):
            open_wrongly(folder)
        start = TrainState(0, *NODES.init(make_tx({}), jnp.ones(3)))
        with Checkpoints(tmp_path / "run") as checkpoints:
            if folder is not None:
                with pytest.raises(ValueError, match=r"^init_from must be the path of a folder"):
                    checkpoints.resume(start, NODES, make_tx, init_from=folder)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    @pytest.mark.parametrize("name", ["every", "max_to_keep"])
    @pytest.mark.parametrize("value", [0, -1, 2.5, 2.0, True, "3", math.nan, [1]])
    def test_numbers_of_steps_and_checkpoints(self, name, value, tmp_path):
        with pytest.raises(ValueError, match=rf"^{name}.* must be an integer >= 1, got "):
            open_wrongly(tmp_path / "new", **{name: value})
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("timeout", [0, -1, True, None, "60", math.nan, math.inf, 1e30])
    def test_a_timeout_that_is_no_time(self, timeout, tmp_path):
        with pytest.raises(ValueError, match=r"^timeout must be a number of seconds > 0 and <= "):
            open_wrongly(tmp_path / "new", timeout=timeout)
        assert not (tmp_path / "new").exists()

    def test_read_only(self, tmp_path):
        with pytest.raises(ValueError, match=r"^read_only must be True or False, got 1"):
            open_wrongly(tmp_path, read_only=1)
        with pytest.raises(ValueError, match=r"^every must be None with read_only=True, got 5"):
            Checkpoints(tmp_path, every=5, read_only=True)

    @pytest.mark.parametrize("step", [-1, 1.0, 1.5, True, "1", None, 2**63, np.float32(1)])
    def test_a_step_that_is_no_integer(self, step: Any, tmp_path):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, STATE, {})
            with pytest.raises(ValueError, match=r"^step must be an integer [<>]= "):
                checkpoints.save(step, STATE, {})
            if step is not None:
                with pytest.raises(ValueError, match=r"^step must be an integer [<>]= "):
                    checkpoints.restore(STATE, step)
            assert checkpoints.wait() == [1]


class TestMetadata:
    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"position": np.ones(2)}, r"metadata\['position'\] must be what JSON can hold"),
            ({"a": {"b": [0, {1}]}}, r"metadata\['a'\]\['b'\]\[1\] must be .* got a set: {1}"),
            ({"n": np.int64(3)}, r"metadata\['n'\] must be what JSON can hold .* got an int64"),
            ({"f": Path("x")}, r"metadata\['f'\] must be what JSON can hold"),
            ({"f": b"x"}, r"metadata\['f'\] must be what JSON can hold"),
            ({"f": 1j}, r"metadata\['f'\] must be what JSON can hold"),
            ({"f": print}, r"metadata\['f'\] must be what JSON can hold"),
            ({"a": {1: 2}}, r"keys of metadata\['a'\] must be strings, .* got an int: 1"),
            ({None: 2}, "the keys of metadata must be strings"),
            (None, "metadata must be a dict, got a NoneType: None"),
            ([1], r"metadata must be a dict, got a list: \[1\]"),
            ("text", "metadata must be a dict, got a str"),
        ],
    )
    def test_that_json_cannot_hold(self, metadata, message, tmp_path):
        with Checkpoints(tmp_path) as checkpoints:
            with pytest.raises(ValueError, match=message):
                checkpoints.save(1, STATE, metadata)
            assert checkpoints.wait() == []

    def test_that_contains_itself(self, tmp_path):
        metadata: dict[str, Any] = {}
        metadata["me"] = metadata
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(ValueError, match="metadata must be nested at most 100 deep"),
        ):
            checkpoints.save(1, STATE, metadata)

    def test_of_a_training_state(self, tmp_path):
        params, opt_state = NODES.init(make_tx({}), jnp.ones(3))
        metadata: Any = ["epoch"]
        with (
            Checkpoints(tmp_path, every=1) as checkpoints,
            pytest.raises(ValueError, match=r"metadata must be a dict, got a list"),
        ):
            checkpoints.after(TrainState(1, params, opt_state, metadata=metadata))

    def test_comes_back_as_it_was(self, tmp_path):
        metadata = {
            "text": 'ü "\ud800',
            "numbers": [1, 2.5, -0.0, 10**30, True, None, math.inf],
            "dicts": OrderedDict(a={}, b=[]),
        }
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, STATE, metadata)
            restored = checkpoints.restore(STATE)
        assert restored is not None
        assert restored.metadata == metadata
        assert math.isinf(restored.metadata["numbers"][-1])

    @pytest.mark.parametrize("nodes", ["two", 0, 1.5, None, True, [2]])
    def test_a_number_of_nodes_that_is_none(self, nodes, tmp_path):
        """`save` takes it; `resume`, which needs it, says so."""
        start = TrainState(0, *NODES.init(make_tx({}), jnp.ones(3)))
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, start.arrays, {"nodes": nodes})
            with pytest.raises(ValueError, match=r'metadata\["nodes"\], as saved, must be an int'):
                checkpoints.resume(start, NODES, make_tx)


def sign(manifest):
    """As a hostile editor would: with the right checksum."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    return json.dumps({"json": text, "checksum": zlib.crc32(text.encode())}).encode()


SPEC = ["['a']", [3], "float32"]
GOOD = {"step": 2, "leaves": [SPEC], "checksum": 0, "metadata": {}}


def sign_without(name):
    return sign({key: value for key, value in GOOD.items() if key != name})


MANIFESTS = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe{}",
    "not JSON": b"{",
    "deep": b"[" * 100_000,
    "null": b"null",
    "a list": b"[]",
    "a number": b"3",
    "no keys": b"{}",
    "text is null": b'{"json": null, "checksum": 0}',
    "text is a list": b'{"json": [], "checksum": 0}',
    "checksum is text": b'{"json": "{}", "checksum": "x"}',
    "surrogates": b'{"json": "\\ud800", "checksum": 3}',
    "inside not JSON": sign("{"),
    "inside null": sign(None),
    "inside a list": sign([]),
    "step missing": sign_without("step"),
    "step null": sign(GOOD | {"step": None}),
    "leaves missing": sign_without("leaves"),
    "leaves null": sign(GOOD | {"leaves": None}),
    "leaves of text": sign(GOOD | {"leaves": ["abc"]}),
    "a leaf too short": sign(GOOD | {"leaves": [SPEC[:2]]}),
    "a shape of text": sign(GOOD | {"leaves": [["['a']", ["3"], "float64"]]}),
    "checksum missing": sign_without("checksum"),
    "checksum null": sign(GOOD | {"checksum": None}),
    "another checksum": sign(GOOD),
    "metadata missing": sign_without("metadata"),
    "metadata a list": sign(GOOD | {"metadata": []}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {"step": step})
    return folder


def copy_tree(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())


class TestEditedFiles:
    @pytest.mark.parametrize("kind", MANIFESTS)
    def test_the_manifest(self, kind, saved, tmp_path):
        copy_tree(saved, tmp_path)
        (tmp_path / "2" / "manifest" / "metadata").write_bytes(MANIFESTS[kind])
        with Checkpoints(tmp_path) as checkpoints:
            with pytest.warns(UserWarning, match=r"step 2 .* is damaged .* took that of step 1"):
                restored = checkpoints.restore(STATE)
            assert restored is not None
            assert restored.metadata == {"step": 1}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.corrupted"]

    def test_the_manifest_of_an_earlier_version(self, saved, tmp_path):
        """Its checksum does not see all damage. It is refused by name, and nothing is renamed."""
        copy_tree(saved, tmp_path)
        for step in ("1", "2"):
            (tmp_path / step / "manifest" / "metadata").write_bytes(sign_without("step"))
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(OSError, match="step 2: an earlier version of gossipjax wrote it, whose"),
        ):
            checkpoints.restore(STATE)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]

    # A read by orbax continues for a moment after it has failed, and complains of a closed loop.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.filterwarnings("default:.*is damaged")
    @pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"null", b"{}", b'{"metrics": 3}'])
    @pytest.mark.parametrize(
        "name", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/array_metadatas/process_0"]
    )
    def test_files_of_orbax(self, name, content, saved, tmp_path):
        """All is well, or the checkpoint before is taken; the run saves again in both cases."""
        copy_tree(saved, tmp_path)
        for step in (1, 2) if name == "_CHECKPOINT_METADATA" else (2,):
            (tmp_path / str(step) / name).write_bytes(content)
        with Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(STATE)
            assert restored is not None
            assert restored.state["a"].tolist() == STATE["a"].tolist()
            checkpoints.save(3, STATE, {})
            assert checkpoints.wait()[-1] == 3

    def test_other_names_in_the_folder(self, saved, tmp_path):
        copy_tree(saved, tmp_path)
        for name in ("007", "-3", "0x5", "1_0", "٣", "3.tmp", "notes"):
            (tmp_path / name).mkdir()
        (tmp_path / "9").write_text("a file")
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.wait() == [1, 2]
            assert checkpoints.restore(STATE) is not None
            checkpoints.save(4, STATE, {})
            assert checkpoints.wait() == [1, 2, 4]
