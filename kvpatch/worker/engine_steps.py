"""The calls that vLLM makes of a connector in each step of the engine, and patches' parts in them.

A step in which nothing is loaded takes a connector some tens of microseconds. What wrapt puts in a
method's place takes two or three of its own, however little it does, and a plain function a tenth
of that: so what the newest releases call in every step is replaced by one, which all patches share
that have a part there, and which looks at nothing but these parts. What older releases need beside
that is wrapped (``kvpatch.legacy``).

=================================  =======================================================  ========
call                               of                                                       made by
=================================  =======================================================  ========
``schedule``                       vLLM's scheduler, first of all                           around
``update_from_output``             vLLM's scheduler, of what a step has come to             hear
``build_connector_meta``           a connector's, and its scheduler's: what workers are     build
                                   told
``bind_connector_metadata``        a worker's, before the model runs                        bind
``start_load_kv``                  a worker's, which begins reads; from 0.29 on behind the  begin
                                   model's part
``wait_for_save``                  a worker's, once the model has run                       around
``get_transfer_results``           a worker's: what was sent, received and failed           around
                                   (``get_finished`` before 0.30)
``get_block_ids_with_load_errors`` a worker's: blocks that could not be loaded              amend
``get_kv_connector_stats``         both halves: what they have counted                      around,
                                                                                            amend
``is_empty``                       the release's statistics, of a step                      amend
=================================  =======================================================  ========

Where several patches have a part they take it in the order of ``kvpatch.patches.SLUGS``. A name in
the last column is a function here, as :class:`kvpatch.core.ledger.Step` takes it: of a method and
the parts that are on it makes what stands in the method's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

from kvpatch.core.ledger import Method, Parts


class Around(NamedTuple):
    """A patch's part in a call that :func:`around` replaces.

    Attributes:
        before: (owner) -> nothing; None where there is nothing to do.
        after: (owner, what was returned) -> nothing.
    """

    before: Callable[[Any], None] | None = None
    after: Callable[[Any, Any], None] | None = None


def around(method: Method, parts: Parts) -> Method:
    """Has something done before a call and behind it; parts are :class:`Around`."""
    sorted_out = parts.on, _befores(parts.on), _afters(parts.on)

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal sorted_out
        on, befores, afters = sorted_out
        if on is not parts.on:  # once, as patches are turned on or off
            on = parts.on
            sorted_out = on, befores, afters = on, _befores(on), _afters(on)
        for before in befores:
            before(self)
        found = method(self, *args, **kwargs)
        for after in afters:
            after(self, found)
        return found

    return call


def _befores(on: Iterable[Around]) -> tuple[Callable[[Any], None], ...]:
    return tuple(part.before for part in on if part.before is not None)


def _afters(on: Iterable[Around]) -> tuple[Callable[[Any, Any], None], ...]:
    return tuple(part.after for part in on if part.after is not None)


def amend(method: Method, parts: Parts) -> Method:
    """Has something else returned; a part is (owner, what was returned) -> what is instead."""

    @wraps(method)
    def call(self: Any) -> Any:
        on = parts.on
        found = method(self)
        for part in on:
            found = part(self, found)
        return found

    return call


def bind(method: Method, parts: Parts) -> Method:
    """Of ``bind_connector_metadata``; a part is (worker, metadata) -> nothing.

    It is every connector's: a worker may be another one's than NIXL's, and there may be none.
    """

    @wraps(method)
    def bind_connector_metadata(self: Any, connector_metadata: Any) -> Any:
        worker = getattr(self, "connector_worker", None)
        if worker is not None:
            for part in parts.on:
                part(worker, connector_metadata)
        return method(self, connector_metadata)

    return bind_connector_metadata


def begin(method: Method, parts: Parts) -> Method:
    """Of ``start_load_kv``.

    A part is (worker, metadata) -> what is to be entered meanwhile, or None; one patch has some.
    """

    @wraps(method)
    def start_load_kv(self: Any, metadata: Any) -> Any:
        meanwhile = None
        for part in parts.on:
            meanwhile = part(self, metadata) or meanwhile
        if meanwhile is None:
            return method(self, metadata)
        with meanwhile:
            return method(self, metadata)

    return start_load_kv


def hear(method: Method, parts: Parts) -> Method:
    """Of ``update_from_output``; a part is (scheduler, output of connectors) -> nothing."""

    @wraps(method)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        of_connectors = model_runner_output.kv_connector_output
        if of_connectors is not None:
            for part in parts.on:
                part(self, of_connectors)
        return method(self, scheduler_output, model_runner_output)

    return update_from_output


def build(method: Method, parts: Parts) -> Method:
    """Of ``build_connector_meta``, of a connector or of its scheduler.

    A part is (owner, scheduler's output) -> what is done with the metadata, or None.
    """

    @wraps(method)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        ends = []
        for part in parts.on:
            end = part(self, scheduler_output)
            if end is not None:
                ends.append(end)
        metadata = method(self, scheduler_output)
        for end in ends:
            end(metadata)
        return metadata

    return build_connector_meta
