"""`--report-to`: TensorBoard's event files are read back."""

import math
import struct
import sys

import pytest
from report_files import read_run
from tensorboardX.proto import event_pb2

from experiments import image
from experiments.training.trainer import Trainer

Event = vars(event_pb2)["Event"]  # made when it is imported
SHORT = ("--model", "linear", "--epochs", "2", "--nodes", "2", "--log-every", "20")
SHORT += ("--batch-size-per-node", "100")


@pytest.fixture(autouse=True)
def small_program(monkeypatch):
    monkeypatch.setattr("experiments.plots.write_report", lambda *_: None)


def read_events(folder):
    """All events of a folder, in the order in which they were written."""
    events = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:  # a record: length, its checksum, an event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def read_scalars(folder):
    """Step and name -> value, without what was replaced when the run was resumed."""
    scalars: dict[tuple[int, str], float] = {}
    for event in read_events(folder):
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            scalars = {key: value for key, value in scalars.items() if key[0] < event.step}
        for value in event.summary.value:
            if not value.HasField("tensor"):
                scalars[event.step, value.tag] = value.simple_value
    return scalars


def read_lines(out, run):
    return {
        (line["step"], name): value
        for line in read_run(out)[1]
        if line["run"] == run
        for name, value in line.items()
        if name not in ("run", "step")
    }


def require_same(scalars, lines):
    assert scalars.keys() == lines.keys()
    for key, value in lines.items():
        assert math.isclose(scalars[key], value, rel_tol=1e-6), key


def test_tensorboard_has_the_lines_of_each_run_and_resumes(tmp_path, monkeypatch):
    given = (*SHORT, "--algorithm", "sgp", "allreduce", "--checkpoint-every", "20")
    given += ("--report-to", "tensorboard", "--out", str(tmp_path))
    run_steps = Trainer.run_steps

    def stop_at_step_25(self, state, batches):
        if state.step >= 25:
            raise OSError("no space left on device")
        return run_steps(self, state, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_steps", stop_at_step_25)
        with pytest.raises(SystemExit):
            image.main(given)
    folder = tmp_path / "tensorboard"
    (name,) = [path.name for path in folder.iterdir()]
    before = read_scalars(folder / name)
    assert before, "written, although the program failed"
    image.main((*given, "--resume"))
    runs = {
        "sgp-one_peer_exponential-seed-0": "sgp, one_peer_exponential, seed 0",
        "allreduce-complete-seed-0": "allreduce, complete, seed 0",
    }
    assert {path.name for path in folder.iterdir()} == runs.keys()
    for folder_name, run in runs.items():
        require_same(read_scalars(folder / folder_name), read_lines(tmp_path, run))
    image.main((*SHORT, "--algorithm", "sgp", "--out", str(tmp_path), "--overwrite"))
    assert not folder.exists()


def test_a_missing_package_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="needs the package tensorboardX, got none: run `pip"):
        image.ImageOptions(report_to="tensorboard")
