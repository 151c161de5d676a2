"""The top eigenvalue of the loss's Hessian, by Lanczos iteration with Hessian-vector products."""

from __future__ import annotations

import math

import numpy
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

from steppe.fast.factored import ParamDict
from steppe.landscape.profile import split_batch
from steppe.network.network import Network
from steppe.runtime.contexts import twice_differentiable
from steppe.runtime.rng import Streams
from steppe.tensors.batch import Batch

_Flat = NDArray[numpy.float64]

_VECTORS = 12  # kept by the iteration, each as long as all weights, in float64
_TOLERANCE = 1e-3  # relative, of the eigenvalue
_RESTARTS = 100


def hessian_product(network: Network, batch: Batch, vector: ParamDict) -> ParamDict:
    """The Hessian-vector product H v of the mean loss: the gradient of ∇L · v.

    Args:
        network: The network, in the training or eval mode it is in.
        batch: Prepared samples.
        vector: v, by parameter name.

    Returns:
        H v, by parameter name.
    """
    weights = dict(network.trainable)
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with torch.enable_grad(), twice_differentiable(network.model):
        for part in split_batch(batch, network):
            loss = network.functional_loss(part, weights, statistics=False) * (len(part) / len(batch))  # type: ignore[arg-type]
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
            along = torch.stack([(slope * v).sum() for slope, v in zip(slopes, vector.values(), strict=True)]).sum()
            if not along.requires_grad:  # the loss is linear in all weights
                continue
            found = torch.autograd.grad(along, list(weights.values()), materialize_grads=True)
            for name, h in zip(weights, found, strict=True):
                total[name] += h
    return total


def top_eigenvalue(network: Network, batch: Batch, seed: int = 0) -> float | None:
    """The largest eigenvalue of the Hessian in all trainable parameters.

    Args:
        network: The network.
        batch: Prepared samples.
        seed: Seed of the iteration's start.

    Returns:
        The eigenvalue; None if the iteration does not converge.
    """
    shapes = {name: p.shape for name, p in network.trainable.items()}
    count = sum(shape.numel() for shape in shapes.values())

    def product(flat: _Flat) -> _Flat:
        vector = torch.from_numpy(flat.reshape(-1)).to(network.device, network.dtype)
        pieces = torch.split(vector, [shape.numel() for shape in shapes.values()])
        named = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        return _flat(hessian_product(network, batch, named))

    if count == 1:  # too small for the iteration
        return float(product(numpy.ones(1))[0])
    generator = torch.Generator().manual_seed(Streams(seed).derive_seed("landscape hessian"))
    start = torch.randn(count, dtype=torch.float64, generator=generator, device="cpu").numpy()
    if not product(start).any():  # zero along a random direction: zero along all
        return 0.0
    operator = LinearOperator((count, count), matvec=product, dtype=numpy.float64)
    vectors = min(count, _VECTORS)
    try:
        found = eigsh(
            operator, 1, which="LA", v0=start, ncv=vectors, maxiter=_RESTARTS, tol=_TOLERANCE, return_eigenvectors=False
        )
    except ArpackError:
        return None
    value = float(found[0])
    return value if math.isfinite(value) else None


def _flat(direction: ParamDict) -> _Flat:
    flat: _Flat = torch.cat([tensor.detach().double().reshape(-1).cpu() for tensor in direction.values()]).numpy()
    return flat
