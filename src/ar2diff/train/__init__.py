"""The conversion: objective, step, trainer and checkpoints."""
