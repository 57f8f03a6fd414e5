"""The command lines `zcrecord` and `onnx2zc`."""
