"""`phalanx predict`: energies, forces and stresses of any number of structures, streamed to files."""

from __future__ import annotations

from collections import Counter

import yaml

from phalanx.cli.console import print_json, print_lines, show_preparation
from phalanx.cli.options.models import PredictArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.ensemble.members import Share
from phalanx.errors import ConfigError
from phalanx.families.materials.evaluation.streamed_predictions import PredictionOptions, stream_predictions
from phalanx.families.materials.evaluation.structure_predictor import StructurePredictor
from phalanx.layout.mesh import leave_process_group


def run_predict(asked: PredictArguments) -> None:
    """Run the subcommand."""
    try:
        fields = yaml.safe_load(asked.source or "{}")
    except yaml.YAMLError as error:
        raise ConfigError(f"--source {asked.source!r} is no YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"--source {asked.source!r} is no mapping; give fields of a source, such as 'length_unit: bohr'"
        )
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    predictor = StructurePredictor(asked.checkpoint, branch=asked.branch, device=device, precision=asked.precision)
    options = PredictionOptions(asked.pools, fields, asked.part, asked.batch_atoms)
    with show_preparation() as report:
        found = stream_predictions(predictor, options, asked.out, report, Share(ranks.rank, ranks.world_size))
    leave_process_group()
    if found is None:
        return
    if asked.as_json:
        print_json({"out": str(asked.out), **found.model_dump(mode="json", exclude={"parts", "plan"})})
        return
    print_lines([f"{found.structures:,} structures in {len(found.parts):,} parts of {asked.out}"])
    reasons = sum((Counter(part.reasons) for part in found.parts), Counter[str]())
    if found.without:
        first = "; ".join(reason for reason, _ in reasons.most_common(3))
        print_lines([f"warning: {found.without:,} structures have no predictions, and NaN: {first}"], style="yellow")
