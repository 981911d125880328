"""ar2diff turns an autoregressive language model into a block-diffusion one, and proves how."""

__version__ = "0.2.0"
