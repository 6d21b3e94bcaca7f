"""What a checkpoint of a run says beside its tensors, and refusing one that no run can have written."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.checkpoint import Checkpoint, CheckpointDamaged, RngState

_Number = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class ScalerState(BaseModel):
    """What `torch.amp.GradScaler` keeps."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    scale: _Number
    growth_factor: _Number
    backoff_factor: _Number
    growth_interval: Annotated[int, Field(ge=1)]
    growth_tracker: Annotated[_Count, Field(alias="_growth_tracker")]


class TrainingState(BaseModel):
    """Fields of state.json that every run writes; its family may add more."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    step: _Count
    """Optimizer steps done."""
    data_fingerprint: Annotated[str, Field(min_length=1)]
    """Of the samples that the run reads."""
    scaler: ScalerState | None
    """The loss scale of a run in fp16."""
    rng: RngState
    run: Annotated[str, Field(min_length=1)]
    """The resolved run file."""


def check_state(checkpoint: Checkpoint, state: dict[str, Any]) -> TrainingState:
    """Return the state of `checkpoint`, checked. Raises CheckpointDamaged naming the first field that is wrong."""
    where = f"{checkpoint.path}/state.json"
    try:
        found = TrainingState.model_validate(state)
    except ValidationError as error:
        raise damaged_field(where, error) from error
    if found.step != checkpoint.step:
        raise CheckpointDamaged(f"{where}: step={found.step} in the checkpoint of step {checkpoint.step}")
    return found


def damaged_field(where: str, error: ValidationError) -> CheckpointDamaged:
    """The error that says which field of a state is wrong, and how."""
    problem = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return CheckpointDamaged(f"{where}: {name} is missing")
    return CheckpointDamaged(f"{where}: {name}={str(problem['input'])[:80]!r}: {problem['msg']}")
