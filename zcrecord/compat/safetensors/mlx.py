"""`safetensors.mlx` has no replacement: an import from this module raises an error with advice."""

from zcrecord.compat.safetensors.opening import no_stand_in

__all__ = []

__getattr__ = no_stand_in("mlx", "mlx.core.array(array)")
