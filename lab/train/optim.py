"""Optimizers: Muon for the language model's matrices, AdamW for the rest, both over several worker processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlavaForConditionalGeneration

from mpic_lab.train.held import HeldWeights
from mpic_lab.train.model import products_dtype

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def _orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Returns roughly the nearest (semi-)orthogonal matrix: Newton-Schulz iteration, in bf16 where that is fast."""
    a, b, c = _COEFFICIENTS
    x = matrix.to(products_dtype(matrix.device))
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024). Each worker updates its share of the matrices."""

    def __init__(
        self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.02
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the parameters; the result is the same on every worker."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if index % world != rank or p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = _orthogonalize(p.grad.lerp(momentum, group["momentum"])).to(p.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
            if world > 1:
                for owner in range(world):
                    mine = [p for i, p in enumerate(group["params"]) if i % world == owner]
                    flat = torch.cat([p.reshape(-1) for p in mine])
                    dist.broadcast(flat, owner)
                    for p, values in zip(mine, flat.split([p.numel() for p in mine]), strict=True):
                        p.copy_(values.view_as(p))


class Optimizers:
    """The two optimizers of a stage and their common learning-rate scale."""

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        groups: list[tuple[list[torch.nn.Parameter], float]],
        muon_lr: float,
        adam_lr: float,
    ) -> None:
        self.held = HeldWeights()
        self.muon = Muon(matrices, muon_lr)
        self.adam = torch.optim.AdamW(
            [{"params": ps, "scale": s} for ps, s in groups], lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.clipped = [p for ps, _ in groups for p in ps]
        self.params = matrices + self.clipped

    @classmethod
    def of_vision(cls, model: LlavaForConditionalGeneration, muon_lr: float, adam_lr: float) -> Optimizers:
        """Returns optimizers of the vision tower and the projector; the rest is frozen."""
        tower = _split(model, vision=True)
        matrices = [p for n, p in tower if p.ndim == 2 and "embedding" not in n]
        others = [p for n, p in tower if p.ndim != 2 or "embedding" in n]
        return cls(matrices, [(others, 1.0)], muon_lr, adam_lr)

    @classmethod
    def of_language(
        cls, model: LlavaForConditionalGeneration, muon_lr: float, adam_lr: float, embedding: float = 0.1
    ) -> Optimizers:
        """Returns optimizers of the language model (embeddings at a tenth of the rate); the vision tower is frozen."""
        language = _split(model, vision=False)
        embeddings = [p for n, p in language if "embed_tokens" in n]
        matrices = [p for n, p in language if p.ndim == 2 and "embed_tokens" not in n and "lm_head" not in n]
        others = [p for n, p in language if p.ndim != 2 or "lm_head" in n]
        return cls(matrices, [(others, 1.0), (embeddings, embedding)], muon_lr, adam_lr)

    def step(self, scale: float) -> None:
        """Averages gradients over the workers, clips, updates at `scale` times the learning rates."""
        average_gradients(self.params)
        self.held.clear_gradients()
        torch.nn.utils.clip_grad_norm_(self.clipped, 1.0)
        for group in self.muon.param_groups:
            group["lr"] = self.muon_lr * scale
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale * group["scale"]
        self.muon.step()
        self.adam.step()
        self.held.restore()
        self.muon.zero_grad()
        self.adam.zero_grad()

    def state_dict(self) -> dict[str, dict]:
        """Returns the state of both, for a checkpoint."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """Continues from a checkpoint."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def _split(model: LlavaForConditionalGeneration, vision: bool) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters of one half; the other half is frozen."""
    chosen = []
    for name, p in model.named_parameters():
        wanted = ("vision_tower" in name or "multi_modal" in name) == vision
        p.requires_grad_(wanted)
        if wanted:
            chosen.append((name, p))
    return chosen


def average_gradients(params: list[torch.nn.Parameter]) -> None:
    """Averages gradients over the workers (nothing to do with one)."""
    if not dist.is_initialized():
        return
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.reshape(-1) for p in params])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad.copy_(grad.view_as(p))  # type: ignore[union-attr]
