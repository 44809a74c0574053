"""A job of Slurm, and pages without pictures."""

import pytest


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without pictures, which take most of the time."""
    monkeypatch.setattr("jaxche.cli._report._svg", lambda history: "<svg></svg>")


@pytest.fixture
def under_slurm(monkeypatch):
    """This process is the second of two tasks in a job of Slurm."""
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "a,b", "PROCID": "1", "NTASKS": "2", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
