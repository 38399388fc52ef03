"""Training steps that run on the GPU without the host: a whole step, communication included, as one launch."""

from ark_torch.train.capture import capture
from ark_torch.train.captured import CapturedStep

__all__ = ["CapturedStep", "capture"]
