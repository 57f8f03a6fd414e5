"""Tensors of an archive as torch's and jax's, over the same memory where they can be."""
