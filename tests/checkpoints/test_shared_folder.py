"""Which folder is one for all, seen from one process; tests/multiprocess has processes with one each."""

import pytest

from jaxche.checkpoints import _shared_folder, shared_folder
from jaxche.distributed import Group


def test_it_is_made_and_left_clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shared_folder(Group(), "runs/first")
    assert folder == tmp_path / "runs" / "first"
    assert list(folder.iterdir()) == []
    assert shared_folder(Group(), folder) == folder


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/run' cannot be written"):
        shared_folder(Group(), tmp_path / "file" / "run")


@pytest.fixture
def second(monkeypatch):
    """This process as the second of a run whose first leaves no sign here, or one after so many looks."""

    def be(folder, looks=None):
        monkeypatch.setattr(Group, "members", (1, 0))
        monkeypatch.setattr(Group, "broadcast", lambda self, value: "abc")
        monkeypatch.setattr(_shared_folder, "_VISIBLE_S", 0.1 if looks is None else 60.0)
        seen = []

        def sleep(seconds):
            seen.append(seconds)
            if len(seen) == looks:
                (folder / ".shared-abc").touch()

        monkeypatch.setattr(_shared_folder.time, "sleep", sleep)
        return seen

    return be


def test_another_machine_s_folder_of_that_name_is_refused(tmp_path, second):
    second(tmp_path)
    with pytest.raises(ValueError, match="is not the folder that process 1 has under that name; give one that all"):
        shared_folder(Group(), tmp_path)


def test_a_file_server_may_show_a_file_late(tmp_path, second):
    seen = second(tmp_path, looks=3)
    assert shared_folder(Group(), tmp_path) == tmp_path
    assert len(seen) == 3


def test_the_others_do_not_wait_for_a_process_that_cannot_read_the_folder(tmp_path, second, monkeypatch):
    second(tmp_path)
    reports = []
    monkeypatch.setattr(Group, "all_gather", lambda self, value, place="": reports.append(value) or [value])

    def stale(folder):
        raise OSError("Stale file handle")

    monkeypatch.setattr(_shared_folder.os, "listdir", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        shared_folder(Group(), tmp_path)
    assert reports[-1]["message"] == "Stale file handle"
