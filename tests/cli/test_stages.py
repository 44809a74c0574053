"""`jaxche train --protocol`."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxche
from jaxche.cli import _stages, _tasks, main
from jaxche.cli._main import make_parser
from jaxche.cli._stages import train
from jaxche.cli._tasks import TextStages, text_stages
from jaxche.cluster import ClusterInfo


def parse(*words):
    args = make_parser().parse_args(["train", "--task", "text", *words])
    args.words = ["train", "--task", "text", *words]
    return args


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stages 2", "--stages is for a model in stages; add --task text --protocol pipeline"),
        ("--protocol direct", "--protocol direct is for --task text"),
        ("--task text --protocol pipeline --policy sync", "--policy is for replicas, and --protocol trains one model"),
        ("--task text --protocol pipeline --max-batch-diff 2", "--max-batch-diff is for replicas"),
        ("--task text --protocol store", "--protocol store and --store URL go together"),
        ("--task text --protocol direct --store /tmp/x", "--protocol store and --store URL go together"),
        ("--task text --protocol direct --micro-batch-size 2", "--protocol direct sends whole batches"),
        ("--task text --protocol pipeline --scaling linear", "--scaling is for replicas"),
        ("--task text --protocol pipeline --checkpoint-every 2", "--checkpoint-every is for replicas"),
        ("--task text --protocol pipeline --max-restarts 2", "--max-restarts is for replicas"),
        ("--task text --protocol pipeline --out there", "--out is for replicas"),
        ("--task text --protocol pipeline -n 2", "-n is for replicas"),
    ],
)
def test_refused_words(words, message, capsys):
    assert main(["train", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_processes_and_stages_must_agree(monkeypatch, capsys):
    monkeypatch.setenv("JAXCHE_PROCESS_ID", "0")
    monkeypatch.setenv("JAXCHE_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAXCHE_COORDINATOR", "127.0.0.1:1")
    words = "train --task text --protocol store --store memory://x --stages 2"
    assert main(words.split()) == 2
    assert "3 processes for 2 stages; start one a stage, or write --stages 3" in capsys.readouterr().err


def test_store_starts_a_process_a_stage(monkeypatch):
    calls = []
    monkeypatch.setattr("jaxche.cluster.launch", lambda command, processes, **more: calls.append((command, processes)))
    words = ["train", "--task", "text", "--protocol", "store", "--store", "/tmp/x", "--stages", "3"]
    main(words)
    ((command, processes),) = calls
    assert command[1:] == ["-m", "jaxche", *words]
    assert processes == 3


@pytest.mark.slow
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_stages_share_the_blocks(n_stages):
    task = text_stages(n_stages, 4, seed=0)
    counts = [sum(name.startswith("MultiHead") for name in params) for params in task.params]
    assert counts == {1: [2], 2: [1, 1], 4: [0, 1, 1, 0]}[n_stages]
    assert [("Embed_0" in params, "place" in params) for params in task.params] == [
        (i == 0, i == 0) for i in range(n_stages)
    ]
    x = batch = task.data[0]
    for stage, params in zip(task.stages, task.params, strict=True):
        x = jax.jit(stage)(params, x)
    assert x.shape[:2] == (4, 48)
    assert float(task.loss(x, batch)) == pytest.approx(np.log(x.shape[2]), abs=1.5)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="--stages 5: the transformer has 4 layers; write --stages 4"):
        text_stages(5, 4, seed=0)


@pytest.mark.slow
def test_equal_loss_under_every_protocol(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_tasks, "text_stages", functools.cache(text_stages))
    # The text is that of Python, so the number of its characters, and of parameters, depends on the version.
    params = _tasks.text_stages(2, 4, 0).params
    sizes = ", ".join(f"{sum(x.size for x in jax.tree.leaves(tree)):,}" for tree in params)
    losses = []
    for words in (
        "--protocol direct",
        "--protocol pipeline --micro-batch-size 2",
        f"--protocol store --store {tmp_path}",
    ):
        args = parse(*words.split(), "--batch-size", "4", "--dry-run")
        assert train(args, 2, None) == 0
        first, last = capsys.readouterr().out.splitlines()
        assert first.startswith(f"task text in 2 stages of {sizes} parameters, ")
        losses.append(last.split(" after ")[0])
    assert losses[0].startswith("step 1 of ")
    assert losses[0] == losses[1] == losses[2]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # a later run begins at its first step


def test_incomplete_variables(monkeypatch, capsys):
    monkeypatch.setenv("JAXCHE_PROCESS_ID", "0")
    assert main(["train", "--task", "text", "--protocol", "store", "--store", "memory://x"]) == 2
    assert "JAXCHE_PROCESS_ID=0 without JAXCHE_COORDINATOR and JAXCHE_NUM_PROCESSES" in capsys.readouterr().err


@pytest.mark.usefixtures("under_slurm")
def test_slurm_tasks_are_stages(monkeypatch):
    monkeypatch.setattr("jaxche.cluster.initialize", lambda **_: ClusterInfo(1, 2, "slurm"))
    monkeypatch.setattr("jaxche.cluster.launch", lambda *_, **__: pytest.fail("started processes"))
    trained = []
    monkeypatch.setattr("jaxche.cli._stages.train", lambda args, n_stages, local: trained.append((n_stages, local)))
    main(["train", "--task", "text", "--protocol", "store", "--store", "memory://x"])
    main(["train", "--task", "text", "--protocol", "pipeline"])
    assert trained == [(2, [1]), (2, [1])]


@pytest.mark.parametrize("protocol", ["pipeline", "direct"])
def test_version_mismatch(protocol, monkeypatch, capsys):
    def refuse(**_):
        raise RuntimeError("the processes run other versions")

    monkeypatch.setattr("jaxche.cluster.initialize", refuse)
    assert main(["train", "--task", "text", "--protocol", protocol]) == 2
    assert capsys.readouterr().err == "jaxche train: error: the processes run other versions\n"


def small_stages(n_stages, batch_size, seed):
    """Two stages that guess the next of five characters."""
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 5, (100, 4)).astype(np.uint8)
    stages = [lambda p, window: jax.nn.one_hot(window[:, :-1], 5) @ p["w"], lambda p, x: x @ p["w"]]
    params = [{"w": rng.normal(size=shape).astype(np.float32)} for shape in ((5, 3), (3, 5))]
    return TextStages(stages, params, jaxche.Batches(windows[:10], batch_size, seed), windows[10:])


def test_epochs_of_whole_batches_end_with_an_evaluation_and_are_resumed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_tasks, "text_stages", small_stages)
    words = ("--protocol", "store", "--store", str(tmp_path), "--batch-size", "4")
    assert train(parse(*words, "--epochs", "1"), 2, None) == 0
    first, step, test = capsys.readouterr().out.splitlines()
    assert first.startswith("task text in 2 stages of 15, 15 parameters, ")
    assert step.startswith("step 2 of 2: loss ")  # the last batch of two is left out
    assert test.startswith("test loss ")
    assert train(parse(*words, "--epochs", "2"), 2, None) == 0
    _, resumed, step, _ = capsys.readouterr().out.splitlines()
    assert resumed == "resumed at step 2"
    assert step.startswith("step 4 of 4: loss ")


@pytest.mark.parametrize("words", ["--batch-size 2", "--batch-size 4 --seed 1"])
def test_a_run_is_not_resumed_with_other_data(words, monkeypatch, tmp_path):
    monkeypatch.setattr(_tasks, "text_stages", small_stages)
    store = ("--protocol", "store", "--store", str(tmp_path))
    assert train(parse(*store, "--batch-size", "4", "--epochs", "1"), 2, None) == 0
    with pytest.raises(ValueError, match=r'begun with .*"batch_size": 4, "batches": 2, "seed": 0.* another --store'):
        train(parse(*store, *words.split(), "--epochs", "2"), 2, None)


def test_all_of_the_test_data_is_evaluated():
    task = small_stages(2, 4, 0)
    assert len(task.test) > _stages._TEST_CHUNK
    model = jaxche.Partitioned(task.stages, task.loss, jaxche.Direct())
    loss, accuracy = _stages._evaluate(model, SimpleNamespace(params=task.params), task)
    logits = np.eye(5)[task.test[:, :-1]] @ task.params[0]["w"] @ task.params[1]["w"]
    assert accuracy == pytest.approx(np.mean(logits.argmax(-1) == task.test[:, 1:]))
    chosen = np.take_along_axis(logits, task.test[:, 1:, None].astype(int), -1)[..., 0]
    assert loss == pytest.approx(np.mean(np.log(np.exp(logits).sum(-1)) - chosen), rel=1e-5)


def test_a_single_process_has_a_cpu_device_for_each_stage(monkeypatch):
    trained = []
    monkeypatch.setattr(_stages, "join", lambda: ClusterInfo(0, 1, "none"))
    monkeypatch.setattr(_stages, "train", lambda args, n_stages, local: trained.append((n_stages, local)))
    monkeypatch.setattr(jax.config, "update", lambda name, value: trained.append((name, value)))
    _stages.run_stages(parse("--protocol", "direct", "--stages", "3"), {})
    assert trained == [("jax_num_cpu_devices", 3), (3, None)]
