"""Decoding on the CPU in int8: a forward pass in C, compiled for this machine when it is first used."""
