"""Makers of the ONNX models that tests, quickstart and benchmarks use; each says whether its bytes are reproducible."""
