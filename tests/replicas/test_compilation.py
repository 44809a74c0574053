"""One compilation for all devices of a kind."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import compilation_cache, compiler
from jax.experimental import serialize_executable

import jaxche
from jaxche.replicas._compilation import Compilations


@pytest.fixture
def compiled(monkeypatch):
    """The names of the programs that are compiled from now on, without the cache of the other tests."""
    names, compile = [], compiler.backend_compile_and_load

    def counted(backend, module, *rest):
        names.append(module.operation.attributes["sym_name"].value)
        return compile(backend, module, *rest)

    monkeypatch.setattr(compiler, "backend_compile_and_load", counted)
    monkeypatch.setattr(compilation_cache, "is_cache_used", lambda client: False)
    return names


def step(sums, rows):
    return sums + (rows @ rows.T).sum(), jnp.float32(2) * sums


def on_each(function, devices, **options):
    """The program of a function on each device, and its results there."""
    compilations, program = Compilations(), jax.jit(function, **options)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    sums = [jax.device_put(jnp.float32(1), device) for device in devices]
    lowered = [compilations.lower(program.trace(one, rows), device) for one, device in zip(sums, devices, strict=True)]
    programs = [compile() for compile in lowered]
    return programs, [program(one, rows) for program, one in zip(programs, sums, strict=True)], sums


def test_a_program_is_compiled_once_for_all_devices_of_a_kind(compiled, devices):
    programs, results, sums = on_each(step, devices[:3], donate_argnums=0)
    assert compiled.count("jit_step") == 1
    for device, (added, doubled) in zip(devices[:3], results, strict=True):
        assert added.devices() == doubled.devices() == {device}
        assert (float(added), float(doubled)) == (84.0, 2.0)
    assert all(one.is_deleted() for one in sums)  # donated
    assert len({one.memory_analysis().argument_size_in_bytes for one in programs}) == 1
    again, rows = jax.device_put(jnp.float32(2), devices[1]), np.ones((2, 3), np.float32)
    assert float(programs[1](again, rows)[0]) == 14.0


def test_a_program_that_calls_python_is_compiled_for_each_device(compiled, devices):
    seen = []

    def called(sums, rows):
        total = jax.pure_callback(
            lambda x: np.float32(seen.append(1) or np.sum(np.asarray(x))), jax.ShapeDtypeStruct((), "f4"), rows
        )
        return sums + total

    _, results, _ = on_each(called, devices[:2])
    assert compiled == ["jit_called"] * 2
    assert [float(one) for one in results] == [16.0, 16.0]
    assert len(seen) == 2


def test_a_backend_that_cannot_save_programs_compiles_for_each_device(compiled, devices, monkeypatch):
    def refuse(program):
        raise NotImplementedError

    monkeypatch.setattr(serialize_executable, "serialize", refuse)
    _, results, _ = on_each(step, devices[:2])
    assert compiled == ["jit_step"] * 2
    assert [one.devices() for one, _ in results] == [{device} for device in devices[:2]]


def test_other_settings_and_other_kinds_are_other_programs(compiled, devices):
    compilations, program = Compilations(), jax.jit(step)
    args = jnp.float32(1), np.ones((2, 3), np.float32)
    compilations.lower(program.trace(*args), devices[0])()
    with jax.default_matmul_precision("highest"):
        other = compilations.lower(program.trace(*args), devices[0])
    other()
    kind = types.SimpleNamespace(device_kind="another", platform="gpu", client=devices[0].client)
    compilations.lower(program.trace(*args), kind)
    compilations.lower(program.trace(*args), devices[0])()
    assert compiled == ["jit_step"] * 2
    assert len(compilations._programs) == 3


def test_the_cache_of_jax_serves_later_devices(devices):
    """A program that was loaded from the cache cannot be saved again."""
    compilations, program = Compilations(), jax.jit(step)
    rows, lowered = np.ones((2, 3), np.float32), []
    for device in devices[:2]:
        lowered.append(compilations.lower(program.trace(jax.device_put(jnp.float32(1), device), rows), device))
    (one,) = compilations._programs.values()
    assert not one.is_movable
    results = [
        compile()(jax.device_put(jnp.float32(1), device), rows)
        for compile, device in zip(lowered, devices[:2], strict=True)
    ]
    assert [added.devices() for added, _ in results] == [{device} for device in devices[:2]]


@pytest.mark.parametrize("options", [{}, {"policy": "sync"}, {"scaling": jaxche.AdamScale(), "policy": "sync"}])
def test_replicas_train_as_with_programs_of_their_own(compiled, devices, options, monkeypatch):
    def losses():
        trainer = jaxche.Trainer(
            lambda w, batch: jnp.mean((batch @ w - 1) ** 2), optax.adam(0.1), replicas=devices[:3], **options
        )
        rows = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
        state = trainer.init(jnp.zeros(4))
        history = []
        for _ in range(2):
            state, info = trainer.round(state, jaxche.Batches(rows, 4), counts=(1, 1, 1))
            history.append(info.loss)
        return history, np.asarray(trainer.params(state))

    (shared, params), found = losses(), list(compiled)
    monkeypatch.setattr("jaxche.replicas._compilation.moved", lambda program, device: None)
    compiled.clear()
    own, own_params = losses()
    steps = [names.count("jit__one_step") for names in (found, compiled)]
    assert steps[1] == 3 * steps[0]
    assert shared == own
    np.testing.assert_array_equal(params, own_params)
