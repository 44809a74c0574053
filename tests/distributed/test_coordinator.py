"""How the coordinator of an elastic run is started; tests/multiprocess has runs with it."""

import os
import subprocess
import sys

import pytest

from jaxche.distributed import start_coordinator


def test_it_imports_what_its_starter_does_also_from_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(sys, "path", ["", "packages", "/elsewhere"])

    def started(*_, env, **__):
        assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), str(tmp_path / "packages"), "/elsewhere"]
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(InterruptedError):
        start_coordinator("127.0.0.1:1", 2)
