"""What P states of its prompt, and how far D finds it to be its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.load.prompt_hashes import (
    FIELD,
    METADATA,
    StatedPrompt,
    absent_images,
    lacks_images,
    names_images,
    read_prompt,
    state_prompt,
)

_LONG = 32_000
_LONGEST_TEXT = 700


def _image(offset: int, identifier: str, data: tuple[str, ...] | None = ("pixel_values",)) -> Any:
    """Fake: data is None where D's client sent a name alone (`/inference/v1/generate`)."""
    return SimpleNamespace(
        identifier=identifier,
        mm_position=SimpleNamespace(offset=offset, length=6),
        data=None if data is None else dict.fromkeys(data),
    )


def _adapter(stated: str) -> Any:
    """Fake: of a text like ``name`` or ``name=path``."""
    name, _, path = stated.partition("=")
    return SimpleNamespace(lora_name=name, lora_path=path or f"/adapters/{name}")


def _request(
    tokens: list[int], answer: tuple[int, ...] = (), adapter: str = "", images: tuple[Any, ...] = ()
) -> Any:
    """Fake: of vLLM's request what is looked at."""
    return SimpleNamespace(
        prompt_token_ids=tokens,
        prompt_embeds=None,
        output_token_ids=list(answer),
        num_tokens=len(tokens) + len(answer),
        lora_request=_adapter(adapter) if adapter else None,
        mm_features=list(images),
    )


