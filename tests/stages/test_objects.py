"""Objects in memory, in a folder and in a bucket: created once, read whole, taken away without complaint."""

import errno
import sys
import threading
import time

import jax
import numpy as np
import obstore.store
import pytest

from jaxche.stages import _objects as module
from jaxche.stages import _tensors as tensors
from jaxche.stages._buffers import on_device
from jaxche.stages._objects import Objects, open_objects


@pytest.fixture(params=["memory", "folder", "file url", "bucket", "google_bucket"])
def objects(request, tmp_path):
    if "bucket" in request.param:
        options, scheme = request.getfixturevalue(request.param), "gs" if "google" in request.param else "s3"
        return open_objects(f"{scheme}://bucket/some/path", f"run-{request.node.name[:10]}-{time.time_ns()}", options)
    urls = {"memory": f"memory://{tmp_path}", "folder": str(tmp_path / "new"), "file url": f"file://{tmp_path}/new"}
    return open_objects(urls[request.param], "run", {})


def text(found):
    return found and (bytes(found[0]), found[1])


def test_an_object_is_written_read_listed_and_deleted(objects):
    assert objects.read("folder/a", 100) is None
    assert objects.names("folder") == []
    objects.create("folder/b", [b"head", b"", b"body"])
    objects.create("folder/a", [b"x"])
    assert text(objects.read("folder/b", 100)) == (b"headbody", 8)
    assert text(objects.read("folder/b", 5)) == (b"headb", 8)
    assert objects.names("folder") == ["folder/a", "folder/b"]
    objects.delete(["folder/none", "folder/a"])
    assert objects.names("folder") == ["folder/b"]
    objects.delete(["folder/b", "folder/a"])
    objects.delete([])
    assert objects.names("folder") == []


def test_an_object_is_created_once(objects):
    objects.create("a", [b"head", b"body"])
    objects.create("a", [b"head", b"body"])
    with pytest.raises(ValueError, match=r"a in .* was written before with other content: two writers"):
        objects.create("a", [b"HEAD", b"body"])
    assert text(objects.read("a", 100)) == (b"headbody", 8)


def test_an_object_is_replaced_small_or_large(objects, monkeypatch):
    monkeypatch.setattr(module, "_MULTIPART_BYTES", 5 << 20)  # the smallest part that S3 accepts
    for content in (b"one", b"two", bytes(11 << 20)):
        objects.replace("a", [content])
        assert text(objects.read("a", 1 << 30)) == (content, len(content))


def test_a_large_object_outlives_its_file_and_cannot_be_written_to(objects):
    content = b"head" + bytes(range(256)) * 8192
    objects.create("a", [content[:4], content[4:]])
    found, beginning = objects.read("a", 1 << 30), objects.read("a", 1 << 20)
    objects.delete(["a"])
    assert text(found) == (content, len(content))
    assert text(beginning) == (content[: 1 << 20], len(content))
    assert memoryview(found[0]).readonly


def test_only_so_many_files_are_held_open(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_MAPPED", 3)
    folder = open_objects(str(tmp_path), "run", {})
    contents = {str(i): bytes([i]) * (1 << 20) for i in range(5)}
    for key, content in contents.items():
        folder.create(key, [content])
    found = {key: folder.read(key, 1 << 30) for key in contents}
    assert len(folder._mapped) == 3
    folder.delete(list(contents))
    assert {key: bytes(there[0]) for key, there in found.items()} == contents
    del found
    assert len(folder._mapped) == 0


def test_a_program_may_be_given_what_came_from_a_file_to_write_into(tmp_path):
    folder, array = open_objects(str(tmp_path), "run", {}), np.arange(1 << 19, dtype=np.float32)
    folder.create("a", tensors.encode(array))
    before = (tmp_path / "run" / "a").read_bytes()
    found = on_device(tensors.decode(*folder.read("a", 1 << 30), array, "a"), jax.devices()[0])
    assert len(folder._mapped) == 1
    np.testing.assert_array_equal(jax.jit(lambda x: 2 * x + 1, donate_argnums=0)(found), 2 * array + 1)
    assert (tmp_path / "run" / "a").read_bytes() == before


def test_a_file_system_without_maps_is_read(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.ENODEV, "No such device")

    folder = open_objects(str(tmp_path), "run", {})
    folder.create("a", [bytes(1 << 20)])
    monkeypatch.setattr(module.mmap, "mmap", refuse)
    assert text(folder.read("a", 1 << 30)) == (bytes(1 << 20), 1 << 20)


def test_processes_agree_or_learn_that_they_do_not(objects):
    objects.agree("plan", "4 stages")
    objects.agree("plan", "4 stages")
    with pytest.raises(ValueError, match="begun with 4 stages, this process has 5 stages"):
        objects.agree("plan", "5 stages")


def test_waiting_ends_with_the_object_and_grows_in_between():
    objects, naps = Objects(obstore.store.MemoryStore(), "memory://", "run"), []

    def pause(seconds):
        naps.append(seconds)
        if len(naps) == 160:
            objects.create("late", [b"here"])

    assert text(objects.wait("late", 10, 60, pause)) == (b"here", 4)
    assert len(naps) == 160
    assert naps[:3] == pytest.approx([0.00005, 0.0000525, 0.000055125])
    assert naps[-1] == 0.1
    with pytest.raises(TimeoutError):
        objects.wait("never", 10, 0, pause)


def test_a_long_wait_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "_LATE_S", -1.0)
    objects = Objects(obstore.store.MemoryStore(), "memory://", "run")
    naps = [1, 2, 3]
    with pytest.raises(IndexError):
        objects.wait("never", 10, 60, lambda seconds: naps.pop())
    assert caplog.messages == ["still waiting for never in memory:// (run run), for up to 60 s"]


