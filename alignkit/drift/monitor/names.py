"""Drift metrics of the RL frameworks, under their names and with their formulas.

Notation: r and t are the logprobs of rollout and training, d = t - r. Metrics are computed in float64 from the
unmodified values (the frameworks compute in fp32), over the tokens of one rank that the mask selects. Nonfinite
logprobs are not filtered: they propagate through the framework's formula, mostly to NaN. Names are keys in users'
loggers, and docs/monitor.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..compare import DriftReport

_VERL_BOUND = 20.0
"""verl's `SAFETY_BOUND`: log ratios are clamped to [-20, 20] before squaring."""
_COUNTS = ("tokens", "bit_equal", "nonfinite", "max_abs")
"""Fields of `DriftReport` added to every framework's metrics; a framework's means hide a one-bit difference."""


def plain(report: DriftReport, rollout: torch.Tensor, training: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return the numeric fields of `DriftReport` as ``drift/NAME``."""
    return report.metrics("drift/")


def verl(report: DriftReport, rollout: torch.Tensor, training: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return verl's metrics.

    ``training/rollout_*`` follow `calculate_debug_metrics` (verl/utils/debug/metrics.py), ``rollout_corr/*`` follow
    `compute_offpolicy_metrics` (verl/trainer/ppo/rollout_corr_helper.py).
    """
    r, t = rollout[mask].double(), training[mask].double()
    d = t - r
    row = mask.nonzero(as_tuple=True)[0]
    # The mean of a sequence without a token is 0, as in verl's masked_mean.
    count = mask.sum(1).clamp(min=1).double()

    def by_sequence(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(mask)).index_add_(0, row, x)

    p, q = t.exp(), r.exp()
    difference = (p - q).abs()
    mean_t, mean_r, mean_d = (by_sequence(x) / count for x in (t, r, d))
    return _with_counts(
        report,
        {
            "training/rollout_probs_diff_valid": 1,
            "training/rollout_probs_diff_max": difference.max().item(),
            "training/rollout_probs_diff_mean": difference.mean().item(),
            "training/rollout_probs_diff_std": difference.std().item() if len(difference) > 1 else math.nan,
            "training/rollout_actor_probs_pearson_corr": _pearson(p, q),
            "rollout_corr/training_ppl": (-mean_t).exp().mean().item(),
            "rollout_corr/training_log_ppl": (-mean_t).mean().item(),
            "rollout_corr/rollout_ppl": (-mean_r).exp().mean().item(),
            "rollout_corr/rollout_log_ppl": (-mean_r).mean().item(),
            "rollout_corr/kl": (-d).mean().item(),
            "rollout_corr/k3_kl": _k3(d).mean().item(),
            "rollout_corr/log_ppl_diff": (-mean_d).mean().item(),
            "rollout_corr/log_ppl_abs_diff": mean_d.abs().mean().item(),
            "rollout_corr/log_ppl_diff_max": (-mean_d).max().item(),
            "rollout_corr/log_ppl_diff_min": (-mean_d).min().item(),
            "rollout_corr/ppl_ratio": (-mean_d).exp().mean().item(),
            "rollout_corr/chi2_token": _chi2(d),
            "rollout_corr/chi2_seq": _chi2(by_sequence(d)),
        },
    )


def nemo_rl(report: DriftReport, rollout: torch.Tensor, training: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return NeMo-RL's metrics as ``train/NAME``.

    Follows `ClippedPGLossFn` (nemo_rl/algorithms/loss/loss_functions.py) with its defaults: the k3 estimator and
    token-level importance ratios without truncation.
    """
    r, t = rollout[mask].double(), training[mask].double()
    d = t - r
    mixture = torch.logaddexp(t, r) - math.log(2.0)
    divergence = 0.5 * _k3(t - mixture) + 0.5 * _k3(r - mixture)
    ratio = d.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return _with_counts(
        report,
        {
            "train/token_mult_prob_error": d.abs().exp().mean().item(),
            "train/gen_kl_error": _k3(d).mean().item(),
            "train/policy_kl_error": _k3(-d).mean().item(),
            "train/js_divergence_error": divergence.mean().item(),
            "train/sampling_importance_ratio": ratio.mean().item(),
        },
    )


NAMES: dict[str, Callable[..., dict[str, float]]] = {"plain": plain, "verl": verl, "nemo-rl": nemo_rl}


def _with_counts(report: DriftReport, metrics: dict[str, float]) -> dict[str, float]:
    # + 0.0 turns -0.0 into 0.0.
    return {
        **{f"drift/{name}": getattr(report, name) for name in _COUNTS},
        **{name: value + 0.0 if isinstance(value, float) else value for name, value in metrics.items()},
    }


def _k3(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x) - 1 - x, with expm1 to avoid cancellation at small x."""
    return torch.expm1(x) - x


def _chi2(x: torch.Tensor) -> float:
    """Return mean(exp(x)^2) - 1, with x clamped to verl's bound."""
    return torch.expm1(2.0 * x.clamp(-_VERL_BOUND, _VERL_BOUND)).mean().item()


def _pearson(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the Pearson correlation; NaN for a single token or a constant side."""
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x.norm() * y.norm())).clamp(-1.0, 1.0).item()
