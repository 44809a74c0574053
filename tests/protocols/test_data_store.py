"""DataStore is a value; its wires go through any store, and stages trained through it are the whole model."""

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
    sender.close()
    receiver = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path), local_stages=[1])
    with pytest.raises(ValueError, match=r"from-stage-000 .* float32\[12, 5\] where .* float32\[12, 6\] is expected"):
        receiver.value_and_grad(model.params, model.batch)


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
