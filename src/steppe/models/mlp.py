"""The paper's MLP for Permuted MNIST: 784-100-100-10, ReLU, no biases (89,400 parameters)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


class MLP(nn.Module):
    """MLP with two hidden layers, with torch's default initialization.

    Args:
        inputs: Features of a flat image.
        hidden: Units of each hidden layer.
        outputs: Logits.
    """

    def __init__(self, inputs: int = 784, hidden: int = 100, outputs: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden, bias=False)
        self.second = nn.Linear(hidden, hidden, bias=False)
        self.head = nn.Linear(hidden, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of flat images, (n, inputs)."""
        hidden = relu(self.first(x))
        hidden = relu(self.second(hidden))
        output: Tensor = self.head(hidden)
        return output
