"""What a process takes of the device beside tensors, as its libraries come in one by one."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from search.probe.observation.order import Order, Teller
from search.probe.observation.subject import Subject
from search.probe.observation.view import NotHereError, View

_SIDE = 512
# Requests that are small beside a workspace are tensors'.
_WORKSPACE_BYTES = 4 * 1024**2


def see_context(order: Order, view: View, tell: Teller) -> None:
    """Bytes outside the allocator after an empty context, a matmul, its backward, a convolution and
    a whole step; and the workspaces that cuBLAS asks of the allocator in the caller's thread and in
    autograd's."""
    _tell(tell, view, "untouched", started=False)
    view.start()
    _tell(tell, view, "zeros")
    left = torch.randn(_SIDE, _SIDE, device=view.device, requires_grad=True)
    right = torch.randn(_SIDE, _SIDE, device=view.device, requires_grad=True)
    products: list[torch.Tensor] = []
    forward = view.requests(lambda: products.append(left @ right))
    _tell(tell, view, "matmul")
    backward = view.requests(lambda: torch.autograd.backward(products[0].sum()))
    _tell(tell, view, "matmul_backward")
    tell.see(
        workspaces_forward_bytes=[n for n in forward if n >= _WORKSPACE_BYTES],
        workspaces_backward_bytes=[n for n in backward if n >= _WORKSPACE_BYTES],
    )
    images = torch.randn(8, 3, 64, 64, device=view.device)
    F.conv2d(images, torch.randn(16, 3, 4, 4, device=view.device), stride=4)
    view.synchronize()
    _tell(tell, view, "convolution")
    subject = Subject(order.observation, order.device)
    subject.prepare()
    training = subject.training()
    training.step()
    view.synchronize()
    _tell(tell, view, "first_step")
    training.step()
    view.synchronize()
    _tell(tell, view, "second_step")
    if not view.is_cuda:
        raise NotHereError("the CPU has neither a context nor library workspaces")


def _tell(tell: Teller, view: View, when: str, started: bool = True) -> None:
    if started or not view.is_cuda:  # asking torch for free memory would make the context
        tell.see(**{when: view.memory()})
