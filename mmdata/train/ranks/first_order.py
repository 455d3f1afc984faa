"""Marks the backward of an autograd.Function that has no second derivative: asking for one raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Gradients = TypeVar("Gradients")


def first_order_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Raise where the gradient that `backward` computes would itself be differentiated.

    torch's `once_differentiable` raises only where the incoming gradient requires one. That of `loss.backward()` does
    not, so the second derivative would silently be without the part that goes through the function.

    Args:
        backward: of an autograd.Function, a static method.

    Raises:
        RuntimeError: (when called) the caller set `create_graph=True`, as `torch.autograd.functional.hessian` does.
    """

    @wraps(backward)
    def checked(*arguments: Any) -> Gradients:
        if torch.is_grad_enabled():  # in backward: only with create_graph
            raise RuntimeError(
                "the losses of mmdata.train have no second derivative, and create_graph=True asks for one: call "
                "backward() or torch.autograd.grad() without it; for a gradient penalty, or a Hessian, write the loss "
                "in operations of torch"
            )
        return backward(*arguments)

    return checked
