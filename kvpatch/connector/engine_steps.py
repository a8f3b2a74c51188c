"""The calls that vLLM makes of a connector in each step of the engine, and patches' parts in them.

A step in which nothing is loaded takes a connector some tens of microseconds. A wrapper takes one
of its own, however little it does, so that patches share one for each call:

build_connector_meta     the scheduler's: what the workers are told
bind_connector_metadata  the worker's, before the model runs
start_load_kv            the worker's, which begins reads; behind the model's part from 0.29 on
get_transfer_results     the worker's: what was sent, received and failed (``get_finished`` before)

Where several have a part they take it in the order of ``kvpatch.patches.SLUGS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

_Parts = Mapping[str, Any]


class Around(NamedTuple):
    """A patch's part in a call.

    Attributes:
        before: (owner) -> nothing; None where there is nothing to do.
        after: (owner, what was returned) -> nothing.
    """

    before: Callable[[Any], None] | None = None
    after: Callable[[Any, Any], None] | None = None


def take_results(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: _Parts,
) -> Any:
    """Wraps ``get_transfer_results`` and ``get_finished``; parts are :class:`Around`."""
    for part in steps.values():
        if part.before is not None:
            part.before(instance)
    found = wrapped(*args, **kwargs)
    for part in steps.values():
        if part.after is not None:
            part.after(instance, found)
    return found


def bind_metadata(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: _Parts,
) -> Any:
    """Wraps ``bind_connector_metadata``; a part is (worker, metadata) -> nothing.

    It is every connector's: a worker may be another one's than NIXL's, and there may be none.
    """
    worker = getattr(instance, "connector_worker", None)
    if worker is None:
        return wrapped(*args, **kwargs)

    def bind(connector_metadata: Any) -> Any:
        for part in steps.values():
            part(worker, connector_metadata)
        return wrapped(connector_metadata)

    return bind(*args, **kwargs)


def begin_loads(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: _Parts,
) -> Any:
    """Wraps ``start_load_kv``.

    A part is (worker, metadata) -> what is to be entered meanwhile, or None; one patch has some.
    """

    def start(metadata: Any) -> Any:
        meanwhile: AbstractContextManager[None] | None = None
        for part in steps.values():
            meanwhile = part(instance, metadata) or meanwhile
        if meanwhile is None:
            return wrapped(metadata)
        with meanwhile:
            return wrapped(metadata)

    return start(*args, **kwargs)


def build_metadata(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: _Parts,
) -> Any:
    """Wraps ``build_connector_meta``, of a connector or of its scheduler.

    A part is (owner, scheduler's output) -> what is done with the metadata, or None.
    """

    def build(scheduler_output: Any) -> Any:
        ends = [
            end for part in steps.values() if (end := part(instance, scheduler_output)) is not None
        ]
        metadata = wrapped(scheduler_output)
        for end in ends:
            end(metadata)
        return metadata

    return build(*args, **kwargs)
