"""A peer with another compatibility hash, as kvpatch on D names it, accepts it or refuses it."""

from __future__ import annotations

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, PeerRefused
from kvpatch.peer.peer_hash import Explanation, not_accepted
from kvpatch.tools.planning.factors import compared_factors, versions
from kvpatch.tools.planning.pair import Pair


def named_difference(pair: Pair) -> Explanation | None:
    """How P differs in what the hash has, where D accepts it; None where nothing differs.

    Raises:
        PeerRefused: D does not, or what differs changes what bytes mean.
        BadOptions: ``KVPATCH_ACCEPT`` names what cannot be accepted.
    """
    p, d = pair.prefill, pair.decode
    found = list(compared_factors(pair))
    if not found:
        return None
    content = next((one for one in found if one.compared.kind != "name"), None)
    if content is not None or not d.facts.states_hash:
        first = content or found[0]
        raise PeerRefused(str(first), first.cure)
    theirs, ours = versions(pair)
    backends = p.backend.name, d.backend.name
    named = Explanation(
        theirs, p.facts.release, backends[0], ours, backends[1], _word_of_dtype(pair)
    )
    accepted = _accepted(pair)
    if not set(named.factors) <= set(accepted):
        raise not_accepted(named, accepted)
    return named


def _word_of_dtype(pair: Pair) -> str:
    """As the hash has it: what ``--kv-cache-dtype`` says."""
    return str(pair.prefill.arguments.option("kv_cache_dtype", "auto"))


def _accepted(pair: Pair) -> tuple[str, ...]:
    """What ``KVPATCH_ACCEPT`` lists on D."""
    names = settings.listed(pair.decode.arguments.environment.get(settings.ACCEPT, ""))
    for name in names:
        if name not in settings.ACCEPTABLE:
            raise BadOptions(
                f"{settings.ACCEPT}={name!r} can not be accepted; {', '.join(settings.ACCEPTABLE)} "
                "can be",
                "leave it out",
            )
    return names
