"""Adaptive quantisation noise: how much at which step, on which norms, and putting it on and taking it off."""
