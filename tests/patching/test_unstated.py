"""What blocks of a peer may be, from a prompt and how many of them it fills."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.vllm.introducing import introductions_of
from kvpatch.vllm.unstated import (
    BlocksUnknown,
    BlockTokens,
    Introductions,
    KernelSizes,
    Span,
    sizes_by_item,
    span_of,
    step_of_cuts,
)

pytestmark = pytest.mark.patching

SIZES = st.sampled_from((16, 32, 48, 64, 96, 128, 256))
TOKENS = st.integers(1, 4000)


def _named(tokens: int, size: int, drafted: int, full_blocks_only: bool) -> int:
    """The blocks that a peer names, by the release's rule."""
    blocks = -(-(tokens + drafted) // size)
    return blocks - 1 if full_blocks_only and tokens % size else blocks


@given(TOKENS, SIZES, st.booleans())
def test_the_true_size_is_always_possible(tokens: int, size: int, full_blocks_only: bool) -> None:
    blocks = _named(tokens, size, 0, full_blocks_only)
    assert span_of(tokens, blocks, full_blocks_only=full_blocks_only).has(size)


@given(TOKENS, SIZES, st.integers(0, 16))
def test_slots_for_drafted_tokens_leave_it_possible(tokens: int, size: int, drafted: int) -> None:
    assert span_of(tokens, _named(tokens, size, drafted, False), full_blocks_only=False).has(size)


@given(
    st.lists(st.tuples(TOKENS, st.integers(0, 16)), min_size=1, max_size=4),
    SIZES,
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.booleans(),
)
def test_items_of_another_size_are_never_taken_for_ours(
    prompts: list[tuple[int, int]], size: int, theirs: int, ours: int, full_blocks_only: bool
) -> None:
    """Whatever prompts come: the size that is read by is the true one, or none is."""
    seeming, rest = divmod(size * theirs, ours)
    if rest:
        return
    blocks = BlockTokens(
        sizes_by_item(seeming, ours), (seeming,), full_blocks_only=full_blocks_only
    )
    for tokens, drafted in prompts:
        named = _named(tokens, size, 0 if full_blocks_only else drafted, full_blocks_only)
        blocks.learn(tokens, named)
        try:
            found = blocks.tokens()
        except BlocksUnknown:
            continue
        assert found == size
        assert theirs == ours


@given(SIZES, st.integers(0, 40))
def test_three_blocks_tell(size: int, more: int) -> None:
    blocks = BlockTokens(sizes_by_item(size, 2), (size,))
    blocks.learn(3 * size + more, _named(3 * size + more, size, 0, False))
    assert blocks.tokens() == size


def test_a_request_that_cannot_be_teaches_nothing() -> None:
    blocks = BlockTokens((16, 32, 64), (32,))
    with pytest.raises(BlocksUnknown, match="100 of them are named"):
        blocks.learn(40, 100)
    blocks.learn(150, 5)
    assert blocks.tokens() == 32


@pytest.mark.parametrize("is_first", [True, False])
def test_one_request_of_two_prompts_is_got_over(is_first: bool) -> None:
    """D's prompt has 150 tokens and P's 300: ten blocks of 32, which look like blocks of 16."""
    blocks = BlockTokens((16, 32, 64), (16, 32, 64), assumed=32)
    prompts = [(150, 10), (300, 10)] if is_first else [(300, 10), (150, 10)]
    blocks.learn(*prompts[0])
    with pytest.raises(BlocksUnknown, match="the same prompt"):
        blocks.learn(*prompts[1])

    blocks.learn(10, 1)  # which would be read either way
    with pytest.raises(BlocksUnknown, match="may have 16, 32 tokens"):
        blocks.tokens()
    blocks.learn(310, 10)
    assert blocks.tokens() == 32


def test_a_scheduler_gets_over_one_too_and_asks_for_nothing_meanwhile() -> None:
    introductions = Introductions(32)
    assert introductions.allow("p", 300, 10, 300)
    assert not introductions.allow("p", 150, 10, 150)
    assert not introductions.allow("p", 10, 1, 10)
    assert introductions.allow("p", 310, 10, 310)
    assert introductions.allow("p", 10, 1, 10)


WINDOWS = st.sampled_from((16, 64, 100, 1024))


@given(st.lists(st.tuples(TOKENS, st.integers(0, 16)), min_size=1, max_size=4), WINDOWS, SIZES)
def test_windows_never_tell_a_wrong_size(
    prompts: list[tuple[int, int]], window: int, size: int
) -> None:
    blocks = BlockTokens(range(16, 4097, 16), range(16, 4097, 16), assumed=16)
    blocks.assume_nothing()
    scheduler = Introductions(16, step_tokens=4097, window_tokens=window)
    for tokens, drafted in prompts:
        # What 0.18 to 0.20 do: the end of a table, as long as the window is and one block.
        table = -(-(tokens + drafted) // size)
        named = len(range(table)[-(-(-window // size) + 1) :])
        blocks.learn(tokens, named, window)
        try:
            found = blocks.tokens()
        except BlocksUnknown:
            found = None
        assert found in (None, size)
        if size == 16 and scheduler.allow("p", tokens, named, tokens):
            narrow = BlockTokens(range(16, 4097, 32), range(16, 4097, 32))
            narrow.learn(tokens, named, window)
            assert prompts[1:] or narrow.tokens() == size


def test_a_window_of_one_block_tells_little() -> None:
    """Of 16 tokens two blocks are named at most, of 16 tokens or of 48."""
    scheduler = Introductions(16, step_tokens=4097, window_tokens=16)
    assert not scheduler.allow("p", 100, 2, 100)
    assert not scheduler.allow("p", 10, 1, 10)
    assert scheduler.allow("p", 20, 2, 20)
    assert scheduler.allow("p", 10, 1, 10)


def test_another_size_than_the_readable_one_is_refused() -> None:
    blocks = BlockTokens((16, 32, 64), (32,))
    blocks.learn(150, 10)
    with pytest.raises(BlocksUnknown, match="--kv-cache-dtype"):
        blocks.tokens()


@pytest.mark.parametrize(
    ("kernel_tokens", "parts"), [(16, (1,)), (32, (1,)), (64, (1, 2, 4)), (48, None)]
)
def test_flashinfer_cuts_what_is_larger_than_64(
    kernel_tokens: int, parts: tuple[int, ...] | None
) -> None:
    sizes = KernelSizes(((16, 32, 64),), ((),), blocks=(1, 8, 16, 32, 64, 128, 256))
    found = sizes.parts(kernel_tokens)
    assert found == parts if parts else len(found) > 50


def test_blocks_of_any_size_are_cut_oddly() -> None:
    """From 0.18 on 96 is a size too, and 32 the largest that divides it."""
    assert KernelSizes(((16, 32, 64),), ((),)).parts(32)[:3] == (1, 3, 5)


def test_backends_that_take_multiples_cut_none() -> None:
    assert KernelSizes(((), ()), ((16,), (1,))).parts(48) == (1,)
    assert KernelSizes(((64,), ()), ((), (16,))).parts(64)[:2] == (1, 2)


@given(st.lists(TOKENS, min_size=1, max_size=5), SIZES, SIZES, st.booleans())
def test_a_scheduler_lets_nothing_through_that_workers_cannot_tell(
    prompts: list[int], size: int, own: int, full_blocks_only: bool
) -> None:
    introductions = Introductions(own, full_blocks_only=full_blocks_only)
    blocks = BlockTokens(sizes_by_item(size, 2), (size,), full_blocks_only=full_blocks_only)
    for tokens in prompts:
        named = _named(tokens, size, 0, full_blocks_only)
        if named:
            blocks.learn(tokens, named)
        if introductions.allow("p", tokens, named, tokens):
            assert blocks.tokens() == size


def test_a_scheduler_asks_for_nothing_before_it_is_told() -> None:
    introductions = Introductions(16, full_blocks_only=False)
    assert not introductions.allow("p", 16, 1, 16)
    assert introductions.allow("p", 79, 5, 79)
    assert introductions.allow("p", 16, 1, 16)
    assert not introductions.allow("q", 16, 1, 16)


def test_a_scheduler_asks_for_no_more_than_whole_blocks_hold() -> None:
    """0.10.0: 150 tokens are two whole blocks of 64, and 144 in ours of 16."""
    introductions = Introductions(16, full_blocks_only=True)
    assert not introductions.allow("p", 319, 4, 304)
    assert introductions.allow("p", 128, 2, 128)
    assert not introductions.allow("p", 150, 2, 144)


def test_spans() -> None:
    assert Span(3, 5).within(Span(4)) == Span(4, 5)
    assert Span(6).within(Span(1, 5)).is_empty
    assert Span(16, 31).tells(None) and not Span(16, 32).tells(None)
    assert Span(50, 127).tells(64) and not Span(64, 128).tells(64) and Span(65, 127).tells(64)
    assert not Span(64).tells(64)


def test_any_two_blocks_tell_where_blocks_are_small() -> None:
    """48 tokens in kernel blocks of 16: a prompt of one block says nothing, one of two does."""
    introductions = Introductions(16, step_tokens=step_of_cuts(16, "cuda"))

    assert not introductions.allow("p", tokens=10, blocks=1, needed_tokens=10)
    assert introductions.allow("p", tokens=20, blocks=2, needed_tokens=20)
    assert introductions.allow("p", tokens=10, blocks=1, needed_tokens=10)
    assert not introductions.allow("another", tokens=16, blocks=1, needed_tokens=16)
    assert step_of_cuts(128, "cuda") == 64
    assert step_of_cuts(128, "cpu") is None


@pytest.mark.parametrize(
    ("method", "allows"), [(None, True), ("ngram", True), ("eagle", False), ("deepseek_mtp", False)]
)
def test_0100_loads_nothing_where_it_reserves_slots_for_drafts(method, allows):
    """A hit of one block of 16, 64 tokens in all: 0.10.0 names 4 blocks of its own for 3 of P's."""
    speculation = None if method is None else SimpleNamespace(method=method)
    model = SimpleNamespace(use_mla=True, get_total_num_kv_heads=lambda: 8)
    scheduler = SimpleNamespace(
        block_size=16,
        vllm_config=SimpleNamespace(speculative_config=speculation, model_config=model),
    )
    introductions = introductions_of(scheduler, full_blocks_only=True)
    assert introductions.allow("p", 64, 4, 64) is allows
    later = introductions_of(scheduler, full_blocks_only=False)
    assert later.allow("p", 64, 4, 64)
