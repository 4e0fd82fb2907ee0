"""A process that is outside of any job."""

import os

import pytest

from gossipjax.launch import _initialize

JOBS = ("GOSSIPJAX_", "JAX_NUM_", "JAX_PROCESS_", "JAX_COORD", "JAX_LOCAL_", "SLURM_", "OMPI_")


@pytest.fixture
def fresh_process(monkeypatch):
    """Returns the monkeypatch of a process that has not been initialized, outside of any job."""
    monkeypatch.setattr(_initialize, "_initialized", None)
    for name in list(os.environ):
        if name.startswith(JOBS):
            monkeypatch.delenv(name)
    return monkeypatch