def _common(stated: Any, own: Any, tokens: int | None = None) -> int | None:
    """Tokens that D finds in common, after P's statement has travelled as text."""
    count = len(stated.prompt_token_ids) if tokens is None else tokens
    text = str(state_prompt(stated, count, names_images=True))
    found = read_prompt({FIELD: text})
    assert found is not None
    return found.common_tokens(own, names_images=True)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3000),
    st.lists(st.integers(0, 5), max_size=3000),
)
def test_no_token_is_common_that_differs(first: list[int], second: list[int]) -> None:
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    found = _common(_request(first), _request(second))
    assert found is not None
    assert found <= same
    if same == len(first):
        assert found == same, "all of P's prompt is in D's"
    assert found >= same - 16 * -(-len(first) // (16 * 62)), "no more than a step is lost"


def test_a_long_prompt_is_told_in_a_short_text() -> None:
    tokens = list(range(_LONG))
    assert len(str(state_prompt(_request(tokens), _LONG, names_images=True))) < _LONGEST_TEXT
    assert _common(_request(tokens), _request([*tokens, 7])) == _LONG
    other = [*tokens[:20_000], 3, *tokens[20_001:]]
    assert 20_000 - 512 < (_common(_request(tokens), _request(other)) or 0) <= 20_000


def test_an_answers_last_token_is_not_held() -> None:
    """Nobody has computed its keys and values, whatever the scheduler has counted."""
    turn = _request([1, 2, 3], answer=(4, 5))
    assert state_prompt(turn, 9, names_images=True).tokens == 4
    assert state_prompt(turn, 3, names_images=True).tokens == 3
    assert _common(turn, _request([1, 2, 3, 4, 9]), tokens=4) == 4
    assert _common(turn, _request([1, 2, 3]), tokens=4) == 3, "the prompt has a hash of its own"


def test_adapters_and_images_are_told_apart() -> None:
    tokens = list(range(100))
    image = _image(40, "cat")
    assert _common(_request(tokens, adapter="a"), _request(tokens, adapter="b")) == 0
    assert _common(_request(tokens), _request(tokens, adapter="b")) == 0
    mounted, moved = _request(tokens, adapter="a=/mnt/a"), _request(tokens, adapter="a=/tmp/a-v2")
    assert _common(_request(tokens, adapter="a"), mounted) == 100
    assert _common(_request(tokens, adapter="a"), moved) == 0, "other weights of one name"
    assert _common(_request(tokens, images=(image,)), _request(tokens, images=(image,))) == 100
    for other in (_image(40, "dog"), _image(41, "cat")):
        found = _common(_request(tokens, images=(image,)), _request(tokens, images=(other,)))
        assert found == 32, "up to the hash before the image"


_NOISE = _image(40, "noise of this request", ("image_embeds", "image_grid_thw"))


def _engine(*, has_encoder: bool = False) -> Any:
    """Fake: a scheduler."""
    encoder = SimpleNamespace(is_ec_consumer=has_encoder) if has_encoder else None
    return SimpleNamespace(vllm_config=SimpleNamespace(ec_transfer_config=encoder))


_PHI = ("input_image_embeds", "image_attention_mask")  # pixels, whatever their name says


@pytest.mark.parametrize("own", [(), (_NOISE,), (_NOISE, _NOISE)])
@pytest.mark.parametrize("adapter", ["", "chosen by the image"])
def test_a_d_without_images_is_compared_by_its_tokens(own: tuple[Any, ...], adapter: str) -> None:
    """Some routers send D P's tokens alone: what D would compute there is of no image."""
    tokens = list(range(100))
    stated = _request(tokens, adapter=adapter, images=(_image(40, "cat"),))
    field = str(state_prompt(stated, 100, names_images=True))
    requests = {
        100: _request(tokens, images=own),
        48: _request([*tokens[:50], 7, *tokens[51:]], images=own),
    }
    for common, request in requests.items():
        request.kv_transfer_params = {FIELD: field}
        assert lacks_images(_engine(), request)
        assert _common(stated, request) == common


def test_who_has_images_or_needs_none_lacks_none() -> None:
    tokens, image = list(range(100)), _image(40, "cat")
    given = _image(40, "cat", ("image_embeds",))
    for at_p, at_d in (
        ((image,), (_image(40, "dog", _PHI),)),
        ((image,), (_NOISE, _image(60, "dog"))),
        ((given,), (given,)),
        ((), ()),
        ((), (_NOISE,)),
    ):
        request = _request(tokens, images=at_d)
        stated = state_prompt(_request(tokens, images=at_p), 100, names_images=True)
        request.kv_transfer_params = {FIELD: str(stated)}
        assert not lacks_images(_engine(), request)
    assert not lacks_images(_engine(), SimpleNamespace(kv_transfer_params=None))


@pytest.mark.parametrize(
    ("own", "adapter", "is_named", "lacks"),
    [
        (48, "", True, True),  # up to a hash behind the image, which begins at 40
        (47, "", True, False),
        (40, "", True, False),
        (0, "", True, False),
        (40, "chosen by the image", True, True),
        (40, "", False, True),
        (0, "", False, True),
    ],
)
def test_a_history_without_its_image_lacks_none(
    own: int,
    adapter: str,
    is_named: bool,  # noqa: FBT001
    lacks: bool,  # noqa: FBT001
) -> None:
    """D can compute what begins like P's prompt in front of P's image alone."""
    tokens = list(range(100))
    at_p = _request(tokens, adapter=adapter, images=(_image(40, "cat"),))
    stated = state_prompt(at_p, 100, names_images=is_named)
    request = _request([*tokens[:own], *range(200, 260)])
    request.kv_transfer_params = {FIELD: str(stated)}
    assert lacks_images(_engine(), request) is lacks
    assert stated.common_tokens(request, names_images=True) == own // 16 * 16


@pytest.mark.parametrize("field", sorted(METADATA))
@pytest.mark.parametrize("name", ["cat", "hash of the metadata"])
@pytest.mark.parametrize("is_numbered", [False, True])
def test_an_image_without_its_embeddings_is_loaded(
    field: str,
    name: str,
    is_numbered: bool,  # noqa: FBT001
) -> None:
    """A KV consumer takes an image's size alone (from 0.28 on): what computes it ends the engine.

    A client may name it (``uuid``), alike on both sides.
    """
    tokens = list(range(100))
    at_p = _request(tokens, images=(_image(40, "cat"),))
    stated = state_prompt(at_p, 100, names_images=not is_numbered)
    request = _request(tokens, images=(_image(40, name, (field,)),))
    request.kv_transfer_params = {FIELD: str(stated)}
    absent = absent_images(_engine(), request)
    assert absent == 46, "to its end"
    assert lacks_images(_engine(), request)
    named = not is_numbered
    assert stated.common_tokens(request, names_images=named, absent=absent) == 100


def _on_cpu(*names: str) -> dict[str, Any]:
    """Fake: fields that a model keeps in the host's memory."""
    return dict.fromkeys(names, SimpleNamespace(field=SimpleNamespace(keep_on_cpu=True)))


@pytest.mark.parametrize(
    ("data", "absent"),
    [
        (None, 46),
        (_on_cpu("image_num_patches"), 46),
        (_on_cpu("feature_attention_mask") | {"audio_feature_lengths": None}, 46),
        (_on_cpu("grid_thws") | {"pixel_values": None}, 0),
        (_on_cpu("grid_thws") | {"pixel_values": SimpleNamespace(field=None)}, 0),
    ],
)
def test_an_image_of_a_name_or_of_its_metadata_alone_is_loaded(data: Any, absent: int) -> None:
    """D's client may send either to `/inference/v1/generate`: what computes it ends the engine."""
    tokens, image = list(range(100)), _image(40, "cat")
    stated = state_prompt(_request(tokens, images=(image,)), 100, names_images=True)
    at_d = _image(40, "cat")
    at_d.data = data
    request = _request(tokens, images=(at_d,))
    request.kv_transfer_params = {FIELD: str(stated)}

    assert absent_images(_engine(), request) == absent
    assert lacks_images(_engine(), request) is bool(absent)
    assert stated.common_tokens(request, names_images=True, absent=absent) == 100


@pytest.mark.parametrize(
    ("first", "common"), [("cat", 48), ("hash of the metadata", 100)], ids=["uuid", "hash"]
)
def test_images_behind_one_that_is_absent_are_compared(first: str, common: int) -> None:
    """As far as D can compute the prompt; else it loads all, as stock does."""
    tokens = list(range(100))
    at_p = _request(tokens, images=(_image(20, "cat"), _image(60, "dog")))
    stated = state_prompt(at_p, 100, names_images=True)
    at_d = _image(20, first, ("image_grid_thw",)), _image(60, "cow")
    request = _request(tokens, images=at_d)
    request.kv_transfer_params = {FIELD: str(stated)}
    assert lacks_images(_engine(), request)
    absent = absent_images(_engine(), request)
    assert absent == 26
    assert stated.common_tokens(request, names_images=True, absent=absent) == common


def test_no_image_is_absent_whose_content_comes_or_is_there() -> None:
    tokens = list(range(100))
    of_encoder = _request(tokens, images=(_image(40, "cat", ("image_grid_thw",)),))
    assert absent_images(_engine(has_encoder=True), of_encoder) == 0
    for data in ((), ("address",), ("image_grid_thw", "pixel_values"), _NOISE.data):
        assert absent_images(_engine(), _request(tokens, images=(_image(40, "cat", data),))) == 0
    assert absent_images(_engine(), SimpleNamespace()) == 0
    stated = state_prompt(_request(tokens, images=(_image(40, "cat"),)), 100, names_images=True)
    of_encoder.kv_transfer_params = {FIELD: str(stated)}
    assert not lacks_images(_engine(has_encoder=True), of_encoder)


@pytest.mark.parametrize(
    ("has_prefix_cache", "models", "is_named"),
    [
        (True, {"multimodal_config": {"mm_processor_cache_gb": 0}}, True),
        (False, {"multimodal_config": {"mm_processor_cache_gb": 4}}, True),
        (False, {"multimodal_config": {"mm_processor_cache_gb": 0.5}}, True),
        (False, {"multimodal_config": {"mm_processor_cache_gb": 0}}, False),
        (False, {"multimodal_config": {}}, False),
        (False, {"multimodal_config": None}, False),
        (False, {}, False),
        (True, {}, True),
    ],
)
def test_images_are_numbered_where_both_caches_are_off(
    has_prefix_cache: bool,  # noqa: FBT001
    models: dict[str, Any],
    is_named: bool,  # noqa: FBT001
) -> None:
    of_images = models.get("multimodal_config")
    if of_images is not None:
        models = {"multimodal_config": SimpleNamespace(**of_images)}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_cache),
        model_config=SimpleNamespace(**models),
    )
    assert names_images(SimpleNamespace(vllm_config=config)) is is_named


