"""What is declared about parameters, against the modules themselves: every option that adds or removes one."""

from __future__ import annotations

import itertools
import math
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from phalanx.config.layers import MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.config.presets import load_preset, preset_names
from phalanx.families.language.declare import DeclaredLanguage, ParameterKind
from phalanx.families.language.decoder import Decoder
from phalanx.nn.layers import Linear, Norm
from phalanx.nn.parameters import InitRule

OPTIONS: dict[str, list[object]] = {
    "positions": ["learned", "alibi", "rope"],
    "norm": ["layernorm", "rmsnorm"],
    "mlp": ["gelu", "gelu_tanh", "swiglu"],
    "bias": [False, True],
    "tied_head": [False, True],
    "qk_norm": [False, True, "whole"],
    "norm_position": ["pre", "sandwich"],
    "n_kv_heads": [None, 2],
}
COMBINATIONS = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
LANGUAGE_PRESETS = [name for name in preset_names() if load_preset(name).family == "language"]


def shape(options: dict[str, object]) -> LanguageModel:
    size = {"n_layers": 2, "d_model": 16, "n_heads": 4, "vocab_size": 11, "max_positions": 10, "init_std": 0.03}
    return LanguageModel.model_validate({**size, **options})


def parameter_names(model: LanguageModel) -> dict[str, nn.Parameter]:
    with torch.device("meta"):
        return dict(Decoder(model).named_parameters())


def kind_by_module(model: LanguageModel) -> dict[str, ParameterKind]:
    """The kind of each parameter as the class of the module that owns it tells; names play no part."""
    with torch.device("meta"):
        decoder = Decoder(model)
    kinds: dict[str, ParameterKind] = {}
    for path, module in decoder.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if isinstance(module, Norm):
                kinds[name] = "bias" if parameter is module.bias else "norm"
            elif isinstance(module, Linear):
                kinds[name] = "bias" if parameter is module.bias else "matrix"
            else:
                kinds[name] = "embedding" if module is decoder.embedding else "matrix"
    return kinds


def rule_of(model: LanguageModel, name: str) -> InitRule:
    return next(rule for pattern, rule in DeclaredLanguage(model, 1).initial_rules() if fnmatchcase(name, pattern))


def test_every_parameter_of_every_shape_has_the_kind_of_its_module() -> None:
    for options in COMBINATIONS:
        model = shape(options)
        expected = kind_by_module(model)
        assert {name: DeclaredLanguage(model, 1).parameter_kind(name) for name in parameter_names(model)} == expected, (
            options
        )


def test_kinds_of_the_parameters_that_look_like_others() -> None:
    names = parameter_names(shape({"positions": "learned", "norm": "layernorm", "bias": True, "qk_norm": True}))
    kinds = {
        "embedding.weight": "embedding",
        "embedding.positions": "embedding",
        "head.weight": "matrix",
        "head.norm.weight": "norm",
        "head.norm.bias": "bias",
        "blocks.0.attention.query_norm.weight": "norm",
        "blocks.1.attention.key_norm.weight": "norm",
        "blocks.1.attention_norm.bias": "bias",
        "blocks.1.attention.qkv.bias": "bias",
    }
    assert kinds.keys() <= names.keys()
    declared = DeclaredLanguage(shape({}), 1)
    assert {name: declared.parameter_kind(name) for name in kinds} == kinds


def test_a_tied_head_has_no_weight_of_its_own() -> None:
    assert "head.weight" not in parameter_names(shape({"tied_head": True}))
    assert "head.weight" in parameter_names(shape({"tied_head": False}))


def test_every_parameter_of_every_shape_begins_as_its_kind_does() -> None:
    for number, options in enumerate(COMBINATIONS):
        # A weight that 1 is added to begins at 0.
        offset = number % 2 == 1
        model = shape({**options, "norm_offset": offset})
        constants = {"norm": InitRule.constant(0.0 if offset else 1.0), "bias": InitRule.constant(0.0)}
        for name, kind in kind_by_module(model).items():
            residual = name.endswith((".attention.output.weight", ".mlp.down.weight"))
            normal = InitRule.normal(0.03 / math.sqrt(2 * 2) if residual else 0.03)
            assert rule_of(model, name) == constants.get(kind, normal), (options, name)


@pytest.mark.parametrize("preset", LANGUAGE_PRESETS)
def test_matrices_that_write_to_the_residual_stream_begin_smaller(preset: str) -> None:
    model = load_preset(preset).model(n_layers=5)
    assert isinstance(model, LanguageModel)
    smaller = [name for name in parameter_names(model) if rule_of(model, name).value == model.init_std / math.sqrt(10)]
    expected = []
    for number in range(5):
        mlp = model.layer(number).mlp
        last = ["mlp.down.weight"]
        if isinstance(mlp, MixtureConfig):
            last = ["mlp.experts.down", *([] if mlp.shared is None else ["mlp.shared.down.weight"])]
        expected += [f"blocks.{number}.{part}" for part in ("attention.output.weight", *last)]
    assert smaller == expected
