"""The facts that P states of a prompt: its length, and a chain of hashes over its tokens.

D compares it with its own prompt, and loads no more than both have in common. Each hash covers all
tokens up to its place, so that the last equal one tells how far the prompts are the same. A hash
also covers images by the name of their content, and the LoRA adapter: both change keys and values.

Some routers send D the tokens of a prompt with images and not the images, or embeddings of noise in
their place, or an image's size or name alone. Such a D can only load: what it computed itself would
be of no image, and an image of which it has no content ends its engine. For it P states a second
chain, over the tokens alone.
"""

from __future__ import annotations

import re
from array import array
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import starmap
from pathlib import PurePath
from typing import Any

FIELD = "kvpatch_prompt"

#: Bytes of one hash. Two unlike prompts have an equal one in 1 of 2**48 places.
_HASH_BYTES = 6
_MOST_HASHES = 64
#: Hashes are a multiple of so many tokens apart.
_STEP_TOKENS = 16
#: What vLLM calls embeddings that stand for an image; some models call pixels by longer names.
_EMBEDDINGS = frozenset(("image_embeds", "video_embeds", "audio_embeds"))
#: What vLLM keeps of embeddings that a client leaves out, as a KV consumer allows from 0.28 on.
#: Its models declare them as metadata (``embedding_fields``), and one adds the last by itself.
METADATA = frozenset(
    (
        "image_grid_thw",
        "video_grid_thw",
        "image_sizes",
        "video_image_sizes",
        "timestamps",
        "second_per_grid_ts",
        "audio_feature_lengths",
        "audio_num_tokens",
        "use_audio_in_video",
    )
)
#: What vLLM calls a chunk of a video that its client has not named; behind an adapter's name.
_DRAWN = re.compile(r"(?s:.*:)?[0-9a-f]{16}-[0-9]+")
_FORM = re.compile(
    r"1/([0-9a-f]{1,8})/([0-9a-f]{1,8})/([0-9A-Za-z_-]{0,512})(?:/([0-9A-Za-z_-]{1,512}))?"
)


@dataclass(frozen=True)
class StatedPrompt:
    """A prompt as P's answer states it (``kv_transfer_params.kvpatch_prompt``, one text).

    Attributes:
        tokens: whose keys and values P holds, those of its answer too.
        prompt_tokens: of these, the ones that P was sent.
        chain: the hashes at :func:`_places`, one behind the other; empty where P cannot name
            its contents (embeddings, images without a name).
        token_chain: the same over the tokens alone, where the prompt has images; else empty.
    """

    tokens: int
    prompt_tokens: int
    chain: bytes
    token_chain: bytes = b""

    def __str__(self) -> str:
        chains = [self.chain, self.token_chain] if self.token_chain else [self.chain]
        texts = [urlsafe_b64encode(chain).decode() for chain in chains]
        return "/".join((f"1/{self.tokens:x}/{self.prompt_tokens:x}", *texts))

    def common_tokens(self, request: Any, *, names_images: bool, absent: int = 0) -> int | None:
        """Returns how many tokens of P's prompt a request begins with; None where it is not known.

        Args:
            names_images: False where names of images do not follow from their content.
            absent: as :func:`absent_images` counts.
        """
        tokens = _prompt(request)
        if tokens is None:
            return None
        by_name = None
        if self.chain and _is_named(request, names_images):
            by_name = self._common(self.chain, tokens, request)
        if absent:  # images behind it, which D has, may be others than P's
            is_without = bool(self.token_chain) and absent > (by_name or 0)
        else:
            is_without = self.lacks_images(request)
        return self._common(self.token_chain, tokens) if is_without else by_name

    def lacks_images(self, request: Any) -> bool:
        """True if a request has not got images of what it has in common: D cannot compute it.

        In place of images it may have embeddings, which a router made up. One with none at all
        lacks none where the last token in common is in front of P's first image.
        """
        images = getattr(request, "mm_features", None)  # from 0.10.2 on
        tokens = _prompt(request)
        if images is None or tokens is None or not self.token_chain:
            return False
        if not all(image.data and not _EMBEDDINGS.isdisjoint(image.data) for image in images):
            return False
        if not images:
            by_tokens = self._common(self.token_chain, tokens)
            return not self.chain or by_tokens > self._common(self.chain, tokens, request)
        places = self._places(tokens)
        return not places or self._common(self.chain, tokens, request) != places[-1]

    def _places(self, tokens: list[int]) -> list[int]:
        every = _places(self.tokens, self.prompt_tokens)
        return [place for place in every if place <= len(tokens)]

    def _common(self, chain: bytes, tokens: list[int], request: Any = None) -> int:
        """Returns the last place up to which a chain has the hashes of these tokens."""
        found, places = 0, self._places(tokens)
        for number, (place, own) in enumerate(
            zip(places, _hashes(tokens, places, request), strict=True)
        ):
            if own != chain[number * _HASH_BYTES : (number + 1) * _HASH_BYTES]:
                break
            found = place
        return found


def names_images(scheduler: Any) -> bool:
    """True if vLLM names images by their content.

    It numbers them where prefix cache and processor cache (``mm_processor_cache_gb``) are both off.
    """
    config = scheduler.vllm_config
    if config.cache_config.enable_prefix_caching:
        return True
    of_images = getattr(getattr(config, "model_config", None), "multimodal_config", None)
    return bool(getattr(of_images, "mm_processor_cache_gb", 0))


