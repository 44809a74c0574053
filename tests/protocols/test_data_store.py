"""DataStore is a value; its wires go through any store, and stages trained through it are the whole model."""

import threading

import jax.numpy as jnp
import optax
import pytest

import jaxche


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": ""}, r"url=''.*DataStore\(\"/shared/run\"\)"),
        ({"url": 3}, "url=3"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"schedule": "fast"}, "schedule='fast'"),
        ({"run": "a/b"}, "run='a/b'.*run='run-2'"),
        ({"run": "../x"}, "run="),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"save_every": 0}, "save_every=0.*write save_every=1"),
        ({"save_every": True}, "save_every=True"),
        ({"options": "region"}, "options is a str"),
    ],
)
def test_bad_arguments_are_refused_with_the_line_to_write(arguments, message):
    with pytest.raises(ValueError, match=message):
        jaxche.DataStore(**{"url": "/shared/run", **arguments})


def test_it_is_a_value_that_keeps_its_secrets(tmp_path):
    assert jaxche.DataStore(tmp_path) == jaxche.DataStore(str(tmp_path))
    assert "hush" not in repr(jaxche.DataStore("s3://bucket", options={"secret_access_key": "hush"}))


@pytest.fixture(params=["memory", "folder", "bucket", "google_bucket"])
def protocol(request, tmp_path):
    urls = {"memory": f"memory://{tmp_path}", "folder": tmp_path, "bucket": f"s3://bucket/{tmp_path.name}"}
    urls["google_bucket"] = f"gs://bucket/{tmp_path.name}"
    options = request.getfixturevalue(request.param) if "bucket" in request.param else {}
    return jaxche.DataStore(urls[request.param], micro_batch_size=3, timeout_s=60, options=options)


@pytest.mark.slow
def test_steps_through_any_store_go_on_where_they_ended(protocol, make_model, twin, close):
    model, tx = make_model("trees", 2), optax.adam(0.05)
    params, opt_state = model.params, tx.init(model.params)
    for life in range(2):
        partitioned = jaxche.Partitioned(model.stages, model.loss, protocol)
        state = partitioned.init(model.params, tx)
        assert state.step == 2 * life
        for _ in range(2):
            state, loss = partitioned.step(state, model.batch)
            wanted, grads = twin(model, params, model.batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            close(loss, wanted)
        partitioned.close()
    close(list(state.params), params)


def test_a_run_is_cut_alike_by_all_its_processes(tmp_path, make_model, devices):
    model = make_model()
    whole = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    with pytest.raises(ValueError, match=r'"micro_batch_size": null.* this process has .*"micro_batch_size": 4'):
        jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path, micro_batch_size=4))
    whole.value_and_grad(model.params, model.batch)
    whole.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # and of gradients nothing is left
    jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path, micro_batch_size=4)).close()


def test_activations_a_stage_does_not_expect_are_refused(tmp_path, make_model, devices):
    # Two processes that run different code: this one's stage 1 expects what stage 0 of the other does not send.
    model = make_model()
    sender = jaxche.DataStore(tmp_path).wire([0], 2, devices)
    sender.send(jaxche.protocols.Tag(0, 0, "forward", 0), jnp.zeros((12, 5)))
    receiver = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path), local_stages=[1])
    with pytest.raises(ValueError, match=r"from-stage-000 .* float32\[12, 5\] where .* float32\[12, 6\] is expected"):
        receiver.value_and_grad(model.params, model.batch)
    sender.close()


def test_parameters_are_kept_bit_for_bit(tmp_path, make_model, same):
    model = make_model()
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    state = partitioned.init(model.params, optax.adam(0.1))
    state, _ = partitioned.step(state, model.batch)
    partitioned.close()
    again = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    found = again.init(model.params, optax.adam(0.1))
    same(found, state)
    again.close()


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_what_an_earlier_run_left_is_never_trained_on(tmp_path, make_model, twin, close, devices, until, order):
    model, forward, protocol = make_model(), jaxche.protocols.Tag(0, 0, "forward", 0), jaxche.DataStore(tmp_path)
    # The stages of an earlier run of the same name ended when the first had sent what the second had not yet read.
    killed = [protocol.wire([stage], 2, devices) for stage in range(2)]
    activations = model.stages[0](model.params[0], model.batch)
    killed[0].send(forward, 10 * activations)
    killed[1].receive(forward, activations, devices[1])
    old = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("from-stage-000" in path.name for path in old)
    results = {}

    def run(stage):
        made = jaxche.Partitioned(
            model.stages, model.loss, protocol, local_stages=[stage], devices=devices[stage : stage + 1]
        )
        results[stage] = made.value_and_grad(model.params, model.batch)
        made.close()

    threads = {stage: threading.Thread(target=run, args=(stage,)) for stage in order}
    threads[order[0]].start()
    hello = tmp_path / "run" / f"stage-00{order[0]}-hello"
    assert until(lambda: hello.read_bytes() != old[hello])  # it has begun, and looks for what it is to read
    threads[order[1]].start()
    for thread in threads.values():
        thread.join()
    loss, grads = twin(model, model.params, model.batch)
    for stage in range(2):
        close(results[stage][0], loss)
        close(results[stage][1][stage], grads[stage])
    for wire in killed:
        wire.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_was_sent_before_the_others_came_arrives_and_is_dropped_where_nobody_came(tmp_path, devices):
    protocol, forward = jaxche.DataStore(tmp_path, timeout_s=60), jaxche.protocols.Tag(0, 0, "forward", 0)
    first = protocol.wire([0], 2, devices)
    first.send(forward, jnp.ones(3))
    second = protocol.wire([1], 2, devices)
    assert second.receive(forward, jnp.ones(3), devices[1]).tolist() == [1, 1, 1]
    second.finish(0)
    first.finish(0)
    second.close()
    first.close()
    alone = protocol.wire([0], 2, devices)
    alone.send(forward, jnp.ones(3))
    alone.close()
    assert not [path for path in tmp_path.rglob("*") if "from-stage" in path.name]


def test_stages_that_nobody_holds_are_named(tmp_path, devices):
    wire = jaxche.DataStore(tmp_path, timeout_s=0.1).wire([1], 3, devices)
    with pytest.raises(TimeoutError, match=r"waited 0.1 s for the process of stage 0, 2 in .* \(run run\)"):
        wire.receive(jaxche.protocols.Tag(0, 0, "forward", 0), jnp.ones(3), devices[1])
    wire.close()
