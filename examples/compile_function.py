"""Run a module of your own on artifacts that are compiled ahead, and found in the cache the next time."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)).eval()
compiled = torch.compile(model, backend="neuron_native")

with torch.inference_mode():
    x = torch.randn(4, 64)
    print("largest difference from eager:", (compiled(x) - model(x)).abs().max().item())