def state_prompt(request: Any, tokens: int, *, names_images: bool) -> StatedPrompt:
    """Returns what to state of a request's first tokens, whose keys and values are held.

    Args:
        names_images: False where names of images do not follow from their content.
    """
    known = _prompt(request)
    is_named, has_images = _is_named(request, names_images), getattr(request, "mm_features", None)
    if known is None or not (is_named or has_images):
        return StatedPrompt(tokens, tokens, b"")
    prompt_tokens = min(tokens, len(known))
    if tokens > len(known):  # nobody has computed the keys and values of the last token
        known = [*known, *request.output_token_ids][: max(len(known), request.num_tokens - 1)]
    tokens = min(tokens, len(known))
    places = _places(tokens, prompt_tokens)
    chain = b"".join(_hashes(known, places, request)) if is_named else b""
    token_chain = b"".join(_hashes(known, places)) if has_images else b""
    return StatedPrompt(tokens, prompt_tokens, chain, token_chain)


def read_prompt(parameters: Mapping[str, Any]) -> StatedPrompt | None:
    """Returns what P has stated in its answer; None where it states nothing that is known here."""
    stated = parameters.get(FIELD)
    found = _FORM.fullmatch(stated) if isinstance(stated, str) else None
    texts = (found[3], found[4] or "") if found is not None else ()
    if found is None or any(len(text) % 4 for text in texts):
        return None
    tokens, prompt_tokens = int(found[1], 16), int(found[2], 16)
    chains = [urlsafe_b64decode(text) for text in texts]
    size_bytes = _HASH_BYTES * len(_places(tokens, prompt_tokens))
    if any(chain and len(chain) != size_bytes for chain in chains):
        return None
    return StatedPrompt(tokens, prompt_tokens, *chains)


def absent_images(scheduler: Any, request: Any) -> int:
    """Returns the tokens up to the end of the last image of which D has no content; 0 for none.

    The engine ends if it computes that image. None is absent where an encoder sends D the
    embeddings (EC consumer).
    """
    encoder = getattr(scheduler.vllm_config, "ec_transfer_config", None)
    if encoder is not None and encoder.is_ec_consumer:
        return 0
    places = (
        image.mm_position
        for image in getattr(request, "mm_features", None) or ()
        if image.data is None or (image.data and all(starmap(_is_metadata, image.data.items())))
    )
    return max((place.offset + place.length for place in places), default=0)


def _is_metadata(name: str, element: Any) -> bool:
    """True if a field of an image tells of its size alone, not of what it shows.

    From 0.20 on a client of ``/inference/v1/generate`` may name an image alone, and from 0.30 on
    send its metadata and what models keep in the host's memory: counts, masks and sizes.
    """
    return name in METADATA or getattr(getattr(element, "field", None), "keep_on_cpu", False)


def lacks_images(scheduler: Any, request: Any) -> bool:
    """True if a request of D's has not got the images of the prompt that its answer of P states."""
    stated = read_prompt(request.kv_transfer_params or {})
    if absent_images(scheduler, request):
        return True
    return stated is not None and stated.lacks_images(request)


def _prompt(request: Any) -> list[int] | None:
    """Returns the ids of a request's prompt; None where it is of embeddings."""
    if getattr(request, "prompt_embeds", None) is not None:  # from 0.10.1 on
        return None
    found: list[int] | None = request.prompt_token_ids
    return found


def _places(tokens: int, prompt_tokens: int) -> list[int]:
    """Returns the numbers of tokens that hashes cover: evenly apart, all of them, and the prompt.

    There are no more than ``_MOST_HASHES``.
    """
    if not 0 < prompt_tokens <= tokens:
        return []
    step = -(-tokens // ((_MOST_HASHES - 2) * _STEP_TOKENS)) * _STEP_TOKENS
    return sorted({*range(step, tokens, step), prompt_tokens, tokens})


def _is_named(request: Any, names_images: bool) -> bool:  # noqa: FBT001
    """True if all that a request holds beside its tokens has a name of its content."""
    images = getattr(request, "mm_features", None)  # from 0.10.2 on
    if images is None:
        return not getattr(request, "mm_hashes", None) and not request.has_encoder_inputs
    return not images or (names_images and all(map(_has_name, images)))


def _has_name(image: Any) -> bool:
    """True if an image has a name; vLLM draws those of a video's chunks (from 0.15 on)."""
    is_chunk = getattr(image, "modality", "") == "vision_chunk"
    return bool(image.identifier) and not (is_chunk and _DRAWN.fullmatch(image.identifier))


def _hashes(tokens: list[int], places: list[int], request: Any = None) -> Iterator[bytes]:
    """Yields the hash of a request's first tokens, for each of these numbers of tokens.

    Args:
        request: whose images and adapter count. Without one tokens alone do: vLLM may choose an
            adapter by the kind of an image.
    """
    adapter = None if request is None else request.lora_request
    name = None
    if adapter is not None:  # other weights have another path, of which P may see another part
        name = adapter.lora_name, PurePath(adapter.lora_path or "").name
    total = sha256(repr(name).encode())
    images = sorted(getattr(request, "mm_features", ()), key=lambda image: image.mm_position.offset)
    ids = _as_array(tokens[: places[-1]] if places else [])
    start = 0
    for place in places:
        total.update(ids[start:place])
        while images and images[0].mm_position.offset < place:
            image = images.pop(0)
            total.update(repr((image.mm_position.offset, image.identifier)).encode())
        start = place
        yield total.copy().digest()[:_HASH_BYTES]


def _as_array(tokens: list[int]) -> memoryview:
    try:
        return memoryview(array("I", tokens))
    except OverflowError:  # an id that no vocabulary has; this takes four times as long
        return memoryview(array("q", tokens))