def test_a_p_that_names_no_images_is_compared_by_its_tokens() -> None:
    """Where vLLM numbers them: by a D that has no images; one that has them loads as stock does."""
    tokens, image = list(range(100)), _image(40, "1")
    stated = state_prompt(_request(tokens, images=(image,)), 100, names_images=False)
    assert stated.common_tokens(_request([*tokens[:50], 7]), names_images=True) == 48
    assert stated.common_tokens(_request(tokens, images=(image,)), names_images=True) is None


@pytest.mark.parametrize(
    ("modality", "name", "is_named"),
    [
        ("vision_chunk", "0123456789abcdef-0", False),
        ("vision_chunk", "an adapter:0123456789abcdef-0", False),
        ("vision_chunk", "my-video-0", True),
        ("image", "0123456789abcdef-0", True),
    ],
)
def test_a_name_that_vllm_draws_is_none(modality: str, name: str, is_named: bool) -> None:  # noqa: FBT001
    """From 0.15 on each API server draws those of a video's chunks: they differ at P and D."""
    chunk = _image(40, name)
    chunk.modality = modality
    stated = state_prompt(_request(list(range(100)), images=(chunk,)), 100, names_images=True)
    assert bool(stated.chain) is is_named


@pytest.mark.parametrize("names_images", [True, False])
def test_what_has_no_name_is_not_compared(names_images: bool) -> None:  # noqa: FBT001
    tokens = list(range(100))
    named = _request(tokens, images=(_image(4, "cat"),))
    stated = state_prompt(named, 100, names_images=names_images)
    assert bool(stated.chain) == names_images
    if not names_images:
        good = state_prompt(named, 100, names_images=True)
        assert good.common_tokens(named, names_images=False) is None
    embedded = _request(tokens)
    embedded.prompt_embeds = object()
    assert state_prompt(embedded, 100, names_images=True) == StatedPrompt(100, 100, b"")


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "1/",
        "1/a/a",
        "2/a/a/",
        "1/a/a/xx",
        "1/ffffffff/1/AAAAAAAA",
        "1/2/2/AAAAAAA=",
        "1/2/2/AAAAAAAA/",
        "1/2/2/AAAAAAAA/AAAA",
        {},
    ],
)
def test_what_no_p_states_is_nothing(text: Any) -> None:
    found = read_prompt({FIELD: text})
    assert found is None or not found.chain
