"""Steps of orbax's CheckpointManager as archives.

    from zcrecord.orbax import ZcrRestore, ZcrSave

    with orbax.checkpoint.CheckpointManager(folder) as manager:
        manager.save(step, args=ZcrSave(state))
        state = manager.restore(step, args=ZcrRestore(like))

Steps, retention and asynchronous saves are orbax's. An item of a step has `state.zcr`: one archive, or the catalogue of
an archive for each process. jax and orbax are imported when one of these names is first asked for.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from zcrecord.errors import missing_package

if TYPE_CHECKING:
    from .handler import ZcrCheckpointHandler, ZcrRestore, ZcrSave

__all__ = ["ZcrCheckpointHandler", "ZcrRestore", "ZcrSave"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _over_orbax()[name]


@cache
def _over_orbax() -> dict[str, Any]:
    """Return our classes over orbax's base classes, which are imported only now, and registered with it."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise missing_package("orbax-checkpoint", extra="orbax") from error
    from . import handler

    def over(name: str, base: Any) -> Any:
        own = getattr(handler, name)
        return type(name, (own, base), {"__doc__": own.__doc__, "__module__": __name__})

    out = {"ZcrCheckpointHandler": over("ZcrCheckpointHandler", ocp.handlers.AsyncCheckpointHandler)}
    for name, use in (("ZcrSave", "for_save"), ("ZcrRestore", "for_restore")):
        register = ocp.args.register_with_handler(out["ZcrCheckpointHandler"], **{use: True})
        out[name] = register(over(name, ocp.args.CheckpointArgs))
    return out


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
