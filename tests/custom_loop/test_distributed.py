"""Under DistributedDataParallel, all processes hold the same memory and make the same steps."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import steppe


def train(rank: int, directory: str) -> None:
    """What each process does; it has batches of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    model = nn.parallel.DistributedDataParallel(own)
    memory = steppe.GradientProjectionMemory(model, threshold=1.0, freeze_uncovered=True)
    optimizer = memory.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(1 + rank)
    old = torch.randn(3 + rank, 10, dtype=torch.float64)
    memory.update(old)
    before = own(old).detach()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 10, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    state = {"moved": (own(old) - before).detach().abs().max(), "ranks": memory.ranks(), "weights": own.state_dict()}
    torch.save(state, f"{directory}/{rank}.pt")
    dist.barrier()  # gloo aborts a process that still talks to one that has left
    dist.destroy_process_group()


def test_all_processes_hold_the_memory_of_the_first(tmp_path: Path) -> None:
    try:
        torch.multiprocessing.spawn(train, args=(str(tmp_path),), nprocs=2)
    except torch.multiprocessing.ProcessExitedException:
        if len(list(tmp_path.glob("*.pt"))) < 2:  # else gloo aborted a process that had done its work and was ending
            raise
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["ranks"] == second["ranks"]
    assert first["ranks"]["0.weight"]["rank"] == 3
    assert all(torch.equal(first["weights"][name], value) for name, value in second["weights"].items())
    assert float(first["moved"]) < 1e-12
    assert float(second["moved"]) > 1e-3  # its own inputs are not in the memory
