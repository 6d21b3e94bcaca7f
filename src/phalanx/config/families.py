"""Which kind of run each model family has: the type that a run file with that `model.family` is read as."""

from __future__ import annotations

from phalanx.config.field_data import FieldData
from phalanx.config.graph_data import GraphData
from phalanx.config.materials import MaterialsModel
from phalanx.config.model import Model
from phalanx.config.schema import LanguageRun, Run
from phalanx.config.weather import WeatherModel
from phalanx.errors import ConfigError


class WeatherRun(Run):
    """A run that trains a weather model."""

    model: WeatherModel
    data: FieldData


class MaterialsRun(Run):
    """A run that trains a model of molecules and materials."""

    model: MaterialsModel
    data: GraphData


RUNS: dict[str, type[Run]] = {"language": LanguageRun, "weather": WeatherRun, "materials": MaterialsRun}
"""By `model.family`."""
DEFAULT_FAMILY = "language"
"""Of a run file that names neither family nor preset."""


def model_kind(family: str) -> type[Model]:
    """The type of the `model` section of a family in `RUNS`."""
    kind = RUNS[family].model_fields["model"].annotation
    assert isinstance(kind, type) and issubclass(kind, Model)
    return kind


def require_language(run: Run, what: str) -> LanguageRun:
    """`run` as one of a language model. what: the thing that only these can do, as the subject of a sentence.

    Raises ConfigError for other families.
    """
    if not isinstance(run, LanguageRun):
        raise ConfigError(f"{what} works for model.family=language, not for model.family={run.model.family}")
    return run
