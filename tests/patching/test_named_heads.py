"""The numbers of KV heads that configurations name, and those that a layer may have in all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvpatch.worker.local_geometry import named_heads_of

from .test_remote_geometry import ours_of


def _model(**names):
    return SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: names))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, {4, 8}),  # MiMo-V2
        ({"num_key_value_heads": 8, "per_layer_config": {"5": {"num_key_value_heads": 2}}}, {8, 2}),
        ({"num_attention_groups": 8, "num_attention_heads": 64}, {8}),  # Step-3.5
        ({"attention_other_setting": {"num_attention_groups": 4}}, {4}),
        ({"num_key_value_heads_per_layer": [8, 4, [2]]}, {8, 4, 2}),
        ({"num_key_value_heads": None, "vision_config": {"num_key_value_heads": 16}}, set()),
        ({"encoder_num_key_value_heads": 3, "decoder_num_key_value_heads": 5}, {5}),
        ({"num_kv_heads": "8"}, set()),
        ({}, set()),
    ],
)
def test_of_a_configuration(names, found):
    config = SimpleNamespace(model_config=_model(**names), speculative_config=None)

    assert named_heads_of(config) == found


def test_of_a_draft_model_too():
    model, draft = _model(num_key_value_heads=8), _model(num_kv_heads=2)
    speculating = SimpleNamespace(draft_model_config=draft)

    found = named_heads_of(SimpleNamespace(model_config=model, speculative_config=speculating))

    assert found == {8, 2}


@pytest.mark.parametrize(
    ("ranks", "own", "named", "totals"),
    [
        (2, 4, {2}, {8}),  # several heads on a rank are on no other
        (8, 1, {4, 8}, {4, 8}),
        (8, 1, {16}, {4}),  # too many for one on a rank
        (2, 1, {2}, {2}),
        (2, 1, set(), {1, 2}),  # nothing names them
        (1, 1, {8}, {1}),
    ],
)
def test_of_a_layer_on_all_ranks(ranks, own, named, totals):
    ours = replace(ours_of(), tp_size=ranks, named_heads=frozenset(named))

    assert ours.totals_of(own) == totals
