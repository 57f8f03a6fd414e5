"""`safetensors.tensorflow` has no stand-in: an import from here is an error that says what to do instead."""

from __future__ import annotations

from zcrecord.compat.safetensors.opening import no_stand_in

__all__ = []

__getattr__ = no_stand_in("tensorflow", "tensorflow.convert_to_tensor(array)")
