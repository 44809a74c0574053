"""The systems of PyTorch: DDP, torchft's LocalSGD and DiLoCo, Accelerate's LocalSGD, on gloo.

All pad the gradient of a step to the pace, and update and communicate after it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peers.task import WIDTHS, Pace, Rate, Task, average_weight
from torch import nn
from torch.nn.functional import cross_entropy


def model_from(arrays: list[np.ndarray]) -> nn.Sequential:
    """The Flax model of ``jax_systems`` with these parameters; PyTorch keeps kernels transposed."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS)):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(arrays[2 * i]).T)
            layer.bias.copy_(torch.from_numpy(arrays[2 * i + 1]))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def to_list(parameters: Any) -> list[np.ndarray]:
    return [parameter.detach().numpy().T.copy() for parameter in parameters]


def first_gradient(task: Task, seed: int) -> tuple[float, list[np.ndarray]]:
    """Loss and gradient of the first batch at the initial parameters."""
    model = model_from(task.start(seed))
    loss = cross_entropy(model(torch.from_numpy((batch := task.batch(seed, 0))[0])), torch.from_numpy(batch[1]).long())
    loss.backward()
    return loss.item(), to_list(parameter.grad for parameter in model.parameters())


def make(name: str, task: Task, seed: int, rate: Rate, pace_ms: float, every: int, ema: float | None = None) -> Torch:
    kind = {
        "torch DDP": DDP,
        "torchft LocalSGD": TorchFTLocalSGD,
        "torchft DiLoCo": TorchFTDiLoCo,
        "Accelerate LocalSGD": AccelerateLocalSGD,
    }
    return kind[name](task, seed, rate, pace_ms, every, ema)


class Torch:
    """Local steps of Adam; subclasses make the replicas meet, every ``every`` steps.

    With ``ema`` each process takes its steps into an average.
    """

    def __init__(self, task: Task, seed: int, rate: Rate, pace_ms: float, every: int, ema: float | None):
        torch.set_num_threads(1)
        self.rank, self.replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self.task, self.seed, self.every = task, seed, every
        self.pace, self.step, self.rate = Pace(pace_ms), 0, rate
        self.model: Any = model_from(task.start(seed))
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), rate.peak)
        self.ema, self.average = ema, [p.detach().clone() for p in self.model.parameters()]
        self.contexts = contextlib.ExitStack()
        self.set_up()

    def set_up(self) -> None:
        """Wrap the model and the optimizer."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.pace.wait()

    def after_step(self) -> None:
        """After an optimizer step."""

    def run(self, batches: int) -> int:
        rounds = -(-batches // (self.replicas * self.every))
        for i in range(rounds * self.every):
            if i % self.every == 0:
                self.pace.begin()
            x, y = self.task.batch(self.seed, self.step * self.replicas + self.rank)
            self.optimizer.zero_grad()
            self.backward(cross_entropy(self.model(torch.from_numpy(x)), torch.from_numpy(y).long()))
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate.at(self.step * self.replicas)
            self.optimizer.step()
            self.after_step()
            self.step += 1
            if self.ema is not None:
                weight = average_weight(self.ema, self.step)
                with torch.no_grad():
                    for mean, parameter in zip(self.average, self.model.parameters(), strict=True):
                        mean.lerp_(parameter, weight)
        return rounds * self.every * self.replicas

    def parameters(self) -> list[np.ndarray]:
        return to_list(self.model.parameters() if self.ema is None else self.average)

    def agree(self, value: float) -> float:
        # An all-reduce, because a broadcast does not wait for those that receive.
        dist.all_reduce(shared := torch.tensor([value if self.rank == 0 else 0.0], dtype=torch.float64))
        return shared.item()


class DDP(Torch):
    """DistributedDataParallel; the model fits into one bucket, so a step makes one all-reduce."""

    def set_up(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.every = 1
        self.model = nn.parallel.DistributedDataParallel(self.model)

        def paced(state, bucket):  # without types: DDP refuses those that are strings
            self.pace.wait()  # the local gradient is there
            return allreduce_hook(state, bucket)

        self.model.register_comm_hook(None, paced)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class AccelerateLocalSGD(Torch):
    def set_up(self) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        self.accelerator = Accelerator(cpu=True)
        if self.accelerator.num_processes != self.replicas:
            raise RuntimeError(f"Accelerate sees {self.accelerator.num_processes} of {self.replicas} processes")
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        local_sgd = LocalSGD(accelerator=self.accelerator, model=self.model, local_sgd_steps=self.every)
        self.local_sgd = self.contexts.enter_context(local_sgd)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)
        self.pace.wait()

    def after_step(self) -> None:
        self.local_sgd.step()


class TorchFT(Torch):
    """Every process is a replica group of its own; rank 0 runs the lighthouse, where they form a quorum."""

    def manager(self) -> Any:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        address = [""]
        if self.rank == 0:
            self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=self.replicas, join_timeout_ms=10_000)
            address = [self.lighthouse.address()]
        dist.broadcast_object_list(address)
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

        def load(saved: Any) -> None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
            load_state_dict=load,
            state_dict=lambda: {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
            min_replica_size=self.replicas,
            use_async_quorum=False,
            init_sync=False,  # all begin with the same parameters
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=address[0],
            replica_id=f"replica_{self.rank}",
            hostname="localhost",
        )
        self.contexts.callback(manager.shutdown)
        return manager


class TorchFTLocalSGD(TorchFT):
    def set_up(self) -> None:
        from torchft.local_sgd import LocalSGD

        self.contexts.enter_context(LocalSGD(self.manager(), self.model, self.optimizer, self.every))


class TorchFTDiLoCo(TorchFT):
    """The outer optimizer of the paper: Nesterov momentum 0.9, learning rate 0.7."""

    def set_up(self) -> None:
        from torchft.local_sgd import DiLoCo

        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = DiLoCo(self.manager(), [self.model], self.optimizer, outer, self.every, pin_memory=False)
        self.contexts.enter_context(diloco)