def test_of_many_writers_one_wins(objects):
    outcomes = []

    def write(content):
        try:
            objects.create("a", [content])
            outcomes.append(content)
        except ValueError:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(b"%d" % i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [content for content in outcomes if content is not None]
    assert len(won) == 1
    assert text(objects.read("a", 10)) == (won[0], 1)


def test_credentials_come_from_the_environment(bucket, monkeypatch):
    for name in ("access_key_id", "secret_access_key", "endpoint", "region"):
        monkeypatch.setenv(f"AWS_{name.upper()}", bucket[name])
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    objects = open_objects("s3://bucket", "from-environment", {})
    objects.create("a", [b"x"])
    assert text(objects.read("a", 10)) == (b"x", 1)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("/proc/nowhere", {}, "cannot use /proc/nowhere: making the folder failed"),
        ("s3://none-such", "bucket", "cannot use s3://none-such: writing run/probe-.* failed"),
        ("s3://bucket", {"endpoint": "http://127.0.0.1:9"}, "cannot use s3://bucket: writing run/probe-.* failed"),
        ("http://127.0.0.1:9/x", {}, "writing run/probe-.* failed"),
    ],
)
def test_a_store_that_cannot_be_used_fails_at_start(url, options, message, request, bucket):
    options = bucket if options == "bucket" else {**bucket, **options} if options else {}
    with pytest.raises(ConnectionError, match=message):
        open_objects(url, "run", options)


def test_partially_written_files_are_removed(objects, tmp_path):
    objects.create("folder/mine", [b"x"])
    objects.create("folder/yours", [b"x"])
    torn = [tmp_path / "new" / "run" / "folder" / name for name in ("mine#1", "mine#12", "yours#1")]
    if torn[0].parent.exists():
        for path in torn:
            path.write_bytes(b"half")
    objects.remove_partial(lambda key: key == "folder/mine")
    assert objects.names("folder") == ["folder/mine", "folder/yours"]
    if torn[0].parent.exists():
        assert [path.exists() for path in torn] == [False, False, True]


def test_what_a_network_file_system_keeps_of_a_deleted_file_is_no_object(tmp_path):
    objects = open_objects(str(tmp_path), "run", {})
    objects.create("folder/a", [b"x"])
    (tmp_path / "run" / "folder" / ".nfs000000000001").write_bytes(b"x")
    assert objects.names("folder") == ["folder/a"]


@pytest.mark.parametrize(("url", "options"), [("ftp://x", {}), ("s3://", {}), ("s3://bucket", {"colour": "red"})])
def test_what_names_no_store_is_refused(url, options):
    with pytest.raises(ValueError, match=r'names no store .*"s3://bucket/path"'):
        open_objects(url, "run", options)


class Careless:
    """A store that overwrites what it was told to create, as some servers do."""

    def __init__(self):
        self._store = obstore.store.MemoryStore()

    def put(self, path, file, mode=None, **options):
        return self._store.put(path, file, **options)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_a_store_without_conditional_writes_is_refused(monkeypatch):
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **options: Careless())
    with pytest.raises(ConnectionError, match="ignores conditional writes"):
        open_objects("s3://careless", "run", {})


@pytest.mark.parametrize("name", ["obstore.store", "xxhash"])
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "jaxche\[store\]"'):
        open_objects("/tmp", "run", {})


def test_errors_of_the_store_say_what_was_tried(bucket):
    store = obstore.store.S3Store(
        "bucket", **{**bucket, "endpoint": "http://127.0.0.1:9"}, retry_config={"max_retries": 0}
    )
    objects = Objects(store, "s3://bucket", "run")
    for action, message in [
        (lambda: objects.read("a", 1), "reading a"),
        (lambda: objects.create("a", [b""]), "writing a"),
        (lambda: objects.delete(["a"]), "deleting run/a"),
        (lambda: objects.names("a"), "listing a"),
    ]:
        with pytest.raises(ConnectionError, match=message + r" in s3://bucket \(run run\) failed"):
            action()
