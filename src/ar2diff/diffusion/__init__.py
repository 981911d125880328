"""Pure tensor functions of masked diffusion: noise, corruption, loss, unmasking, likelihood."""
