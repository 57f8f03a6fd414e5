"""Tensors of an ONNX model as views of its files, or read on demand, without a conversion."""
