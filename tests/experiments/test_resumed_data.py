"""A run is resumed with the data that it was trained on: checked in one place for all tasks."""

import json

import pytest

from experiments.examples import tabular
from experiments.training import placement
from experiments.training.experiment import prepare


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)


def prepare_wines(out, **options):
    options = {"nodes": 2, "out": out, "placement": "vmap"} | options
    return prepare(tabular.Options(**options), tabular.Wines, "tabular")


def test_a_task_of_other_data_is_refused(tmp_path, monkeypatch):
    prepare_wines(tmp_path)
    environment = json.loads((tmp_path / "summary.json").read_text())["environment"]
    assert environment["num_examples"] == 134
    prepare_wines(tmp_path, resume=True, nodes=3)
    measurements, kinds = tabular.wine_data()
    monkeypatch.setattr(tabular, "wine_data", lambda: (measurements[:80], kinds[:80]))
    message = (
        rf"dataset must be that of the run in {tmp_path}, '134 wines, 44 for the test', got "
        r"'60 wines, 20 for the test': give the data of that run"
    )
    with pytest.raises(ValueError, match=message):
        prepare_wines(tmp_path, resume=True)
    monkeypatch.setattr(tabular.Wines, "__init__", describe_alike(tabular.Wines.__init__))
    with pytest.raises(ValueError, match=r"num_examples must be that of .*, 134, got 60: give"):
        prepare_wines(tmp_path, resume=True)
    prepare_wines(tmp_path, overwrite=True)


def describe_alike(make):
    """A task whose description does not tell its data from those of the first run."""

    def make_alike(self, options):
        make(self, options)
        self.description = "134 wines, 44 for the test"

    return make_alike
