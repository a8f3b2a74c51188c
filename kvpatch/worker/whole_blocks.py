"""What lies in blocks that are no rows of tokens: recurrent states, and rings of keys."""

from __future__ import annotations

from kvpatch.core.errors import PeerRefused
from kvpatch.core.text import shown
from kvpatch.worker.release_worker import ReleaseWorker

#: vLLM's spec of a ring of keys. Its blocks' tokens are its slots, as many as the model and the
#: drafted tokens ask for, but of Step5 (0.33), whose slots follow from pages.
_RING = "CircularBufferSpec"


def contents_of(release: ReleaseWorker) -> str | None:
    """In words, of all layers that a worker has: the types of states and the slots of rings.

    No handshake states them (<= 0.33): of states it has the bytes, which float16 and bfloat16 have
    in common, and of rings nothing. None where no layer has either, and <= 0.17, which has no plan
    of groups.
    """
    if not release.facts.has_cache_groups:
        return None
    types, rings = set[str](), set[int]()
    for layer in release.worker._layer_specs:
        spec = release.spec_of(layer)
        if hasattr(spec, "shapes"):
            types.add(",".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes))
        elif type(spec).__name__ == _RING:
            rings.add(int(spec.block_size))
    words = [f"states of {of}" for of in sorted(types)]
    words += [f"a ring of {slots}" for slots in sorted(rings)]
    return "; ".join(words) or None


def check_contents(ours: str, theirs: object) -> None:
    """Whether P's blocks hold what ours do, by its own kvpatch's word.

    Args:
        theirs: None where P says nothing, as without kvpatch.

    Raises:
        PeerRefused: they do not, and would be read for what they are not.
    """
    if theirs is not None and theirs != ours:
        raise PeerRefused(
            f"blocks that are no rows of tokens hold {ours} here, and {shown(theirs)} at P",
            "give both sides one --mamba-cache-dtype, --mamba-ssm-cache-dtype and --block-size, "
            "and have them draft as many tokens",
        )
