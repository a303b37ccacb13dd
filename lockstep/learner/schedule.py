"""The learning rate over a run's optimizer steps. Does not import torch."""

from __future__ import annotations

import math
from typing import assert_never

from lockstep.config.schema import Optimizer


def learning_rate(settings: Optimizer, peak: float, step: int, total: int) -> float:
    """Return the rate of optimizer step `step` (0-based) of `total`: linear warm-up, then the schedule down to its floor.

    wsd is warm-up, stable, decay (MiniCPM, arXiv 2404.06395): the peak until the last `decay_share` of all steps, then linear
    to the floor; of at least two steps, as the first still has the peak. All schedules would reach their floor at step `total`.
    """
    warmup = settings.warmup(total)
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = peak * settings.min_lr_ratio
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    match settings.schedule:
        case "constant":
            return peak
        case "linear":
            return peak + (floor - peak) * done
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":
            start = max(total - max(2, round(total * settings.decay_share)), warmup)
            return peak + (floor - peak) * min(1.0, max(0, step - start) / max(1, total - start))
        case _:
            assert_never(settings.schedule)
