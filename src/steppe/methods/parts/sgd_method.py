"""What methods that take SGD steps share: settings, construction and state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.descent import Descent, make_descent
from steppe.network.network import Network
from steppe.settings import setting


@dataclass(frozen=True)
class SGDConfig(MethodConfig):
    """Settings of SGD with momentum and clipping.

    A subclass adds its own settings, and declares one of these again to give it another help text or default.
    """

    lr: float = setting(0.01, "SGD learning rate", above=0)
    momentum: float = setting(0.9, "SGD momentum", at_least=0, below=1)
    clip: float = setting(2.0, "maximum gradient norm; 0 disables clipping", at_least=0)


SGDConfigT = TypeVar("SGDConfigT", bound=SGDConfig)


class SGDMethod(Method, Generic[SGDConfigT]):
    """A method whose updates end with a step of `descent`.

    Args:
        settings: The method's settings.
        network: The network to train.
    """

    descent: Descent
    state_attrs: ClassVar[tuple[str, ...] | None] = ("descent",)

    def __init__(self, settings: SGDConfigT, network: Network) -> None:
        self.settings, self.network = settings, network
        self.descent = make_descent(network, settings.lr, settings.momentum)
