"""The calls that vLLM makes of a connector in each step of the engine, and patches' parts in them.

A step in which nothing is loaded takes a connector some tens of microseconds. What wrapt puts in a
method's place takes two or three of its own, however little it does, and a plain function a tenth
of that: so what the newest releases call in every step is replaced by one, which all patches share
that have a part there, and which looks at nothing but these parts. What older releases need beside
that is wrapped (``kvpatch.legacy``). The calls that exchange messages are in
``kvpatch.worker.envelope``.

=================================  =======================================================  ========
call                               of                                                       made by
=================================  =======================================================  ========
``schedule``                       vLLM's scheduler, first of all                           around
``update_from_output``             vLLM's scheduler, of what a step has come to             hear
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

from collections.abc import Callable
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
    """Runs the parts' functions before and after each call; parts are :class:`Around`."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        on = parts.on
        for before, _ in on:
            if before is not None:
                before(self)
        found = method(self, *args, **kwargs)
        for _, after in on:
            if after is not None:
                after(self, found)
        return found

    return call


def amend(method: Method, parts: Parts) -> Method:
    """Changes the value that a call returns; a part is (owner, value) -> new value."""

    @wraps(method)
    def call(self: Any) -> Any:
        on = parts.on
        found = method(self)
        for part in on:
            found = part(self, found)
        return found

    return call


def hear(method: Method, parts: Parts) -> Method:
    """Passes what connectors report to parts, before ``update_from_output`` handles it.

    A part is (scheduler, output of connectors) -> nothing.
    """

    @wraps(method)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        of_connectors = model_runner_output.kv_connector_output
        if of_connectors is not None:
            for part in parts.on:
                part(self, of_connectors)
        return method(self, scheduler_output, model_runner_output)

    return update_from_output
