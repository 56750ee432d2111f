"""Tensors that a model keeps as plain attributes get names, so that graphs can be bound to them."""

from __future__ import annotations

import torch
from torch import nn

from vllm_neuron.model.constants import name_constants


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.scale = torch.tensor([2.0, 3.0])
        self.later = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.linear(x) * self.scale
        return scaled


def test_a_plain_attribute_is_a_weight_of_the_model() -> None:
    model = nn.Sequential(Scaled())
    x = torch.ones(2)
    expected = model(x)
    name_constants(model)
    assert dict(model.named_buffers()).keys() == {"0.scale"}
    torch.testing.assert_close(model(x), expected)
    assert model.state_dict().keys() == {"0.linear.weight"}
    doubled = torch.func.functional_call(model, {"0.scale": torch.tensor([4.0, 6.0])}, (x,))
    torch.testing.assert_close(doubled, expected * 2)
