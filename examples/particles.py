"""Particles by random batches in one sitting: a known law, an error bar before the run, and a gradient through it."""

import math

import torch

from randombatch.particles import Attention, Sphere, System, dyson, predict_error, simulate

torch.manual_seed(0)

# 1. Dyson's Brownian motion tends to the semicircle of radius sqrt(2): second and fourth moments 1/2 and 1/2.
# Forces are singular, so pairs follow their exact flow; 1000 particles take 4 units of time in a few seconds.
x0 = torch.linspace(-0.1, 0.1, 1000, dtype=torch.float64)[:, None]
x = simulate(dyson(1000), x0, horizon=4.0, tau=2e-3, batch_size=2, method="pair-flow").final
print(f"Dyson: moments {float(x.pow(2).mean()):.3f} {float(x.pow(4).mean()):.3f}, largest {float(x.abs().max()):.3f}")
print(f"semicircle:    0.500 0.500          {math.sqrt(2):.3f}\n")

# 2. How far will random batches be from all pairs? Asked before the run, answered after it.
x0 = torch.nn.functional.normalize(torch.randn(300, 3, dtype=torch.float64), dim=-1)
system = System(kernel=Attention(torch.randn(3, 3, dtype=torch.float64) / 2), space=Sphere())
predicted = predict_error(system, x0, horizon=1.0)
print("root mean square distance from all pairs at T = 1, predicted and measured in 20 runs")
for tau, p in ((1 / 16, 2), (1 / 16, 8), (1 / 64, 8), (1 / 64, 32)):
    exact = simulate(system, x0, 1.0, tau, method="rk4").final
    runs = simulate(system, x0.expand(20, -1, -1), 1.0, tau, batch_size=p, method="rk4").final
    measured = (runs - exact).square().sum(-1).mean().sqrt()
    print(f"  tau = 1/{1 / tau:<3.0f} p = {p:<3d} {float(predicted.rms(tau, p)[-1]):.4f} {float(measured):.4f}")

# 3. A parameter from data: how strongly did these particles attract each other, if they gathered like this?
crowd = torch.nn.functional.normalize(torch.randn(2000, 3) + torch.tensor([0.5, 0.0, 0.0]), dim=-1)


def gathered(beta: torch.Tensor | float, batch_size: int | None, seed: int = 0) -> torch.Tensor:
    """Length of the mean position at T = 1/2: 0 where particles are spread evenly, 1 where they have met."""
    system = System(kernel=Attention(beta * torch.eye(3)), space=Sphere())
    return simulate(system, crowd, 0.5, 1 / 20, batch_size=batch_size, seed=seed).final.mean(0).norm()


seen = gathered(1.5, batch_size=None)
beta = torch.tensor(0.2, requires_grad=True)
optimizer = torch.optim.Adam([beta], lr=0.2)
for step in range(40):
    optimizer.zero_grad()
    (gathered(beta, 10, seed=step) - seen).square().backward()
    optimizer.step()
print(f"\nattraction found through random batches: {beta.item():.2f} (1.50 was used)")
