"""How large a model may be at all."""

import pytest

from phalanx.config.families import check_parameter_count
from phalanx.config.model import LanguageModel
from phalanx.errors import ConfigError

LARGEST = {"n_layers": 10_000, "d_model": 10**6, "n_heads": 1000, "vocab_size": 10**8, "max_positions": 10**9}


def test_a_model_no_computer_holds_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model: 160,200,020,001,000,000 parameters .* are more than 1,000,000,000,000"
    ):
        check_parameter_count(LanguageModel(**LARGEST))


def test_a_model_of_twenty_trillion_parameters_is_not() -> None:
    check_parameter_count(LanguageModel(**LARGEST | {"n_layers": 100, "d_model": 100_000}))
