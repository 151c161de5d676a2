"""A learned model can be exported, as nothing is left attached to it."""

from __future__ import annotations

import pytest
import torch
from small_tasks import SEQUENTIAL, Small, settings_of, task

from steppe import Learner

SMALLER = {"buffer": 20, "memory": 20, "exemplars": 20, "basis_samples": 10, "tasks": 4}


@pytest.mark.parametrize("optimizer", [None, lambda params: torch.optim.AdamW(params, lr=0.01)])
@pytest.mark.parametrize("method", ["fs-dgpm", "gpm", "ewc"])
def test_an_exported_model_answers_alike(method: str, optimizer: object) -> None:
    assert method in SEQUENTIAL
    chosen = settings_of(method, "")
    chosen = chosen.replace(**{key: value for key, value in SMALLER.items() if key in chosen.as_dict()})
    model = Small()
    learner = Learner(model, chosen, optimizer=optimizer)  # type: ignore[arg-type]
    for number in range(2):
        learner.learn(task(number), epochs=2, batch_size=8)
    x = task(0).test.x  # type: ignore[union-attr]
    samples = torch.export.Dim("samples", min=2, max=64)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes={"x": {0: samples}})
    for inputs in (x, x[:3]):
        torch.testing.assert_close(exported.module()(inputs), learner.outputs(inputs), rtol=1e-5, atol=1e-6)
