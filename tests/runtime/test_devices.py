"""Updates on other devices never wait for the device.

Tensors on torch's meta device have no values. Code that reads a value fails there, where on a GPU it would wait, and so
does code that creates a tensor on the CPU by mistake.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steppe import Learner, Task
from steppe.methods.base import MethodConfig
from steppe.methods.ewc import Penalty
from steppe.methods.parts.reservoir import Reservoir
from steppe.models.lenet import LeNet
from steppe.models.mlp import MLP
from steppe.network.network import Network
from steppe.projection.matrix_projector import MatrixProjector
from steppe.projection.memory import GradientMemory
from steppe.projection.projector import SoftProjector
from steppe.registry import METHODS
from steppe.tensors.batch import Batch

NETS = {"mlp": (lambda: MLP(), (784,)), "lenet": (lambda: LeNet(10, 12), (3, 12, 12))}
NAMES = [
    *("fs-dgpm", "fs-gpm", "fs-sgpm", "fs-rgpm", "la-dgpm", "dgpm"),
    *("er", "fs-er", "gpm", "sgp", "la-maml", "der++", "sam-er", "finetune", "ewc"),
]


def elsewhere(found: Any) -> Any:
    """The same with its tensors on the other device, including those in containers and the library's objects."""
    if isinstance(found, Tensor):
        return found.to("meta")
    if isinstance(found, dict):
        return {key: elsewhere(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return type(found)(map(elsewhere, found))
    if isinstance(found, Batch):
        return Batch(*map(elsewhere, (found.x, found.y, found.task)))
    if isinstance(found, SoftProjector):
        return SoftProjector(elsewhere(found.basis), elsewhere(found.importance))
    if isinstance(found, MatrixProjector):
        return MatrixProjector(elsewhere(found.matrix), elsewhere(found.importance))
    if isinstance(found, Penalty):
        found.importance, found.centre, found._scatter = elsewhere(found.importance), elsewhere(found.centre), None
    if isinstance(found, Reservoir):
        vars(found).update({key: elsewhere(value) for key, value in vars(found).items()})
    if isinstance(found, GradientMemory):
        found.projectors = elsewhere(dict(found.projectors))
    return found


def moved_away(learner: Learner, method: Any) -> None:
    """Network and method, as they would be on another device."""
    network = learner.network
    moved = Network(network.model.to("meta"))
    for head in network.heads.ranges:
        moved.heads.add(head, 10)
    moved._fast_path.enable(True)
    vars(network).update(vars(moved))
    for name in method.state_attrs:
        setattr(method, name, elsewhere(getattr(method, name)))
    if hasattr(method, "_shares"):
        method._shares._shares.clear()  # computed again, on the other device


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", NAMES)
def test_updates_do_not_wait_for_the_device(name: str, net: str) -> None:
    build, shape = NETS[net]
    entry = METHODS[name]
    values = {**entry.values("pmnist"), **entry.variant}
    settings = entry.settings.from_mapping({**values, **({"thresholds": "0.95"} if "thresholds" in values else {})})
    assert isinstance(settings, MethodConfig)
    learner = Learner(build(), settings)
    learner.learn(Task((torch.rand(30, *shape), torch.arange(30) % 10)), batch_size=10)
    method: Any = learner.validate(Task((torch.rand(4, *shape), torch.arange(4))))
    learner.network.heads.add(None, 10)
    moved_away(learner, method)
    method.begin_task()
    batch = elsewhere(Batch(torch.rand(10, *shape), torch.arange(10), torch.ones(10).long()))
    with learner.network.mode(training=True):
        for _ in range(2):
            loss = method.observe(batch)
    with pytest.raises(RuntimeError, match="meta"):
        float(loss)
