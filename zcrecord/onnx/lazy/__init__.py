"""Tensors of an ONNX model read where they lie, without a conversion."""
