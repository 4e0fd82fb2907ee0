"""Programs run in the tests' process, which has its eight CPU devices already."""

import pytest

from experiments.training import placement


@pytest.fixture(scope="module", autouse=True)
def existing_devices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "request_cpu_devices", lambda count: None)
        yield
