"""Options of decoders: their ranges, and what does not go together is refused with its field, value and fix."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from phalanx.config.layers import RopeScaling
from phalanx.config.model import LanguageModel

SIZE = {"n_layers": 4, "d_model": 48, "n_heads": 6, "vocab_size": 97, "max_positions": 64}

LATENT = {"key_value_rank": 14, "rope_size": 4, "nope_size": 6, "value_size": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_fraction": 0.0}, "rotary_fraction"),
        ({"rotary_fraction": 1.5}, "rotary_fraction"),
        ({"rotary_fraction": 0.4}, "even head size, not 3 (rotary_fraction=0.4 of it)"),
        ({"rotary_fraction": 0.1}, "even head size, not 0 (rotary_fraction=0.1 of it)"),
        ({"rotary_fraction": 0.5, "positions": "alibi"}, "rotary_fraction has no effect with positions=alibi"),
        (
            {"rope_scaling": {"kind": "ntk"}, "positions": "learned"},
            "rope_scaling has no effect with positions=learned",
        ),
        (
            {"rope_scaling": {"kind": "ntk"}, "rotary_fraction": 0.25},
            "kind=ntk needs 4 rotated features of a head, not 2",
        ),
        ({"sliding_window": 0}, "sliding_window"),
        ({"global_every": 2}, "global_every=2 has no effect without sliding_window; set it to 0"),
        ({"global_every": 1, "sliding_window": 8}, "global_every=1 leaves no layer with a window"),
        ({"local_rope_theta": 100.0}, "local_rope_theta=100.0 has no effect without sliding_window; set it to null"),
        (
            {"local_rope_theta": 100.0, "sliding_window": 8, "positions": "alibi"},
            "local_rope_theta has no effect with positions=alibi",
        ),
        ({"attention_softcap": 0.0}, "attention_softcap"),
        ({"latent": LATENT, "positions": "alibi"}, "set positions=rope, not alibi"),
        ({"latent": LATENT, "n_kv_heads": 2}, "n_kv_heads=2 does not fit latent attention; set it to null"),
        ({"latent": LATENT, "head_dim": 8}, "head_dim=8 does not fit latent attention; set it to null"),
        ({"latent": LATENT, "qk_norm": True}, "qk_norm=True has no place in latent attention; set it to false"),
        ({"latent": LATENT, "clip_qkv": 8.0}, "clip_qkv=8.0 has no place in latent attention; set it to null"),
        ({"latent": LATENT, "bias": True}, "bias=True has no place in latent attention; set it to false"),
        ({"latent": LATENT, "qkv_bias": True}, "qkv_bias=true has no place in latent attention; set it to null"),
        ({"latent": {**LATENT, "rope_size": 3}}, "even head size, not 3"),
        ({"latent": {**LATENT, "value_size": 11}}, "value_size=11 is more than nope_size + rope_size = 10"),
        ({"qk_norm": "all"}, "qk_norm"),
        ({"norm_position": "behind"}, "norm_position"),
        ({"attention_scale": 0.0}, "attention_scale"),
        ({"logit_softcap": -1.0}, "logit_softcap"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"mlp": "geglu", "experts": {"count": 4, "active": 2}}, "experts are SwiGLU networks"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        LanguageModel.model_validate({**SIZE, **fields})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear", "low_freq_factor": 2.0}, "low_freq_factor=2.0 has no effect with kind=linear"),
        ({"kind": "ntk", "original_positions": 4096}, "original_positions=4096 has no effect with kind=ntk"),
        ({"kind": "llama3", "beta_fast": 16.0}, "beta_fast=16.0 has no effect with kind=llama3"),
        ({"kind": "yarn", "beta_slow": 40.0}, "beta_slow=40.0 must be less than beta_fast=32.0"),
        ({"kind": "yarn", "mscale": 1.0}, "give both or neither"),
        ({"kind": "dynamic"}, "kind"),
    ],
    ids=str,
)
def test_scalings_take_the_fields_of_their_kind(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RopeScaling.model_validate(fields)
    assert message in str(raised.value)


def test_every_rotary_share_either_rotates_that_share_or_is_refused() -> None:
    for head_dim, hundredths in itertools.product((2, 6, 8, 20, 64), range(1, 101)):
        fraction = hundredths / 100
        size = int(head_dim * fraction)
        fields = {**SIZE, "head_dim": head_dim, "rotary_fraction": fraction}
        if size < 2 or size % 2:
            with pytest.raises(ValidationError, match="even head size"):
                LanguageModel.model_validate(fields)
        else:
            rope = LanguageModel.model_validate(fields).layer(0).attention.rope
            assert rope is not None
            assert rope.size == size


@pytest.mark.parametrize("global_every", [0, 2, 3, 4, 9])
def test_every_so_many_th_layer_is_global(global_every: int) -> None:
    model = LanguageModel.model_validate({**SIZE, "n_layers": 9, "sliding_window": 8, "global_every": global_every})
    counted = [number for number in range(9) if model.layer(number).attention.window is None]
    assert counted == ([] if global_every == 0 else [n - 1 for n in range(global_every, 10, global_every)])
    assert sum(model.layer_kinds().values()) == 9


def test_what_was_written_out_is_read_back() -> None:
    for kind in ("llama3", "linear", "ntk", "yarn"):
        model = LanguageModel.model_validate({**SIZE, "rope_scaling": {"kind": kind}, "qk_norm": "whole"})
        assert LanguageModel.model_validate(model.model_dump()) == model


def test_yarn_scales_attention_as_deepseek_does() -> None:
    """DeepSeek-V3 (arXiv:2412.19437): factor 40 and mscale 1 of both make 1.3689 of queries times keys, and 1 of angles."""
    scaling = RopeScaling(kind="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    model = LanguageModel.model_validate({**SIZE, "rope_scaling": scaling.model_dump()})
    assert model.layer(0).attention.scale == pytest.approx(1.3688879**2 * 8**-0.5, rel=1e-6)
    assert scaling.rotated_scale() == 1.0
    assert LanguageModel.model_validate(SIZE).layer(0).attention.scale is None
