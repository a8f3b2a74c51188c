"""What a peer may be for all that its handshake says, and what the operator declares of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpatch.core import settings
from kvpatch.vllm.halves import halves_of_peer
from kvpatch.vllm.likeness import has_two_layouts, is_alike
from kvpatch.vllm.local_geometry import LocalGeometry
from kvpatch.vllm.remote_geometry import refusal, tokens_in_bytes
from kvpatch.vllm.unstated import KernelSizes
from kvpatch.vllm.wire import PeerRefused, Statement


@dataclass(frozen=True)
class Candidates:
    """What a peer may be: one of the statements, completed.

    Attributes:
        is_open: whether content has to prove which one, or that it is the only one.
    """

    statements: tuple[Statement, ...]
    is_open: bool = False


def candidates_of(ours: LocalGeometry, peer: Statement) -> Candidates:
    """What follows from a statement beside what it says.

    Raises:
        PeerRefused: its bytes are no whole number of tokens, or it is not what the operator
            has declared.
    """
    states_layout = peer.layout is not None
    if not states_layout and halves_of_peer(ours, peer) == "apart":
        peer = replace(peer, layout="NHD")  # as kvcached's are, with keys and values apart
    if peer.block_tokens is None:
        found = _by_bytes(ours, peer)
    elif peer.kernel_blocks_per_block is None and ours.kernel_sizes is not None:
        found = _by_cut(ours, peer, ours.kernel_sizes)
    else:
        _check_block_size(ours, peer)
        found = Candidates((peer,))
    _check_layout(ours, peer)
    return found


def _by_bytes(ours: LocalGeometry, peer: Statement) -> Candidates:
    """To 0.11.0, where no block is cut, and items may be of another size than ours."""
    tokens = tokens_in_bytes(ours, peer)
    peer = replace(peer, block_tokens=tokens, kernel_blocks_per_block=1)
    declared = _check_block_size(ours, peer)
    layouts = _layouts(ours, peer)
    statements = tuple(replace(peer, layout=layout) for layout in layouts)
    return Candidates(statements, is_open=declared is None or len(layouts) > 1)


def _layouts(ours: LocalGeometry, peer: Statement) -> tuple[str | None, ...]:
    """0.10.0 states no layout."""
    if not has_two_layouts(ours, peer):
        return (peer.layout,)
    declared = settings.peer_layout()
    if declared is not None:
        return (declared,)
    if settings.unstated_layout() == "prove":
        return ("HND", "NHD")
    return (peer.layout if is_alike(ours, peer) else ours.inner_layout,)


def _by_cut(ours: LocalGeometry, peer: Statement, sizes: KernelSizes) -> Candidates:
    """0.11.1 to 0.20: how many kernel blocks a block has is open where a backend may cut."""
    kernel_tokens = peer.block_tokens or ours.block_tokens
    every = sizes.parts(kernel_tokens)
    # It counts kernel blocks, so many to a block.
    parts = tuple(n for n in every if peer.blocks % n == 0) or every
    declared = settings.peer_block_size()
    if declared is not None:
        parts = tuple(n for n in parts if n * kernel_tokens == declared)
    if not parts:
        raise _not_as_declared(ours, peer, f"kernel blocks of {kernel_tokens} tokens")
    statements = tuple(replace(peer, kernel_blocks_per_block=n) for n in parts)
    return Candidates(statements, is_open=len(statements) > 1)


def _check_block_size(ours: LocalGeometry, peer: Statement) -> int | None:
    """What the operator has declared, where that is what the handshake comes to.

    Raises:
        PeerRefused: it is not.
    """
    declared = settings.peer_block_size()
    tokens = peer.block_tokens
    parts = peer.kernel_blocks_per_block
    if declared is None or tokens is None:
        return declared
    if declared % tokens if parts is None else declared != tokens * parts:
        raise _not_as_declared(ours, peer, f"blocks of {tokens * (parts or 1)} tokens")
    return declared


def _check_layout(ours: LocalGeometry, peer: Statement) -> None:
    declared, stated = settings.peer_layout(), peer.inner_layout
    if declared is not None and stated not in (None, declared):
        raise refusal(
            ours,
            peer,
            f"{settings.PEER_LAYOUT} declares {declared} and its handshake says {peer.layout}: "
            "set it to what P has, or unset it",
        )


def _not_as_declared(ours: LocalGeometry, peer: Statement, found: str) -> PeerRefused:
    return refusal(
        ours,
        peer,
        f"{settings.PEER_BLOCK_SIZE} declares blocks of {settings.peer_block_size()} tokens, and "
        f"its handshake comes to {found}: set it to the --block-size of P, or unset it",
    )
