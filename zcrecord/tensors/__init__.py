"""Tensor values in memory: packed and text tensors, tensors made when they are written, arrays of other packages."""
