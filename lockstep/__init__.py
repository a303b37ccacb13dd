"""Lockstep: post-train language models by reinforcement learning with verifiable rewards; trainer and engine in lockstep."""

__version__ = "0.2.0"
