"""How a mixture routes: from the router's logits to each token's experts and their weights, in static shapes.

For T tokens and E experts, of which k are chosen: logits [T, E] of any floating dtype, a bias float32 [E], and as the
result weights float32 [T, k] and ids int64 [T, k]. "Softmax, then top-k, then renormalize" gives the weights of "top-k,
then softmax": exp(logit) over its sum for the chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Smaller than any sum of scores that matters; keeps a token that no expert wants from a division by zero.
_TINY = 1e-20

SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.sqrt(F.softplus(logits)),
}


@dataclass(frozen=True)
class Routing:
    """How ``top_k`` of E experts are chosen.

    scoring: a name in ``SCORES``; renormalize: whether a token's weights are made to sum up to 1, before ``scale``;
    groups: E is that many groups of equal size, and only experts of the ``top_groups`` best of them are chosen.
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of each token's experts.

    ``bias`` is added to the scores that experts are chosen by, and not to those that become weights (DeepSeek-V3,
    section 2.1.2: balance without an auxiliary loss).
    """
    scores = SCORES[routing.scoring](logits.float())
    choice = scores if bias is None else scores + bias.float()
    if routing.top_groups < routing.groups:
        choice = _within_top_groups(choice, routing, biased=bias is not None)
    ids = torch.topk(choice, routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)
    return weights * routing.scale if routing.scale != 1.0 else weights, ids


def _within_top_groups(choice: torch.Tensor, routing: Routing, biased: bool) -> torch.Tensor:
    """``choice`` [T, E], with -inf for what is not in a token's best groups.

    A group is as good as its best expert; with a bias, as its two best together.
    """
    grouped = choice.view(choice.shape[0], routing.groups, -1)
    best = torch.topk(grouped, min(2, grouped.shape[-1]) if biased else 1, dim=-1).values.sum(-1)
    kept = torch.topk(best, routing.top_groups, dim=-1).indices
    # Not a scatter: its indices could repeat as far as a compiler knows, and groups are few.
    in_kept = (kept.unsqueeze(-1) == torch.arange(routing.groups, device=choice.device)).any(1)
    return grouped.masked_fill(~in_kept.unsqueeze(-1), float("-inf")).view(choice.shape)
