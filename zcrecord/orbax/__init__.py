"""Steps of orbax's CheckpointManager as archives; the manager's steps, retention and asynchronous saves stay its own.

    from zcrecord.orbax import ZcrRestore, ZcrSave

    manager.save(step, args=ZcrSave(state))
    state = manager.restore(step, args=ZcrRestore(like))

jax and orbax are imported when one of these names is first asked for.
"""

from typing import TYPE_CHECKING, Any

from zcrecord.errors import missing_package

if TYPE_CHECKING:
    from .handler import ZcrCheckpointHandler, ZcrRestore, ZcrSave

__all__ = ["ZcrCheckpointHandler", "ZcrRestore", "ZcrSave"]


def __getattr__(name: str) -> Any:
    """Make the public classes, with orbax's as their bases, and register them; DependencyError without orbax."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise missing_package("orbax-checkpoint", extra="orbax") from error
    from . import handler

    bases = (ocp.handlers.AsyncCheckpointHandler, ocp.args.CheckpointArgs, ocp.args.CheckpointArgs)
    for own_class, orbax_base in zip(map(vars(handler).__getitem__, __all__), bases, strict=True):
        namespace = {"__doc__": own_class.__doc__, "__module__": __name__}
        globals()[own_class.__name__] = type(own_class.__name__, (own_class, orbax_base), namespace)
    ours = globals()
    ocp.args.register_with_handler(ours["ZcrCheckpointHandler"], for_restore=True)(ours["ZcrRestore"])
    ocp.args.register_with_handler(ours["ZcrCheckpointHandler"], for_save=True)(ours["ZcrSave"])
    return ours[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
