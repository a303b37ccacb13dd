"""The numerics and the noise with which a native engine computes its forward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import nn

from lockstep.errors import EngineError
from lockstep.models.merged_weights import make, merged_of
from lockstep.numerics.apply import ModelNumerics, numerics_of
from lockstep.rollout.requests import check_clean, check_settled
from lockstep.types import Forward, ForwardReport

if TYPE_CHECKING:
    from lockstep.noise.apply import NoisyNorms


class Computation:
    """The present Forward of an engine over a model that may be the learner's own."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = Forward()
        self.numerics: ModelNumerics = numerics_of(model)
        self._model, self._merged = model, merged_of(model)
        self._fresh = False
        """True if `refresh` has nothing to do."""
        self._noise: NoisyNorms | None = None

    def set(self, forward: Forward, open_requests: int) -> ForwardReport:
        """Apply a Forward. Raises EngineError while requests are open, if a numerics or a noise would change no layer, or if a
        quantised weight does not match the present weight.
        """
        self._fresh = False
        check_settled(open_requests, f"numerics {forward.numerics or 'of the weights'}")
        try:
            layers = self.numerics.serve(forward.numerics)
            if layers:
                self.numerics.verify()
        except ValueError as error:
            raise EngineError(
                str(error), where="numerics", fix="`lockstep config help numerics.rollout` explains the values"
            ) from error
        norms, share, lost = 0, 0.0, 0.0
        if self._noise is None and forward.noise is not None:
            from lockstep.noise.apply import NoisyNorms

            self._noise = NoisyNorms(self._model)
        if self._noise is not None:
            self.forward = Forward(self.forward.numerics)  # an error below leaves clean norms
            norms, share = self._noise.set(forward.noise)
            lost = self._noise.lost
        self.forward = forward
        return ForwardReport(layers, norms, share, lost)

    def require_clean(self, what: str) -> None:
        """Raise EngineError while noise is on: weights cannot be loaded, proven or saved then."""
        check_clean(self.forward, what)

    def loaded(self) -> None:
        """Make the merged weights again before they are read: the weights are new, and torch may not have counted the writes."""
        self._fresh = False
        for merged in self._merged:
            merged.forget()

    def refresh(self) -> None:
        """Update what is made of the weights in place, for captured steps: once for weights that were loaded."""
        if not self._fresh:
            self.numerics.refresh(self.forward.numerics)
            make(self._merged)
            self._fresh = True

    def running(self) -> AbstractContextManager[None]:
        """Return the context that each pass of the model runs in."""
        return self.numerics.computing(self.forward.numerics)
