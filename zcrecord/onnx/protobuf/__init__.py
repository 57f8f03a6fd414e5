"""ONNX models as protobuf: one scan in one pass, without the packages protobuf and onnx."""
