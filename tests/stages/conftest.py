"""Models cut into stages, each with its slow obvious twin: the whole model, differentiated at once."""

import contextlib
import functools
import itertools
import json
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.stages import _partition


def dense(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def make_params(widths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "w": rng.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(shape[0])),
            "b": 0.1 * rng.normal(size=shape[1]).astype(np.float32),
        }
        for shape in itertools.pairwise(widths)
    ]


def make_batch(features, examples=12, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(examples, features)).astype(np.float32),
        "y": rng.normal(size=(examples, 2)).astype(np.float32),
        "mask": rng.random(examples) < 0.7,
    }


class Plain:
    """Arrays go from stage to stage."""

    def __init__(self, n_stages, uneven):
        # Uneven stages: layers of other widths, and twice the layers in stage 0.
        self.widths = [5, *((7, 3, 9)[: n_stages - 1] if uneven else (6,) * (n_stages - 1)), 2]
        self.params = make_params(self.widths)
        self.batch = make_batch(5)
        self.stages = [self._first, *([dense] * (n_stages - 1))]
        if uneven:
            self.params[0] = {"inner": make_params([5, 5], seed=2)[0], **self.params[0]}
            self.stages[0] = lambda params, batch: dense(params, dense(params["inner"], batch["x"]))

    @staticmethod
    def _first(params, batch):
        return dense(params, batch["x"])

    @staticmethod
    def loss(y, batch):
        return jnp.mean((y - batch["y"]) ** 2)


class Trees(Plain):
    """What goes from stage to stage is a tree: a float array, a mask, a count, and a second float array."""

    def __init__(self, n_stages, uneven):
        super().__init__(n_stages, uneven)
        first, rest = self.stages[0], self.stages[1:]

        def begin(params, batch):
            count = jnp.zeros((), jnp.int32)
            return {"h": first(params, batch), "mask": batch["mask"], "side": (batch["x"][:, :1] ** 2, count)}

        def go_on(params, x):
            h = jnp.where(x["mask"][:, None], x["h"], 0.5 * x["h"])
            side, count = x["side"]
            return {"h": dense(params, h), "mask": x["mask"], "side": (side + h.mean(-1, keepdims=True), count + 1)}

        self.stages = [begin, *([go_on] * len(rest))]

    @staticmethod
    def loss(y, batch):
        return jnp.mean((y["h"] + y["side"][0] * y["side"][1] - batch["y"]) ** 2)


class Dropout(Plain):
    """All stages but the last drop some of their outputs."""

    def __init__(self, n_stages, uneven):
        super().__init__(n_stages, uneven)

        def dropping(stage):
            def call(params, x, rng):
                h = stage(params, x)
                return h * jax.random.bernoulli(rng, 0.7, h.shape)

            return call

        self.stages = [*map(dropping, self.stages[:-1]), self.stages[-1]]


MODELS = {"plain": Plain, "trees": Trees, "dropout": Dropout}


@functools.cache
def compiled_whole(model, micro_batches, seed):
    def one(params, batch, step, micro):
        x = batch
        for i, stage in enumerate(model.stages):
            key = jax.random.key(seed)
            for number in (step, i, micro):
                key = jax.random.fold_in(key, number)
            x = stage(params[i], x, rng=key) if stage.__code__.co_argcount == 3 else stage(params[i], x)
        return model.loss(x, batch)

    def mean(params, batch, step):
        size = len(batch["x"]) // micro_batches
        cut = jax.tree.map(lambda x: x.reshape(micro_batches, size, *x.shape[1:]), batch)
        return jax.lax.map(lambda given: one(params, given[0], step, given[1]), (cut, jnp.arange(micro_batches))).mean()

    return jax.jit(jax.value_and_grad(mean))


def whole(model, params, batch, micro_batches=1, step=0, seed=0):
    """Loss and gradients of the whole model; with dropout, of its micro-batches one after the other."""
    return compiled_whole(model, micro_batches, seed)(params, batch, step)


@pytest.fixture(autouse=True)
def quick_compilation():
    """Nearly all the time here would be spent on optimising programs that run once."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="module")
def shared_programs():
    """Equal stages compile the same programs: compile them once for all tests of a module."""
    make, made = _partition.StageProgram, {}

    def cached(stage, loss, seed, device, micro, given):
        leaves, structure = jax.tree.flatten(given)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (stage.call, stage.index, stage.remat, loss, seed, device, micro, structure, shapes)
        if key not in made:
            made[key] = make(stage, loss, seed, device, micro, given)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_partition, "StageProgram", cached)
        yield


@functools.cache
def model_of(kind="plain", n_stages=2, uneven=False):
    return MODELS[kind](n_stages, uneven)


@functools.cache
def twin_of(model, micro_batches, step):
    return whole(model, model.params, model.batch, micro_batches, step)


@pytest.fixture
def make_model():
    return model_of


@pytest.fixture
def twin():
    return whole


@pytest.fixture
def first_twin():
    """What the whole model gives at its own parameters, computed once for all tests."""
    return twin_of


@pytest.fixture
def close():
    """Two trees are equal up to float32 rounding."""

    def check(a, b):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)

    return check


@contextlib.contextmanager
def served(wrap=lambda app: app):
    """A server of the S3 protocol in this process, with a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._server.app = wrap(server._server.app)
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=10).close()
    yield endpoint
    server.stop()


@pytest.fixture(scope="session")
def bucket():
    """A bucket of a real S3 protocol server in this process, and what obstore needs to reach it."""
    with served() as endpoint:
        yield {
            "endpoint": endpoint,
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }


def as_google(app):
    """Google's protocol is that of S3 but for how conditions are written, who signs, and 404 for nothing to delete."""
    signature = "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"

    def call(environ, start):
        environ["HTTP_AUTHORIZATION"] = signature
        if environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH") == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if environ["REQUEST_METHOD"] == "DELETE":
            found = []
            app({**environ, "REQUEST_METHOD": "HEAD"}, lambda status, *_: found.append(status))
            if found[0].startswith("404"):
                start("404 Not Found", [("Content-Length", "0")])
                return []
        return app(environ, start)

    return call


@pytest.fixture(scope="session")
def google_bucket():
    """A bucket behind a server that speaks Google's protocol, and what obstore needs to reach it."""
    with served(as_google) as endpoint:
        key = {"gcs_base_url": endpoint, "disable_oauth": True}
        key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        yield {"service_account_key": json.dumps(key), "client_options": {"allow_http": True}}
