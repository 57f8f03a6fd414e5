"""Tools around the package: the Python halves of the entry scripts, model makers, benchmarks. Never installed."""

import os

# From 1.29 on ONNX Runtime's own builds send usage data, a hash of the weights included, and leave a file in the
# temporary folder, unless told so before they are imported. Nothing here is to do that to whoever tries it out, and
# no figure is to contain it.
# Source: https://github.com/microsoft/onnxruntime/pull/27379
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
